"""Summary of back-tests: errors of every forecaster, and how often intervals held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from forerun.answers import Answer
from forerun.convergence.backtest import CutResult, StoredRun, mean_of_origins
from forerun.convergence.held_out import HeldOutForecast, leave_origins_out
from forerun.convergence.mixture import Tier

__all__ = ["Backtest", "MeanOfRuns", "summary_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Backtest(Answer):
    """Forecasters tested on finished runs.

    Attributes:
        num_runs, num_jobs, num_origins: Tested.
        cuts: Shares of the run.
        errors: Mean absolute error of the final value, on the error scale, of each forecaster at each cut.
        mixture_errors: The same of the mixture, by tier.
        coverage_90, width_90: Coverage and width of its 90 % interval, by tier and cut, origins left out in turn.
    """

    num_runs: int
    num_jobs: int
    num_origins: int
    cuts: tuple[float, ...]
    errors: Mapping[str, Mapping[float, float]]
    mixture_errors: Mapping[str, Mapping[float, float]]
    coverage_90: Mapping[str, Mapping[float, float]]
    width_90: Mapping[str, Mapping[float, float]]

    def rounded_coverage(self) -> dict[str, dict[str, float]]:
        """Coverage as it is stored with the figures."""
        return {
            tier: {f"{cut:g}": round(value, 3) for cut, value in row.items()}
            for tier, row in self.coverage_90.items()
        }


MeanOfRuns = Callable[[Iterable[tuple[StoredRun, float]]], float]
"""From a figure of each run to that of all."""


def summary_of(
    results: Sequence[CutResult],
    held: Sequence[HeldOutForecast] | None = None,
    mean: MeanOfRuns = mean_of_origins,
) -> Backtest:
    """Summary of single cuts.

    Args:
        results: The cuts.
        held: The same with origins left out in turn; made if None.
        mean: How runs are weighed; runs of a job alike, jobs of an origin, and origins, if not given.
    """
    cuts = tuple(dict.fromkeys(sorted(r.cut for r in results)))
    names = list(dict.fromkeys(name for r in results for name in r.paths))
    if held is None:
        held = leave_origins_out(results) if len({r.run.origin for r in results}) > 1 else []
    tested = held

    def by_name(name: str) -> dict[float, float]:
        able = {cut: [r for r in results if r.cut == cut and name in r.paths] for cut in cuts}
        return {cut: mean((r.run, r.miss_of(name)) for r in found) for cut, found in able.items() if found}

    def by_tier(value: Callable[[HeldOutForecast], float]) -> dict[str, dict[float, float]]:
        found = {}
        for tier in dict.fromkeys(h.tier for h in tested):
            of_tier = {cut: [h for h in tested if h.tier is tier and h.result.cut == cut] for cut in cuts}
            found[str(tier)] = {
                cut: mean((h.result.run, value(h)) for h in of_cut)
                for cut, of_cut in of_tier.items()
                if of_cut
            }
        return {str(tier): found[str(tier)] for tier in Tier if str(tier) in found}

    return Backtest(
        num_runs=len({id(r.run) for r in results}),
        num_jobs=len({r.run.job for r in results}),
        num_origins=len({r.run.origin for r in results}),
        cuts=cuts,
        errors={name: by_name(name) for name in names},
        mixture_errors=by_tier(lambda h: abs(h.forecast - h.actual)),
        coverage_90=by_tier(lambda h: h.is_covered),
        width_90=by_tier(lambda h: h.high_90 - h.low_90),
    )
