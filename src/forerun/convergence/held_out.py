"""Finished runs forecast as if their origin had never been seen, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.convergence.backtest import CutResult, MixedGroup, ResultGroup, mean_errors, summarise
from forerun.convergence.backtest_table import LEVELS, BacktestTable
from forerun.convergence.curve import Floats
from forerun.convergence.futures import stored_quantiles
from forerun.convergence.mixture import Tier

__all__ = ["HeldOutForecast", "leave_origins_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutForecast:
    """The final value of a run as forecast by a table that has not seen its origin.

    Attributes:
        result: The run at a cut, its annealing law with the drop that the table knows.
        tier: What was known.
        forecast: Final error forecast.
        low_90, high_90, low_80, high_80: Its intervals.
        table: What it rests on.
        quantiles: Of the scaled residual, (horizons, levels).
    """

    result: CutResult
    tier: Tier
    forecast: float
    low_90: float
    high_90: float
    low_80: float
    high_80: float
    table: BacktestTable
    quantiles: Floats

    @property
    def actual(self) -> float:
        """The true value."""
        return float(self.result.actual[-1])

    @property
    def is_covered(self) -> bool:
        """True if it lies in the 90 % interval."""
        return self.low_90 <= self.actual <= self.high_90


def leave_origins_out(results: Sequence[CutResult]) -> list[HeldOutForecast]:
    """Every result in every tier it has the data for, its origin left out of errors, drops and quantiles."""
    errors = mean_errors(results)
    found = []
    for origin in dict.fromkeys(r.run.origin for r in results):
        table = summarise(errors, {}, without_origin=origin)
        for group in errors.groups:
            if group.origin == origin:
                found += _held_out(group, table)
    return found


def _held_out(group: ResultGroup, table: BacktestTable) -> list[HeldOutForecast]:
    tier, cut, share = group.tier, group.cut, table.drop_shares[group.kind]
    mix = group.mixed(table.errors(tier, cut), table.num_origins(tier, cut), share)
    quantiles = stored_quantiles(tier, table, cut)
    ends = [_ends(mix, quantiles, level) for level in (0.05, 0.95, 0.1, 0.9)]
    return [
        HeldOutForecast(
            result=result.with_drop(share),
            tier=tier,
            forecast=float(mix.errors[index, -1]),
            low_90=low_90,
            high_90=high_90,
            low_80=low_80,
            high_80=high_80,
            table=table,
            quantiles=quantiles,
        )
        for index, (result, low_90, high_90, low_80, high_80) in enumerate(
            zip(group.results, *(end.tolist() for end in ends), strict=True)
        )
    ]


def _ends(mix: MixedGroup, quantiles: Floats, level: float) -> Floats:
    """Ends of an interval of the final values, on the side of the forecast that the level says, (runs,)."""
    moved = float(np.interp(level, LEVELS, quantiles[-1]))
    moved = min(moved, 0.0) if level < 0.5 else max(moved, 0.0)
    return np.maximum(0.0, mix.errors[:, -1] + mix.scale[:, -1] * moved)
