"""Forecasters tested on whole runs: cut at a share of the run, forecast, compared with what came.

Results of single cuts are summarised to a table of what the package needs later: the error of each forecaster, and
the quantiles of (actual - forecast) / scale, per tier and share of the run. In errors every job weighs alike, in
quantiles as the root of its number of runs: runs of one job are not as many draws. Leaving a job out means leaving out
all its runs, from errors, quantiles and the regression on stored falls alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.convergence.backtest_table import (
    HORIZONS,
    LEVELS,
    BacktestTable,
    CutSummary,
    weighted_quantiles,
)
from forerun.convergence.curve import FINAL_SHARE, Floats
from forerun.convergence.forecaster import FORECASTERS, Prefix, can_answer, path_of
from forerun.convergence.mixture import PRIORS, Mixture, Tier, combined, member_weights
from forerun.convergence.stored_falls import CUTS, fit_falls

__all__ = [
    "FEWEST_JOBS",
    "MOST_SIBLINGS",
    "CutResult",
    "MeanErrors",
    "StoredRun",
    "cut_results",
    "horizon_values",
    "mean_errors",
    "mixed",
    "points_seen",
    "prefix_at",
    "score",
    "summarise",
    "tiers_of",
]

MOST_SIBLINGS = 12

FEWEST_JOBS = 10
"""With fewer jobs behind a tier, its intervals borrow the scores of the tier that every run has."""

_FEWEST_POINTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A finished run.

    Attributes:
        table: Where it comes from.
        job: Runs of one job are the same network on the same data.
        name: Which run.
        epochs: (n,).
        errors: On the scale of ``curve.error_scale``, (n,).
        rates: Relative learning rates, (n,), or None if the schedule is not known.
        is_bounded: Whether the errors are 1 - accuracy or alike.
    """

    table: str
    job: str
    name: str
    epochs: Floats
    errors: Floats
    rates: Floats | None = None
    is_bounded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CutResult:
    """All forecasters on one run cut at one share.

    Attributes:
        run: The run.
        cut: The share.
        prefix: What the forecasters saw.
        paths: Errors by each forecaster that could answer, (n,) each.
        actual: What came at each of ``HORIZONS``, (horizons,); the last is the final value.
    """

    run: StoredRun
    cut: float
    prefix: Prefix
    paths: Mapping[str, Floats]
    actual: Floats

    def at_horizons(self, path: Floats) -> Floats:
        """A path at each of ``HORIZONS``, (horizons,)."""
        return horizon_values(self.prefix.epochs, path, self.prefix.num_seen)

    def final_of(self, name: str) -> float:
        """The final value by one forecaster."""
        return float(self.at_horizons(self.paths[name])[-1])

    def miss_of(self, name: str) -> float:
        """Absolute error of the final value by one forecaster."""
        return abs(self.final_of(name) - float(self.actual[-1]))


def points_seen(num_points: int, cut: float) -> int:
    """Points of a run of so many that are seen at a cut."""
    return round(cut * num_points)


def horizon_values(epochs: Floats, path: Floats, num_seen: int) -> Floats:
    """Values at shares ``HORIZONS`` of the rest of the run, each a mean over 5 % of the points."""
    num_points = len(epochs)
    width = max(1, round(FINAL_SHARE * num_points))
    now, last = epochs[num_seen - 1], epochs[-1]
    found = []
    for share in HORIZONS:
        end = int(np.searchsorted(epochs, now + share * (last - now) * (1 + 1e-9), side="right"))
        end = max(end, num_seen + 1)
        found.append(float(np.mean(path[max(num_seen, end - width) : end])))
    return np.asarray(found)


def prefix_at(run: StoredRun, cut: float, siblings: Sequence[StoredRun], falls: Floats | None) -> Prefix:
    """The run as it is known at a cut."""
    share = run.epochs / run.epochs[-1]
    return Prefix(
        epochs=run.epochs,
        errors=run.errors[: points_seen(len(run.errors), cut)],
        rates=run.rates,
        siblings=np.asarray(
            [np.interp(share, s.epochs / s.epochs[-1], s.errors) for s in siblings[:MOST_SIBLINGS]]
        ),
        is_bounded=run.is_bounded,
        fall_coefficients=falls,
    )


def cut_results(
    runs: Sequence[StoredRun],
    *,
    names: Iterable[str] | None = None,
    leave_jobs_out: bool = True,
    report: Callable[[int, int], None] | None = None,
) -> list[CutResult]:
    """Every run at every cut by every forecaster.

    Args:
        runs: Whole runs.
        names: Forecasters; all if None.
        leave_jobs_out: Whether the regression on stored falls is fitted without the run's job.
        report: Told how many runs are done.
    """
    wanted = tuple(FORECASTERS if names is None else names)
    falls = {job: _falls(runs, job if leave_jobs_out else None) for job in {run.job for run in runs}}
    found = []
    for index, run in enumerate(runs, start=1):
        siblings = [other for other in runs if other.job == run.job and other is not run]
        for cut in CUTS:
            seen = points_seen(len(run.errors), cut)
            if not _FEWEST_POINTS <= seen < len(run.errors):
                continue
            prefix = prefix_at(run, cut, siblings, falls[run.job])
            paths = {name: path_of(name, prefix) for name in wanted if can_answer(name, prefix)}
            actual = horizon_values(run.epochs, run.errors, seen)
            found.append(CutResult(run=run, cut=cut, prefix=prefix, paths=paths, actual=actual))
        if report is not None:
            report(index, len(runs))
    return found


