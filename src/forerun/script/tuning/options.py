"""Questions to ``tune``: its settings, each on the field that holds it, its objectives and its budget."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from forerun.base.errors import UsageError, near_matches
from forerun.base.units import parse_amount
from forerun.question.settings import setting

if TYPE_CHECKING:  # the help of the command line needs the settings alone
    from forerun.script.tuning.space import Metric
    from forerun.script.tuning.trial import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneSettings:
    """The settings of one search."""

    budget: str = setting(
        "15min",
        help="Budget of the search: 2h, '40 trials', 10usd, or several separated by commas.",
        group="main",
        metavar="2h",
    )
    objective: str = setting(
        "speed",
        help="speed, time, time-to-target, accuracy or cost; several separated by commas give a front.",
        group="main",
        metavar="NAMES",
    )
    metric: str | None = setting(
        None,
        help="Figure that the script prints, as NAME=0.81, NAME: 81 % or in a table.",
        group="target",
        metavar="NAME",
    )
    target: float | None = setting(None, help="Value of the metric to reach.", group="target")
    study: Path = setting(
        Path("forerun-study"),
        help="Folder of the study; an existing one is resumed, or shared.",
        group="output",
        default="forerun-study",
        metavar="FOLDER",
    )
    trial_s: float = setting(
        8.0,
        help="Time that a trial for speed spends on steps.",
        group="limits",
        default="8s",
        metavar="8s",
        above=0,
        flag="trial-time",
    )
    timeout_s: float = setting(
        1800.0,
        help="Longest time of a trial.",
        group="limits",
        default="30min",
        metavar="30min",
        above=0,
        flag="timeout",
    )
    memory_limit_bytes: float | None = setting(
        None,
        help="Most memory that a trial may use.",
        group="limits",
        default="that of the machine or the device",
        metavar="4GB",
        above=0,
        flag="memory",
    )
    max_accuracy_loss: float = setting(
        0.01,
        help="Loss of the metric that is accepted for speed: a share, relative to the value for losses.",
        group="limits",
        low=0,
        flag="max-loss",
    )
    price_usd_per_hour: float | None = setting(
        None,
        help="Price of this machine, for the objective cost and a budget in money [US dollars per hour].",
        group="price",
        metavar="1.89/h",
        low=0,
        flag="price",
    )
    device_index: str | None = setting(
        None,
        help="Device of the trials, the only one that the script then sees: cpu or cuda:N.",
        group="device",
        default="the first GPU if there is one",
        metavar="cuda:0",
        flag="device",
    )
    num_sessions: int = setting(
        1,
        help="Sessions that search at once, each on a GPU of its own where there are several, or a node of --ray.",
        group="device",
        low=1,
        flag="workers",
    )
    ray_address: str | None = setting(
        None,
        help="Ray cluster that trials run on: auto or HOST:PORT; its nodes must know the paths.",
        group="device",
        metavar="auto",
        flag="ray",
    )
    sampler: str = setting(
        "tpe",
        help="Sampler of values: tpe or random.",
        group="main",
        metavar="NAME",
        choices=("tpe", "random"),
    )
    seed: int | None = setting(None, help="Seed of the sampler.", group="main", low=0)
    with_pruning: bool = setting(
        False,
        help="For the objective accuracy: end runs whose forecast cannot win.",
        group="main",
        flag="prune",
    )
    model: str | None = setting(
        None,
        help="Model that the script trains, as in predict, but not a Keras model; its predicted steps and memory "
        "choose the first trials. On a processor this needs forerun calibrate first.",
        group="model",
        metavar="SPEC",
    )
    image_size: int | None = setting(
        None,
        help="Height and width of its images, if no argument of the script gives them [pixels].",
        group="model",
        low=1,
    )
    input_shape: tuple[int, ...] | None = setting(
        None,
        help="Shape of one of its samples, instead of an image size.",
        group="model",
        metavar="3,224,224",
        low=1,
    )
    sequence_length: int | None = setting(None, help="Tokens of one of its samples.", group="model", low=1)
    check: bool = setting(
        True,
        help="Run the best configuration in full beside the script as it is.",
        group="main",
        default="yes",
    )
    with_priors: bool = setting(
        True, help="The first trials come from the cost model.", group="main", default="yes", flag="priors"
    )
    with_memory_law: bool = setting(
        True,
        help="Trials are rejected by their predicted memory.",
        group="main",
        default="yes",
        flag="prediction",
    )


class TuneOptions(TypedDict, total=False):
    """Settings of a search by name, for type checkers; each is declared in ``TuneSettings``."""

    budget: str | None
    objective: str | None
    metric: str | None
    target: float | None
    study: Path | None
    trial_s: float | None
    timeout_s: float | None
    memory_limit_bytes: float | None
    max_accuracy_loss: float | None
    price_usd_per_hour: float | None
    device_index: str | None
    num_sessions: int | None
    ray_address: str | None
    sampler: str | None
    seed: int | None
    with_pruning: bool | None
    model: str | None
    image_size: int | None
    input_shape: Sequence[int] | None
    sequence_length: int | None
    check: bool | None
    with_priors: bool | None
    with_memory_law: bool | None


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
    reached_s = None
    if metric is not None:
        reached_s = next((time_s for time_s, value in result.curve if metric.is_reached(value)), None)
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
