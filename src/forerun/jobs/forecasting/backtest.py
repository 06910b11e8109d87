"""Forecasters tested on whole runs: cut at a share of the run, forecast, compared with what came.

``forerun forecast backtest`` does this with a user's own runs. Results of single cuts are summarised in the table that
the package needs later: the quantiles of (actual - forecast) / scale, per tier and share of the run. Everywhere runs of
a job weigh alike, jobs of an origin, and origins: a thousand runs of one project say nothing about the next project.
Leaving an origin out means leaving out all its runs, from the learned prior and from the quantiles. What
``forecast_curve`` refuses to forecast is not judged either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import RecordError
from forerun.jobs.forecasting.backtest_table import (
    LEVELS,
    BacktestTable,
    CutSummary,
    on_its_side,
    save_table,
    share_kept,
    stored_quantiles,
    weighted_quantiles,
)
from forerun.jobs.forecasting.curve import (
    Curve,
    Floats,
    MetricKind,
    clean,
    does_not_move,
    error_scale,
    is_not_learning,
    ran_away,
    without_outliers,
)
from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve
from forerun.jobs.forecasting.forecast import FEWEST_POINTS
from forerun.jobs.forecasting.forecaster import (
    MOST_SIBLINGS,
    Prefix,
    Tier,
    can_answer,
    forecaster_names,
    path_of,
    tiers_of,
)
from forerun.jobs.forecasting.prior import (
    CUTS,
    Evidence,
    LearnedPrior,
    evidence_of,
    horizon_values,
    shipped_prior,
    stacked,
)
from forerun.jobs.forecasting.schedule import LearningRateSchedule, is_logged, rate_column, schedule_from


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A finished run.

    Attributes:
        table: Where it comes from.
        origin: Family of logs it belongs to, left out together; a job is its own origin where none is named.
        job: Runs of one job are the same network on the same data.
        name: Which run.
        epochs: (n,).
        errors: On the scale of ``curve.error_scale``, (n,).
        rates: Relative learning rates, (n,), or None if the schedule is not known.
        kind: What the metric is.
        metric: Its name; siblings have the same.
        span: As in ``Prefix``.
        training_losses: As in ``Curve``, (n,), or None.
        cuts: Shares at which it is tested, those at which its metric would be taken.
    """

    table: str
    job: str
    name: str
    epochs: Floats
    errors: Floats
    rates: Floats | None = None
    kind: MetricKind = MetricKind.ACCURACY
    origin: str = ""
    metric: str = ""
    span: float = 1.0
    training_losses: Floats | None = None
    cuts: tuple[float, ...] = CUTS

    def __post_init__(self) -> None:
        if not self.origin:
            object.__setattr__(self, "origin", self.job)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """All forecasters on one run cut at one share.

    Attributes:
        run: The run.
        cut: The share.
        prefix: What the forecasters saw.
        paths: Errors by each forecaster that could answer, (n,) each.
        horizons: The same at each of ``HORIZONS``, (horizons,) each.
        evidence: What the learned prior reads.
        actual: What came at each of ``HORIZONS``, (horizons,); the last is the final value.
    """

    run: StoredRun
    cut: float
    prefix: Prefix
    paths: Mapping[str, Floats]
    horizons: Mapping[str, Floats]
    evidence: Evidence
    actual: Floats

    def miss_of(self, name: str) -> float:
        """Absolute error of the final value by one forecaster."""
        return abs(float(self.horizons[name][-1]) - float(self.actual[-1]))


def prefix_at(run: StoredRun, cut: float, siblings: Sequence[StoredRun]) -> Prefix:
    """The run as it is known at a cut, cleaned as ``forecast_curve`` cleans it."""
    share = run.epochs / run.epochs[-1]
    seen, _ = without_outliers(run.errors[: round(cut * len(run.errors))])
    return Prefix(
        epochs=run.epochs,
        errors=np.maximum(seen, 1e-9),
        rates=run.rates,
        siblings=np.asarray(
            [np.interp(share, s.epochs / s.epochs[-1], s.errors) for s in siblings[:MOST_SIBLINGS]]
        ),
        kind=run.kind,
        span=run.span,
        training_losses=None if run.training_losses is None else run.training_losses[: len(seen)],
    )


