"""Summary of back-tests: errors of every forecaster, and how often intervals held."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.answers import Answer
from forerun.convergence.backtest import CutResult
from forerun.convergence.held_out import HeldOutForecast, leave_jobs_out
from forerun.convergence.mixture import Tier

__all__ = ["Backtest", "summary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backtest(Answer):
    """Forecasters tested on finished runs.

    Attributes:
        num_runs, num_jobs: Tested.
        cuts: Shares of the run.
        errors: Mean absolute error of the final value, on the error scale, of each forecaster at each cut.
        mixture_errors: The same of the mixture, by tier.
        coverage_90: Coverage of its 90 % interval, by tier and cut, jobs left out in turn.
    """

    num_runs: int
    num_jobs: int
    cuts: tuple[float, ...]
    errors: Mapping[str, Mapping[float, float]]
    mixture_errors: Mapping[str, Mapping[float, float]]
    coverage_90: Mapping[str, Mapping[float, float]]

    def rounded_coverage(self) -> dict[str, dict[str, float]]:
        """Coverage as it is stored with the figures."""
        return {
            tier: {f"{cut:g}": round(value, 3) for cut, value in row.items()}
            for tier, row in self.coverage_90.items()
        }


def summary_of(results: Sequence[CutResult], held: Sequence[HeldOutForecast] | None = None) -> Backtest:
    """Summary of single cuts.

    Args:
        results: The cuts.
        held: The same with jobs left out in turn; made if None.
    """
    cuts = tuple(dict.fromkeys(sorted(r.cut for r in results)))
    names = list(dict.fromkeys(name for r in results for name in r.paths))
    errors = {
        name: {
            cut: float(np.mean([r.miss_of(name) for r in results if r.cut == cut and name in r.paths]))
            for cut in cuts
            if any(r.cut == cut and name in r.paths for r in results)
        }
        for name in names
    }
    jobs = {r.run.job for r in results}
    if held is None:
        held = leave_jobs_out(results) if len(jobs) > 1 else []
    tested = held

    def by_tier(value: Callable[[HeldOutForecast], float]) -> dict[str, dict[float, float]]:
        return {
            str(tier): {
                cut: float(np.mean([value(h) for h in tested if h.tier is tier and h.result.cut == cut]))
                for cut in cuts
                if any(h.tier is tier and h.result.cut == cut for h in tested)
            }
            for tier in Tier
            if any(h.tier is tier for h in tested)
        }

    return Backtest(
        num_runs=len({id(r.run) for r in results}),
        num_jobs=len(jobs),
        cuts=cuts,
        errors=errors,
        mixture_errors=by_tier(lambda h: abs(h.forecast - h.actual)),
        coverage_90=by_tier(lambda h: h.is_covered),
    )
