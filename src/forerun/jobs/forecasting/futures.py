"""Equally likely futures of a curve: how far each lies from the forecast, and when it reaches a target."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.jobs.forecasting.backtest_table import HORIZONS, LEVELS, BacktestTable
from forerun.jobs.forecasting.curve import Floats
from forerun.jobs.forecasting.forecaster import Prefix
from forerun.jobs.forecasting.mixture import Mixture, Tier

__all__ = ["RANKS", "TargetTimes", "between_rows", "futures_of", "stored_quantiles", "target_times"]

RANKS = np.linspace(0.025, 0.975, 191)
"""Ranks of the futures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTimes:
    """When a target is reached.

    Attributes:
        probability: Of having reached it by each point to come, (m,).
        epochs: By which it is reached with probability 0.1, 0.5 and 0.9; infinite if not by the end.
        likely_epoch: The epoch whose expected relative error is least; infinite if that is not by the end.
    """

    probability: Floats
    epochs: tuple[float, float, float]
    likely_epoch: float


def stored_quantiles(tier: Tier, table: BacktestTable, progress: float) -> Floats:
    """Quantiles of the scaled residual, (horizons, levels); without back-tests those of a normal spread."""
    if table.has(tier):
        return table.quantiles(tier, progress)
    normal = [-1.96, -1.645, -1.28, -0.84, -0.52, -0.25, 0, 0.25, 0.52, 0.84, 1.28, 1.645, 1.96]
    return np.tile(np.asarray(normal), (len(HORIZONS), 1))


def futures_of(mix: Mixture, prefix: Prefix, stored: Floats) -> Floats:
    """Errors of equally likely futures at the points to come, (ranks, m).

    Args:
        mix: The mixture.
        prefix: The run so far.
        stored: Quantiles of the scaled residual, (horizons, levels).
    """
    seen = prefix.num_seen
    moved = _quantile_curves(prefix, stored)
    return np.asarray(np.maximum(mix.errors[seen:] + mix.scale[seen:] * moved, 0.0), dtype=float)


def _quantile_curves(prefix: Prefix, stored: Floats) -> Floats:
    """Scaled residual of each of ``RANKS`` at each point to come, (ranks, m)."""
    to_come = prefix.epochs[prefix.num_seen :]
    now = float(prefix.epochs[prefix.num_seen - 1])
    share = (to_come - now) / max(float(prefix.epochs[-1]) - now, 1e-12)
    at_levels = np.stack(
        [np.interp(share, (0.0, *HORIZONS), np.concatenate([[0.5 * c[0]], c])) for c in stored.T]
    )
    where = np.interp(RANKS, LEVELS, np.arange(len(LEVELS)))
    return between_rows(at_levels, where)


def between_rows(rows: Floats, where: Floats) -> Floats:
    """Rows at fractional row numbers, (len(where), columns)."""
    low = np.minimum(np.floor(where).astype(int), len(rows) - 2)
    share = (where - low)[:, None]
    return np.asarray((1 - share) * rows[low] + share * rows[low + 1], dtype=float)


def target_times(futures: Floats, to_come: Floats, wanted: float, now: tuple[float, float]) -> TargetTimes:
    """When equally likely futures reach an error.

    Args:
        futures: Errors of equally likely futures, (ranks, m).
        to_come: Epochs of the points, (m,).
        wanted: The error to reach.
        now: The last epoch seen and the best error so far.
    """
    if not len(to_come):
        return TargetTimes(probability=np.zeros(0), epochs=(float("inf"),) * 3, likely_epoch=float("inf"))
    best = np.minimum.accumulate(futures, axis=1)
    reached = np.asarray([_crossing(row, to_come, wanted, *now) for row in best])
    probability = np.asarray([np.mean(reached <= epoch) for epoch in to_come])
    # The ranks end at 2.5 and 97.5 %: what lies outside is said to be neither certain nor impossible.
    probability = 0.025 + 0.95 * probability
    order = np.sort(reached)
    levels = (np.arange(len(order)) + 0.5) / len(order)
    times = tuple(float(order[min(len(order) - 1, int(np.searchsorted(levels, q)))]) for q in (0.1, 0.5, 0.9))
    return TargetTimes(
        probability=probability,
        epochs=(times[0], times[1], times[2]),
        likely_epoch=_least_error(order, float(to_come[-1])),
    )


def _least_error(reached: Floats, end: float) -> float:
    """The epoch whose expected relative error is least: the median with weights 1 / epoch; infinite if that is never.

    Args:
        reached: When each future reaches the target, ascending, infinite if never.
        end: End of the run, which stands for never in the weights.
    """
    weights = np.cumsum(1 / np.maximum(np.minimum(reached, end), 1e-12))
    return float(reached[int(np.searchsorted(weights, 0.5 * weights[-1]))])


def _crossing(best: Floats, epochs: Floats, wanted: float, last: float, best_seen: float) -> float:
    """First epoch at which a falling path is at or below the wanted error; infinite if never."""
    hits = np.flatnonzero(best <= wanted)
    if not len(hits):
        return float("inf")
    i = int(hits[0])
    before_epoch, before = (last, best_seen) if i == 0 else (float(epochs[i - 1]), float(best[i - 1]))
    share = (before - wanted) / max(before - float(best[i]), 1e-12)
    return before_epoch + min(1.0, max(0.0, share)) * (float(epochs[i]) - before_epoch)
