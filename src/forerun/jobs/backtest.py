"""Forecasters tested on finished runs, each as if its origin had never been seen: ``forerun forecast backtest``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import RecordError
from forerun.jobs.forecast import is_logged, rate_column, schedule_from
from forerun.jobs.forecasting.backtest import (
    CutResult,
    PriorOf,
    StoredRun,
    TierResult,
    cut_results,
    mean_of_origins,
    summarise,
    tier_results,
)
from forerun.jobs.forecasting.backtest_table import LEVELS, BacktestTable, save_table, stored_quantiles
from forerun.jobs.forecasting.curve import Curve, Floats, clean, error_scale
from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.prior import shipped_prior
from forerun.jobs.forecasting.schedule import LearningRateSchedule


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutForecast:
    """The final value of a run as forecast by a prior and a table that have not seen its origin.

    Attributes:
        of_tier: The forecast.
        ends: Ends of its 90 and 80 % intervals: low, high, low, high.
        quantiles: Of the scaled residual, (horizons, levels).
    """

    of_tier: TierResult
    ends: tuple[float, float, float, float]
    quantiles: Floats

    @property
    def result(self) -> CutResult:
        """The run at a cut."""
        return self.of_tier.result

    @property
    def tier(self) -> Tier:
        """Evidence that was used."""
        return self.of_tier.tier

    @property
    def forecast(self) -> float:
        """Final error forecast."""
        return float(self.of_tier.errors[-1])

    @property
    def actual(self) -> float:
        """The true value."""
        return float(self.result.actual[-1])

    @property
    def is_covered(self) -> bool:
        """True if it lies in the 90 % interval."""
        return self.ends[0] <= self.actual <= self.ends[1]


def leave_origins_out(
    results: Sequence[CutResult], prior_of: PriorOf = lambda origin: shipped_prior()
) -> list[HeldOutForecast]:
    """Every result in every tier it has the data for, its origin left out of the quantiles.

    Args:
        results: The cuts.
        prior_of: Of an origin, a prior that has not seen it; the shipped one has not seen a user's own runs.
    """
    forecasts = tier_results(results, prior_of)
    found = []
    for origin in dict.fromkeys(r.run.origin for r in results):
        table = summarise(forecasts, {}, without_origin=origin)
        found += [_held_out(f, table) for f in forecasts if f.result.run.origin == origin]
    return found


def _held_out(forecast: TierResult, table: BacktestTable) -> HeldOutForecast:
    quantiles = stored_quantiles(forecast.tier, table, forecast.result.cut)
    low_90, high_90, low_80, high_80 = (_end(forecast, quantiles, q) for q in (0.05, 0.95, 0.1, 0.9))
    return HeldOutForecast(of_tier=forecast, ends=(low_90, high_90, low_80, high_80), quantiles=quantiles)


def _end(forecast: TierResult, quantiles: Floats, level: float) -> float:
    """End of an interval of the final value, on the side of the forecast that the level says."""
    moved = float(np.interp(level, LEVELS, quantiles[-1]))
    moved = min(moved, 0.0) if level < 0.5 else max(moved, 0.0)
    return max(0.0, float(forecast.errors[-1] + forecast.scale[-1] * moved))


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
        # With one origin nothing can be left out, and figures of the fit itself would be flattering.
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
        width_90=by_tier(lambda h: h.ends[1] - h.ends[0]),
    )


def backtest(
    folder: str | Path,
    *,
    metric: str | None = None,
    schedule: Any = None,
    save: str | Path | None = None,
) -> Backtest:
    """Tests all forecasters on the finished runs of a folder; files of one sub-folder are runs of one job.

    Args:
        folder: Folder of the runs.
        metric: Name of the metric.
        schedule: The schedule of all runs, if known; "logged" or "logged:COLUMN" takes the rates in the file of each.
        save: File for the figures, to be used by ``forecast(..., backtest_file=...)``.

    Raises:
        RecordError: There are fewer than two runs that are long enough.
    """
    logged = is_logged(schedule)
    planned = None if logged else schedule_from(schedule, None)
    runs = _stored_runs(Path(folder), metric, planned, rate_column(schedule), logged)
    if len(runs) < 2:
        raise RecordError(f"a back-test needs two or more runs of nine points, got {len(runs)} in '{folder}'")
    results = cut_results(runs)
    found = summary_of(results)
    if save is not None:
        source = f"{len(runs)} runs of {Path(folder).name}"
        provenance = {"source": source, "coverage_90": found.rounded_coverage()}
        forecasts = tier_results(results, lambda origin: shipped_prior())
        save_table(summarise(forecasts, provenance), Path(save))
    return found


def _stored_runs(
    folder: Path,
    metric: str | None,
    schedule: LearningRateSchedule | None,
    rate: str | None,
    is_rate_logged: bool,
) -> list[StoredRun]:
    found = []
    for path in find_curve_files(folder):
        cleaned = clean(read_curve(path, metric, rate=rate))
        if cleaned is None or len(cleaned.curve) < 9:
            continue
        curve = cleaned.curve
        scale = error_scale(curve.values, curve.is_rising, curve.kind)
        found.append(
            StoredRun(
                table=folder.name,
                job=path.parent.relative_to(folder).as_posix(),
                name=path.name,
                epochs=curve.epochs,
                errors=np.maximum(scale.errors(curve.values), 1e-9),
                rates=_logged_rates(curve) if is_rate_logged else _planned_rates(curve, schedule),
                kind=curve.kind,
                metric=curve.metric,
                span=scale.span,
            )
        )
    return found


def _planned_rates(curve: Curve, schedule: LearningRateSchedule | None) -> Floats | None:
    known = schedule is not None and not schedule.follows_metric
    return schedule.rates(curve.epochs) if schedule is not None and known else None


def _logged_rates(curve: Curve) -> Floats | None:
    """Rates in the file of a finished run, relative to their peak; None where it has none."""
    rates = curve.learning_rates
    if rates is None or not np.all(np.isfinite(rates)) or float(np.max(rates)) <= 0:
        return None
    return np.asarray(np.maximum(rates, 0.0) / float(np.max(rates)), dtype=float)
