"""Objectives of a study, the value of a trial, and the budget with the time that the study still needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forerun.base.errors import UsageError, near_matches
from forerun.base.units import parse_amount
from forerun.script.tuning.space import Metric
from forerun.script.tuning.trial import TrialResult

__all__ = [
    "OBJECTIVES",
    "Budget",
    "Objective",
    "by_steps",
    "parse_budget",
    "parse_objectives",
    "time_left_s",
    "value_of",
]


_WORST = 1e7


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """One objective that a study optimises; unless it says otherwise, the less the better, over the whole run.

    Attributes:
        name: Name of the objective on the command line.
        unit: Unit of the objective's values.
        is_rising: True if a larger value is better.
        needs_whole_run: True if the script must run to its end.
        needs_metric: True if the script must print a metric.
    """

    name: str
    unit: str = "s"
    is_rising: bool = False
    needs_whole_run: bool = True
    needs_metric: bool = False

    @property
    def worst(self) -> float:
        """Value of a trial that did not reach the objective: finite, and worse than any other."""
        return 0.0 if self.is_rising else _WORST


OBJECTIVES = {
    objective.name: objective
    for objective in (
        Objective(name="speed", unit="samples/s", is_rising=True, needs_whole_run=False),
        Objective(name="time-to-target", needs_metric=True),
        Objective(name="accuracy", unit="", is_rising=True, needs_metric=True),
        Objective(name="cost", unit="USD"),
        Objective(name="time"),
    )
}
"""All objectives by name."""


_STEPS_PER_S = "steps/s"


def by_steps(objectives: Sequence[Objective]) -> tuple[Objective, ...]:
    """The objectives, with speed in steps a second, for a script whose samples cannot be counted."""
    return tuple(replace(each, unit=_STEPS_PER_S) if each.name == "speed" else each for each in objectives)


def parse_objectives(text: str) -> tuple[Objective, ...]:
    """One objective, or several separated by commas.

    Raises:
        UsageError: No objective has one of the names, or a name stands twice.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in OBJECTIVES:
            raise UsageError(
                f"expected an objective ({', '.join(OBJECTIVES)}), got '{name}'{near_matches(name, OBJECTIVES)}"
            )
    if not names or len(set(names)) < len(names):
        raise UsageError(f"expected one objective or several different ones, got '{text}'")
    return tuple(OBJECTIVES[name] for name in names)


def value_of(
    objective: Objective, result: TrialResult, metric: Metric | None, price_usd_per_hour: float | None
) -> float | None:
    """Value of a trial; None if the trial did not get that far."""
    if objective.name == "speed":
        if objective.unit == _STEPS_PER_S:
            return 1.0 / result.step_time_s if result.step_time_s else None
        return result.rate_samples_per_s
    reached_s = _time_to_target_s(result, metric)
    if objective.name == "time-to-target":
        return reached_s
    if objective.name == "cost":
        used_s = reached_s if metric is not None and metric.target is not None else result.wall_s
        return None if used_s is None or price_usd_per_hour is None else used_s * price_usd_per_hour / 3600.0
    if objective.name == "time":
        return result.wall_s if result.outcome == "done" else None
    best = result.best(is_rising=metric is None or metric.is_rising)
    if best is None or metric is None:
        return None
    # The sign of a falling metric is turned, so that the objective always rises.
    return best if metric.is_rising else -best


def _time_to_target_s(result: TrialResult, metric: Metric | None) -> float | None:
    if metric is None or metric.target is None:
        return None
    for time_s, value in result.curve:
        if value >= metric.target if metric.is_rising else value <= metric.target:
            return time_s
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a study; None for no limit.

    Attributes:
        time_s: Wall time of all sessions together [s].
        num_trials: Number of finished trials.
        cost_usd: Price of the machine over that time [USD].
    """

    time_s: float | None = None
    num_trials: int | None = None
    cost_usd: float | None = None

    def seconds(self, price_usd_per_hour: float | None) -> float | None:
        """Limit of time that follows from time and money [s].

        Raises:
            UsageError: The budget is in money, and the machine has no price.
        """
        if self.cost_usd is None:
            return self.time_s
        if not price_usd_per_hour:
            raise UsageError("a budget in money needs the price of this machine: --price 1.89/h")
        by_cost_s = 3600.0 * self.cost_usd / price_usd_per_hour
        return by_cost_s if self.time_s is None else min(by_cost_s, self.time_s)


def parse_budget(text: str) -> Budget:
    """A budget such as ``2h``, ``40 trials``, ``10usd`` or several separated by commas.

    >>> parse_budget("2h, 40 trials")
    Budget(time_s=7200.0, num_trials=40, cost_usd=None)

    Raises:
        UsageError: A part cannot be read.
    """
    limits: dict[str, float | int] = {}
    for part in (part.strip() for part in text.split(",")):
        if count := re.fullmatch(r"(\d+)\s*trials?", part, re.IGNORECASE):
            limits["num_trials"] = int(count[1])
        elif re.search(r"\$|usd", part, re.IGNORECASE):
            limits["cost_usd"] = parse_amount(part, "money")
        else:
            limits["time_s"] = parse_amount(part, "time")
    if not all(limit > 0 for limit in limits.values()):
        raise UsageError(f"expected a budget above zero, such as 2h, '40 trials' or 10usd, got '{text}'")
    return Budget(**limits)  # type: ignore[arg-type]  # keys and types are those above


def time_left_s(
    durations_s: Sequence[float], *, num_left: int | None, budget_left_s: float | None, num_workers: int = 1
) -> float | None:
    """Time until a study ends, from the trials so far [s].

    Mean time of the finished trials times the number left, but never more than the time left. None before the first
    trial has finished.
    """
    by_trials = None
    if num_left is not None and durations_s:
        by_trials = sum(durations_s) / len(durations_s) * num_left / num_workers
    known = [value for value in (by_trials, budget_left_s) if value is not None]
    return max(0.0, min(known)) if known else None