def _falls(runs: Sequence[StoredRun], without: str | None) -> Floats | None:
    others = [(r.job, r.epochs, r.errors, r.is_bounded) for r in runs if r.job != without]
    return fit_falls(others) if len({job for job, *_ in others}) > 1 else None


def mixed(result: CutResult, tier: Tier, errors: Mapping[str, float]) -> Mixture:
    """The mixture of a tier that the result has the data for."""
    names = [name for name in PRIORS[tier] if name in result.paths]
    weights = member_weights(names, tier, errors)
    return combined(result.prefix, {name: result.paths[name] for name in names}, weights)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanErrors:
    """Mean absolute errors of the final value by tier, cut, forecaster and job."""

    by_job: Mapping[tuple[Tier, float], Mapping[str, Mapping[str, float]]]

    def without(self, tier: Tier, cut: float, jobs: Iterable[str] = ()) -> dict[str, float]:
        """Error of each forecaster, jobs weighing alike, some left out."""
        left_out = set(jobs)
        found = {}
        for name, errors in self.by_job.get((tier, cut), {}).items():
            kept = [error for job, error in errors.items() if job not in left_out]
            if kept:
                found[name] = float(np.mean(kept))
        return found


def mean_errors(results: Sequence[CutResult]) -> MeanErrors:
    """Errors of all forecasters on the results."""
    misses: dict[tuple[Tier, float], dict[str, dict[str, list[float]]]] = {}
    for result in results:
        for tier in tiers_of(result):
            for name in result.paths:
                jobs = misses.setdefault((tier, result.cut), {}).setdefault(name, {})
                jobs.setdefault(result.run.job, []).append(result.miss_of(name))
    return MeanErrors(
        by_job={
            key: {name: {job: float(np.mean(m)) for job, m in jobs.items()} for name, jobs in names.items()}
            for key, names in misses.items()
        }
    )


def tiers_of(result: CutResult) -> tuple[Tier, ...]:
    """Tiers that the result has the data for."""
    needed = {Tier.HISTORY: "siblings", Tier.SCHEDULE: "annealing", Tier.CURVE: "optimus"}
    return tuple(tier for tier, name in needed.items() if name in result.paths)


def score(result: CutResult, mix: Mixture) -> Floats:
    """(actual - forecast) / scale at each horizon, (horizons,)."""
    forecast = result.at_horizons(mix.errors)
    return np.asarray((result.actual - forecast) / result.at_horizons(mix.scale), dtype=float)


def summarise(
    results: Sequence[CutResult],
    errors: MeanErrors,
    provenance: Mapping[str, object],
    without_job: str | None = None,
) -> BacktestTable:
    """The table that a forecast needs, from back-tests; optionally as if a job had never been seen.

    The scores behind the quantiles are those of mixtures whose weights the run's own job took no part in.
    """
    kept = [r for r in results if r.run.job != without_job]
    scores: dict[tuple[Tier, float], list[tuple[str, Floats]]] = {}
    for result in kept:
        for tier in tiers_of(result):
            left_out = [job for job in (result.run.job, without_job) if job is not None]
            mix = mixed(result, tier, errors.without(tier, result.cut, left_out))
            scores.setdefault((tier, result.cut), []).append((result.run.job, score(result, mix)))
    left_out = [] if without_job is None else [without_job]
    summaries = {
        (tier, cut): CutSummary(
            num_runs=len(found),
            num_jobs=len({job for job, _ in found}),
            errors=errors.without(tier, cut, left_out),
            quantiles=_quantiles(tier, cut, scores),
        )
        for (tier, cut), found in scores.items()
    }
    runs = {id(r.run): r.run for r in kept}
    return BacktestTable(
        summaries=summaries, fall_coefficients=_falls(list(runs.values()), None), provenance=dict(provenance)
    )


def _quantiles(
    tier: Tier, cut: float, scores: Mapping[tuple[Tier, float], list[tuple[str, Floats]]]
) -> Floats:
    """Quantiles of a tier at a cut; with few jobs, together with the scores of the tier that every run has.

    Each tier's scores are in units of its own scale, so that those of a less informed tier are no worse a guess than a
    handful of jobs: all that is borrowed weighs about as much as the tier's own.
    """
    own = scores[tier, cut]
    own_jobs = {job for job, _ in own}
    borrowed = [] if len(own_jobs) >= FEWEST_JOBS or tier is Tier.CURVE else scores.get((Tier.CURVE, cut), [])
    named = [(f"own {job}", s) for job, s in own] + [(f"borrowed {job}", s) for job, s in borrowed]
    num_borrowed = max(1, len({job for job, _ in borrowed}))
    weights = {job: 1.0 if job.startswith("own") else len(own_jobs) / num_borrowed for job, _ in named}
    return weighted_quantiles(np.stack([s for _, s in named]), [job for job, _ in named], LEVELS, weights)