def cut_results(
    runs: Sequence[StoredRun], *, report: Callable[[int, int], None] | None = None
) -> list[CutResult]:
    """Every run at every cut by every forecaster.

    Args:
        runs: Whole runs.
        report: Told how many runs are done.
    """
    names = forecaster_names()
    found = []
    for index, run in enumerate(runs, start=1):
        siblings = [other for other in runs if _are_siblings(other, run)]
        for cut in run.cuts:
            if not FEWEST_POINTS <= round(cut * len(run.errors)) < len(run.errors):
                continue
            prefix = prefix_at(run, cut, siblings)
            if not _is_refused(prefix):
                found.append(_cut_result(run, cut, prefix, names))
        if report is not None:
            report(index, len(runs))
    return found


def _are_siblings(run: StoredRun, other: StoredRun) -> bool:
    return run is not other and (run.job, run.metric) == (other.job, other.metric)


def _is_refused(prefix: Prefix) -> bool:
    is_rising = prefix.kind in (MetricKind.ACCURACY, MetricKind.OVERLAP)
    fallen = prefix.errors - 1 if is_rising else prefix.errors
    return does_not_move(prefix.errors) or is_not_learning(prefix.errors) or ran_away(fallen, is_rising)


def _cut_result(run: StoredRun, cut: float, prefix: Prefix, names: Sequence[str]) -> CutResult:
    seen = prefix.num_seen
    paths = {name: path_of(name, prefix) for name in names if can_answer(name, prefix)}
    return CutResult(
        run=run,
        cut=cut,
        prefix=prefix,
        paths=paths,
        horizons={name: horizon_values(run.epochs, path, seen) for name, path in paths.items()},
        evidence=evidence_of(prefix, paths),
        actual=horizon_values(run.epochs, run.errors, seen),
    )


def mean_of_origins(values: Iterable[tuple[StoredRun, float]]) -> float:
    """Mean of a figure of some runs: runs of a job alike, jobs of an origin, and origins; NaN for none."""
    origins: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run, value in values:
        origins[run.origin][run.job].append(value)
    if not origins:
        return float("nan")
    return float(np.mean([np.mean([np.mean(v) for v in jobs.values()]) for jobs in origins.values()]))


@dataclass(frozen=True, slots=True, kw_only=True)
class TierResult:
    """A result as forecast in one tier.

    Attributes:
        result: The result.
        tier: What was used.
        errors: Forecast at each of ``HORIZONS``, (horizons,).
        scale: Below and above it, (horizons, 2).
        weights: Of each member, (horizons, members).
    """

    result: CutResult
    tier: Tier
    errors: Floats
    scale: Floats
    weights: Floats

    @property
    def scores(self) -> Floats:
        """(actual - forecast) / scale of its side, (horizons,)."""
        missed = self.result.actual - self.errors
        return np.asarray(missed / np.where(missed < 0, self.scale[:, 0], self.scale[:, 1]), dtype=float)


PriorOf = Callable[[str], LearnedPrior]
"""From an origin to a prior that has not seen it."""


def tier_results(results: Sequence[CutResult], prior_of: PriorOf) -> list[TierResult]:
    """Every result in every tier that it has the data for, by a prior that has not seen its origin."""
    groups: dict[tuple[str, Tier], list[CutResult]] = defaultdict(list)
    for result in results:
        for tier in tiers_of(result.prefix):
            groups[result.run.origin, tier].append(result)
    found = []
    for (origin, tier), of_group in groups.items():
        weighed = prior_of(origin).weigh(stacked([r.evidence for r in of_group]), tier)
        for result, errors, scale, weights in zip(of_group, *weighed, strict=True):
            found.append(TierResult(result=result, tier=tier, errors=errors, scale=scale, weights=weights))
    return found


