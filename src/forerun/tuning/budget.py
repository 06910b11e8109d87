"""Budget of a study, and the time it still needs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import UsageError
from forerun.units import parse_amount

__all__ = ["Budget", "parse_budget", "time_left_s"]


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
