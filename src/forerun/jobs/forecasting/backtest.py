"""Forecasters tested on whole runs: cut at a share of the run, forecast, compared with what came.

Results of single cuts are summarised in the table that the package needs later: the quantiles of (actual - forecast) /
scale, per tier and share of the run. Everywhere runs of a job weigh alike, jobs of an origin, and origins: a thousand
runs of one project say nothing about the next project. Leaving an origin out means leaving out all its runs, from the
learned prior and from the quantiles. What ``forecast_curve`` refuses to forecast is not judged either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.jobs.forecasting.backtest_table import (
    LEVELS,
    BacktestTable,
    CutSummary,
    weighted_quantiles,
)
from forerun.jobs.forecasting.curve import (
    Floats,
    MetricKind,
    does_not_move,
    is_not_learning,
    ran_away,
    without_outliers,
)
from forerun.jobs.forecasting.forecaster import Prefix, Tier, can_answer, forecaster_names, path_of
from forerun.jobs.forecasting.prior import CUTS, Evidence, LearnedPrior, evidence_of, horizon_values, stacked

MOST_SIBLINGS = 12

_FEWEST_POINTS = 4


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


def points_seen(num_points: int, cut: float) -> int:
    """Number of points seen at a cut, in a run of ``num_points``."""
    return round(cut * num_points)


def prefix_at(run: StoredRun, cut: float, siblings: Sequence[StoredRun]) -> Prefix:
    """The run as it is known at a cut, cleaned as ``forecast_curve`` cleans it."""
    share = run.epochs / run.epochs[-1]
    seen, _ = without_outliers(run.errors[: points_seen(len(run.errors), cut)])
    return Prefix(
        epochs=run.epochs,
        errors=np.maximum(seen, 1e-9),
        rates=run.rates,
        siblings=np.asarray(
            [np.interp(share, s.epochs / s.epochs[-1], s.errors) for s in siblings[:MOST_SIBLINGS]]
        ),
        kind=run.kind,
        span=run.span,
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
        for cut in CUTS:
            if not _FEWEST_POINTS <= points_seen(len(run.errors), cut) < len(run.errors):
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
        errors, scale: Forecast and its scale at each of ``HORIZONS``, (horizons,).
        weights: Of each member, (horizons, members).
    """

    result: CutResult
    tier: Tier
    errors: Floats
    scale: Floats
    weights: Floats

    @property
    def scores(self) -> Floats:
        """(actual - forecast) / scale, (horizons,)."""
        return np.asarray((self.result.actual - self.errors) / self.scale, dtype=float)


PriorOf = Callable[[str], LearnedPrior]
"""From an origin to a prior that has not seen it."""


def tier_results(results: Sequence[CutResult], prior_of: PriorOf) -> list[TierResult]:
    """Every result in every tier that it has the data for, by a prior that has not seen its origin."""
    groups: dict[tuple[str, Tier], list[CutResult]] = defaultdict(list)
    for result in results:
        for tier in tiers_of(result):
            groups[result.run.origin, tier].append(result)
    found = []
    for (origin, tier), of_group in groups.items():
        weighed = prior_of(origin).weigh(stacked([r.evidence for r in of_group]), tier)
        for result, errors, scale, weights in zip(of_group, *weighed, strict=True):
            found.append(TierResult(result=result, tier=tier, errors=errors, scale=scale, weights=weights))
    return found


def tiers_of(result: CutResult) -> tuple[Tier, ...]:
    """Tiers that the result has the data for, the most informed first."""
    has_siblings = result.prefix.siblings is not None and len(result.prefix.siblings) > 0
    has_rates = result.run.rates is not None
    needed = {
        Tier.BOTH: has_siblings and has_rates,
        Tier.HISTORY: has_siblings,
        Tier.SCHEDULE: has_rates,
        Tier.CURVE: True,
    }
    return tuple(tier for tier, has in needed.items() if has)


def _neighbours(cut: float) -> tuple[float, ...]:
    where = CUTS.index(cut)
    return CUTS[max(0, where - 1) : where + 2]


def summarise(
    found: Sequence[TierResult], provenance: Mapping[str, object], without_origin: str | None = None
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
            num_jobs=len({run.job for run in runs}),
            num_origins=len({run.origin for run in runs}),
            quantiles=weighted_quantiles(
                np.stack([of.scores for of in near]), [(run.origin, run.job) for run in runs], LEVELS
            ),
        )
    return BacktestTable(summaries=summaries, provenance=dict(provenance))