def _neighbours(cut: float) -> tuple[float, ...]:
    where = CUTS.index(cut)
    return CUTS[max(0, where - 1) : where + 2]


def summarise(
    found: Sequence[TierResult],
    provenance: Mapping[str, object],
    without_origin: str | None = None,
    most_kept: float = 0.0,
) -> BacktestTable:
    """The table that a forecast needs, from back-tests; optionally as if an origin had never been seen.

    Quantiles are of the scores at a cut and at those beside it, for a few origins at one cut say little of the tails.
    """
    groups: dict[tuple[Tier, float], list[TierResult]] = defaultdict(list)
    for forecast in found:
        if forecast.result.run.origin != without_origin:
            groups[forecast.tier, forecast.result.cut].append(forecast)
    summaries = {}
    for tier, cut in groups:
        near = [of for other in _neighbours(cut) for of in groups.get((tier, other), ())]
        runs = [of.result.run for of in near]
        summaries[tier, cut] = CutSummary(
            num_runs=len({id(run) for run in runs}),
            num_origins=len({run.origin for run in runs}),
            quantiles=weighted_quantiles(
                np.stack([of.scores for of in near]), [(run.origin, run.job) for run in runs], LEVELS
            ),
        )
    return BacktestTable(summaries=summaries, provenance=dict(provenance), most_kept=most_kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutForecast(TierResult):
    """A result as forecast by a prior and a table that have not seen its origin.

    Attributes:
        ends: Ends of the 90 and 80 % intervals of its final value: low, high, low, high.
        quantiles: Of the scaled residual, (horizons, levels).
        kept: Share of the fall that the 95 % rank takes back at least.
    """

    ends: tuple[float, float, float, float]
    quantiles: Floats
    kept: float

    @property
    def forecast(self) -> float:
        """Final error forecast."""
        return float(self.errors[-1])

    @property
    def actual(self) -> float:
        """The true value."""
        return float(self.result.actual[-1])

    @property
    def is_covered(self) -> bool:
        """True if it lies in the 90 % interval."""
        return self.ends[0] <= self.actual <= self.ends[1]


def leave_origins_out(
    results: Sequence[CutResult], prior_of: PriorOf = lambda origin: shipped_prior(), most_kept: float = 0.0
) -> list[HeldOutForecast]:
    """Every result in every tier it has the data for, its origin left out of the quantiles.

    Args:
        results: The cuts.
        prior_of: Of an origin, a prior that has not seen it; the shipped one has not seen a user's own runs.
        most_kept: As in ``BacktestTable``.
    """
    forecasts = tier_results(results, prior_of)
    found = []
    for origin in dict.fromkeys(r.run.origin for r in results):
        table = summarise(forecasts, {}, origin, most_kept)
        found += [_held_out(f, table) for f in forecasts if f.result.run.origin == origin]
    return found


def _held_out(forecast: TierResult, table: BacktestTable) -> HeldOutForecast:
    prefix = forecast.result.prefix
    quantiles = stored_quantiles(forecast.tier, table, forecast.result.cut)
    kept = table.kept(forecast.tier, prefix)
    levels, error = np.asarray((0.05, 0.95, 0.1, 0.9)), float(forecast.errors[-1])
    moved = on_its_side(np.interp(levels, LEVELS, quantiles[-1]), forecast.scale[-1])
    # No end lies on the wrong side of the forecast, and the upper ones hold a part of the way back.
    back = share_kept(levels, kept) * max(prefix.level - error, 0.0)
    ends = error + np.where(levels < 0.5, np.minimum(moved, 0.0), np.maximum(moved, back))
    ends_of = tuple(np.maximum(ends, 0.0).tolist())
    return HeldOutForecast(**fields_of(forecast), ends=ends_of, quantiles=quantiles, kept=kept)


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


def summary_of(results: Sequence[CutResult], held: Sequence[HeldOutForecast] | None = None) -> Backtest:
    """Summary of single cuts.

    Args:
        results: The cuts.
        held: The same with origins left out in turn; made if None.
    """
    cuts = tuple(dict.fromkeys(sorted(r.cut for r in results)))
    names = list(dict.fromkeys(name for r in results for name in r.paths))
    # With one origin nothing can be left out, and figures of the fit itself would be flattering.
    can_leave_out = len({r.run.origin for r in results}) > 1
    tested = held if held is not None else leave_origins_out(results) if can_leave_out else []

    def by_cut(values: Iterable[tuple[CutResult, float]]) -> dict[float, float]:
        of_cuts: dict[float, list[tuple[StoredRun, float]]] = {cut: [] for cut in cuts}
        for result, value in values:
            of_cuts[result.cut].append((result.run, value))
        return {cut: mean_of_origins(found) for cut, found in of_cuts.items() if found}

    def by_tier(value: Callable[[HeldOutForecast], float]) -> dict[str, dict[float, float]]:
        rows = {tier: by_cut((h.result, value(h)) for h in tested if h.tier is tier) for tier in Tier}
        return {str(tier): row for tier, row in rows.items() if row}

    return Backtest(
        num_runs=len({id(r.run) for r in results}),
        num_jobs=len({r.run.job for r in results}),
        num_origins=len({r.run.origin for r in results}),
        cuts=cuts,
        errors={name: by_cut((r, r.miss_of(name)) for r in results if name in r.paths) for name in names},
        mixture_errors=by_tier(lambda h: abs(h.forecast - h.actual)),
        coverage_90=by_tier(lambda h: h.is_covered),
        width_90=by_tier(lambda h: h.ends[1] - h.ends[0]),
    )


def backtest(
    folder: str | Path, *, metric: str | None = None, schedule: Any = None, save: str | Path | None = None
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
    runs = _stored_runs(Path(folder), metric, schedule)
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


def _stored_runs(folder: Path, metric: str | None, schedule: Any) -> list[StoredRun]:
    planned = None if is_logged(schedule) else schedule_from(schedule, None)
    found = []
    for path, curve, cuts in _read_at_cuts(find_curve_files(folder), metric, rate_column(schedule)):
        cleaned = clean(curve)
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
                rates=_logged_rates(curve) if is_logged(schedule) else _planned_rates(curve, planned),
                kind=curve.kind,
                metric=curve.metric,
                span=scale.span,
                training_losses=curve.training_losses,
                cuts=cuts,
            )
        )
    return found


def _read_at_cuts(
    files: Iterable[Path], metric: str | None, rate: str | None
) -> Iterator[tuple[Path, Curve, tuple[float, ...]]]:
    """Each file's curve of each metric that is taken by what was seen at some cuts, with these."""
    for path in files:
        if metric is not None:
            yield path, read_curve(path, metric, rate=rate), CUTS
            continue
        found = [read_curve(path, rate=rate, seen=cut) for cut in CUTS]
        for curve in {curve.metric: curve for curve in found}.values():
            at = (cut for cut, other in zip(CUTS, found, strict=True) if other.metric == curve.metric)
            yield path, curve, tuple(at)


def _planned_rates(curve: Curve, schedule: LearningRateSchedule | None) -> Floats | None:
    return None if schedule is None or schedule.follows_metric else schedule.rates(curve.epochs)


def _logged_rates(curve: Curve) -> Floats | None:
    """Rates in the file of a finished run, relative to their peak; None where it has none."""
    rates = curve.learning_rates
    if rates is None or not np.all(np.isfinite(rates)) or float(np.max(rates)) <= 0:
        return None
    return np.asarray(np.maximum(rates, 0.0) / float(np.max(rates)), dtype=float)
