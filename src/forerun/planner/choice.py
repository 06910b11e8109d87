"""The choice of a candidate: limits, the best candidate, the binding limit, and the effect of uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.planner.candidates import HIGH, LOW, VALUE, CandidateTable
from forerun.planner.limits import Limit
from forerun.planner.pareto import pareto_front

__all__ = [
    "DEVICE_MEMORY",
    "OBJECTIVES",
    "Relaxation",
    "Sensitivity",
    "best_row",
    "excesses",
    "keeps",
    "nearest_miss",
    "objective_values",
    "pareto_rows",
    "relaxations",
    "sensitivity",
]

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

OBJECTIVES = {"time": "job_time_s", "cost": "cost_usd", "energy": "energy_j", "co2": "co2_g"}
"""Objectives that can be minimised, with their quantities."""

DEVICE_MEMORY = "memory of the device"
"""The limit that is always there."""

_TOLERANCE = 1e-9
_FRONT = ("job_time_s", "cost_usd", "energy_j")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """The change of a limit that admits a better candidate.

    Attributes:
        limit: The limit as it was written, or ``DEVICE_MEMORY``.
        factor: Needed bound over the bound as it is; above 1 for upper limits, below 1 for lower ones.
        bound: Needed bound in the unit used inside.
        row: The candidate that this admits.
        gain: Share by which the objective falls, NaN if nothing kept the limits before.
    """

    limit: str
    factor: float
    bound: float
    row: int
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """True if a choice holds if its estimate is off by its interval.

    Attributes:
        keeps_limits: Whether the choice keeps all limits at the bad end of its intervals.
        broken: Limits that it would break there.
        stays_best: Whether it is still the best there, the others being as predicted.
        rivals: Candidates that would be better then, best first.
        regret: Share by which it would be worse than the best of them, 0 without rivals.
    """

    keeps_limits: bool
    broken: tuple[str, ...]
    stays_best: bool
    rivals: tuple[int, ...]
    regret: float


def excesses(table: CandidateTable, limits: Sequence[Limit], end: int = VALUE) -> Floats:
    """Share by which each candidate breaks each limit, (limits + 1, n); zero or below where it keeps the limit.

    The last row is the memory of the device. A quantity that is not known breaks every limit on it, with
    infinity.

    Args:
        table: Candidates.
        limits: Limits.
        end: ``VALUE``, or ``HIGH`` for the bad end of every interval.
    """
    rows = [_excess(table, limit, end) for limit in limits]
    rows.append(table.values["peak_memory_bytes"][end] / table.device_memory_bytes - 1)
    return np.stack(rows)


def _excess(table: CandidateTable, limit: Limit, end: int) -> Floats:
    # The bad end of a quantity that should be large is its low end.
    bad = end if limit.is_upper or end == VALUE else LOW
    value = table.values[limit.quantity.field][bad]
    ratio = value / limit.bound if limit.is_upper else limit.bound / np.maximum(value, 1e-300)
    return np.where(np.isnan(value), np.inf, ratio - 1)


def keeps(excess: Floats) -> Bools:
    """True if each candidate keeps all limits, (n,)."""
    return np.asarray((excess <= _TOLERANCE).all(axis=0))


def objective_values(table: CandidateTable, minimize: str, end: int = VALUE) -> Floats:
    """The objective of each candidate, infinite where it is not known, (n,)."""
    values = table.values[OBJECTIVES[minimize]][end]
    return np.where(np.isnan(values), np.inf, values)


def best_row(table: CandidateTable, minimize: str, excess: Floats) -> int | None:
    """The candidate with the smallest objective among those that keep all limits; None if there is none.

    Among equals, the one with the smaller time is taken, then the one with the smaller cost.
    """
    rows = np.flatnonzero(keeps(excess) & np.isfinite(objective_values(table, minimize)))
    if not rows.size:
        return None
    ties = [np.nan_to_num(table.values[name][VALUE, rows], nan=np.inf) for name in ("cost_usd", "job_time_s")]
    return int(rows[np.lexsort([*ties, objective_values(table, minimize)[rows]])[0]])


def nearest_miss(excess: Floats) -> int:
    """The candidate whose worst excess is the smallest."""
    return int(np.argmin(excess.max(axis=0)))


def pareto_rows(table: CandidateTable, allowed: Bools) -> Ints:
    """Candidates on the front of time and cost, of time and energy where no price is known, fastest first.

    Where accuracies are known they are a third objective.
    """
    second = _FRONT[1] if np.isfinite(table.values[_FRONT[1]][VALUE]).any() else _FRONT[2]
    columns = [table.values[name][VALUE] for name in (_FRONT[0], second)]
    accuracy = table.values["accuracy"][VALUE]
    if np.isfinite(accuracy).any():
        columns.append(-accuracy)
    rows = np.flatnonzero(allowed)
    costs = np.stack([column[rows] for column in columns], axis=1)
    front = rows[pareto_front(costs)]
    return np.asarray(front[np.argsort(table.values[_FRONT[0]][VALUE, front], kind="stable")])


def relaxations(
    table: CandidateTable, limits: Sequence[Limit], minimize: str, excess: Floats
) -> tuple[Relaxation, ...]:
    """For each limit, the smallest change of it alone that admits a better candidate; smallest change first."""
    chosen = best_row(table, minimize, excess)
    objective = objective_values(table, minimize)
    before = objective[chosen] if chosen is not None else np.inf
    found = []
    for index, limit in enumerate(limits):
        others = np.delete(excess, index, axis=0)
        better = keeps(others) & (objective < before * (1 - 1e-6)) & np.isfinite(excess[index])
        rows = np.flatnonzero(better & (excess[index] > _TOLERANCE))
        if not rows.size:
            continue
        # The least change; of equal ones the best objective.
        row = int(rows[np.lexsort([objective[rows], excess[index, rows]])[0]])
        ratio = 1 + float(excess[index, row])
        factor = ratio if limit.is_upper else 1 / ratio
        gain = 1 - float(objective[row] / before) if np.isfinite(before) else float("nan")
        found.append(
            Relaxation(limit=limit.text, factor=factor, bound=limit.bound * factor, row=row, gain=gain)
        )
    return tuple(sorted(found, key=lambda item: max(item.factor, 1 / item.factor)))


def sensitivity(
    table: CandidateTable, limits: Sequence[Limit], minimize: str, chosen: int, num_rivals: int = 5
) -> Sensitivity:
    """True if the choice holds with its own estimate at the bad end and the others as predicted."""
    at_worst = excesses(table, limits, HIGH)[:, chosen]
    names = (*(limit.text for limit in limits), DEVICE_MEMORY)
    broken = tuple(name for name, excess in zip(names, at_worst, strict=True) if excess > _TOLERANCE)
    objective = objective_values(table, minimize)
    worst = float(objective_values(table, minimize, HIGH)[chosen])
    allowed = keeps(excesses(table, limits))
    rivals = np.flatnonzero(allowed & (objective < worst) & (np.arange(len(table)) != chosen))
    # A candidate that differs in batch size only is off by the same factor, so it is not a rival.
    same = (table.option[rivals] == table.option[chosen]) & (
        table.configuration[rivals] == table.configuration[chosen]
    )
    rivals = rivals[~same]
    ordered = rivals[np.argsort(objective[rivals], kind="stable")]
    return Sensitivity(
        keeps_limits=not broken,
        broken=broken,
        stays_best=not ordered.size,
        rivals=tuple(int(row) for row in ordered[:num_rivals]),
        regret=worst / float(objective[ordered[0]]) - 1 if ordered.size else 0.0,
    )
