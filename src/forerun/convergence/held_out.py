"""Finished runs forecast as if their job had never been seen, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from forerun.convergence.backtest import CutResult, mean_errors, mixed, summarise, tiers_of
from forerun.convergence.backtest_table import LEVELS, BacktestTable
from forerun.convergence.curve import Floats
from forerun.convergence.futures import stored_quantiles
from forerun.convergence.mixture import Mixture, Tier

__all__ = ["HeldOutForecast", "leave_jobs_out"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutForecast:
    """The final value of a run as forecast by a table that has not seen its job.

    Attributes:
        result: The run at a cut.
        tier: What was known.
        forecast: Final error forecast.
        low_90, high_90, low_80, high_80: Its intervals.
        mix: The mixture.
        quantiles: Of the scaled residual, (horizons, levels).
    """

    result: CutResult
    tier: Tier
    forecast: float
    low_90: float
    high_90: float
    low_80: float
    high_80: float
    mix: Mixture
    quantiles: Floats

    @property
    def actual(self) -> float:
        """The true value."""
        return float(self.result.actual[-1])

    @property
    def is_covered(self) -> bool:
        """True if it lies in the 90 % interval."""
        return self.low_90 <= self.actual <= self.high_90


def leave_jobs_out(results: Sequence[CutResult]) -> list[HeldOutForecast]:
    """Every result in every tier it has the data for, its job left out of errors, quantiles and regression."""
    errors = mean_errors(results)
    found = []
    for job in dict.fromkeys(r.run.job for r in results):
        table = summarise(results, errors, {}, without_job=job)
        for result in (r for r in results if r.run.job == job):
            found += [_held_out(result, tier, table) for tier in tiers_of(result)]
    return found


def _held_out(result: CutResult, tier: Tier, table: BacktestTable) -> HeldOutForecast:
    mix = mixed(result, tier, table.errors(tier, result.cut))
    forecast = float(result.at_horizons(mix.errors)[-1])
    scale = float(result.at_horizons(mix.scale)[-1])
    nan = np.full(len(LEVELS), np.nan)
    quantiles = table.quantiles(tier, result.cut)[-1] if table.has(tier) else nan
    ends = [forecast + scale * float(np.interp(level, LEVELS, quantiles)) for level in (0.05, 0.95, 0.1, 0.9)]
    low_90, high_90, low_80, high_80 = (max(0.0, end) for end in ends)
    return HeldOutForecast(
        result=result,
        tier=tier,
        forecast=forecast,
        low_90=low_90,
        high_90=high_90,
        low_80=low_80,
        high_80=high_80,
        mix=mix,
        quantiles=stored_quantiles(tier, table, result.cut),
    )
