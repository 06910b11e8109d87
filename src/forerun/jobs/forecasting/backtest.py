"""Forecasters tested on whole runs: cut at a share of the run, forecast, compared with what came.

Results of single cuts are summarised in the table that the package needs later: the error of each forecaster, what a
drop of the rate brings by kind of metric, and the quantiles of (actual - forecast) / scale, per tier and share of the
run. Everywhere runs of a job weigh alike, jobs of an origin, and origins: a thousand runs of one project say nothing
about the next project. Leaving an origin out means leaving out all its runs, from errors, drops and quantiles alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from forerun.jobs.forecasting.backtest_table import (
    CUTS,
    HORIZONS,
    LEVELS,
    BacktestTable,
    CutSummary,
    weighted_quantiles,
)
from forerun.jobs.forecasting.curve import FINAL_SHARE, Floats, MetricKind, without_outliers
from forerun.jobs.forecasting.forecaster import (
    PRIORS,
    Prefix,
    Stored,
    Tier,
    can_answer,
    forecaster_names,
    member_weights,
    misfit_of,
    path_of,
    scale_of,
    sibling_trust,
    spread_of,
    trusted,
)
from forerun.jobs.forecasting.laws import DROP_SHARES, USUAL_DROP_SHARES, annealing_paths

MOST_SIBLINGS = 12

_FEWEST_POINTS = 4
_OF_ALL_KINDS = 0.3
"""Weight of all kinds of metrics together in what a drop brings on one of them, in origins."""


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
        paths: Errors by each forecaster that could answer, (n,) each; by the annealing law with the drop that runs of
            other origins show.
        horizons: The same at each of ``HORIZONS``, (horizons,) each.
        drop_paths: Errors by the annealing law for each of ``DROP_SHARES``, (shares, n); None without schedule.
        drop_horizons: The same at each of ``HORIZONS``, (shares, horizons).
        actual: What came at each of ``HORIZONS``, (horizons,); the last is the final value.
    """

    run: StoredRun
    cut: float
    prefix: Prefix
    paths: Mapping[str, Floats]
    horizons: Mapping[str, Floats]
    drop_paths: Floats | None
    drop_horizons: Floats | None
    actual: Floats

    def miss_of(self, name: str) -> float:
        """Absolute error of the final value by one forecaster."""
        return abs(float(self.horizons[name][-1]) - float(self.actual[-1]))

    def with_drop(self, share: float) -> CutResult:
        """The same with the annealing law at another drop."""
        if self.drop_paths is None or self.drop_horizons is None:
            return self
        index = DROP_SHARES.index(share)
        return replace(
            self,
            paths={**self.paths, _ANNEALING: self.drop_paths[index]},
            horizons={**self.horizons, _ANNEALING: self.drop_horizons[index]},
        )


_ANNEALING = "annealing"


def points_seen(num_points: int, cut: float) -> int:
    """Number of points seen at a cut, in a run of ``num_points``."""
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
    )


def cut_results(
    runs: Sequence[StoredRun],
    *,
    names: Iterable[str] | None = None,
    report: Callable[[int, int], None] | None = None,
) -> list[CutResult]:
    """Every run at every cut by every forecaster.

    Args:
        runs: Whole runs.
        names: Forecasters; all if None.
        report: Told how many runs are done.
    """
    names = tuple(forecaster_names() if names is None else names)
    wanted = [name for name in names if name != _ANNEALING]
    found = []
    for index, run in enumerate(runs, start=1):
        siblings = [other for other in runs if _are_siblings(other, run)]
        for cut in CUTS:
            seen = points_seen(len(run.errors), cut)
            if _FEWEST_POINTS <= seen < len(run.errors):
                found.append(_cut_result(run, cut, prefix_at(run, cut, siblings), wanted))
        if report is not None:
            report(index, len(runs))
    if _ANNEALING not in names:
        return found
    # The drop of a run is learnt from other origins, so that all runs must be there before any is judged.
    errors = mean_errors([result.with_drop(DROP_SHARES[0]) for result in found])
    shares = {run.origin: errors.drop_shares((run.origin,)) for run in runs}
    return [result.with_drop(shares[result.run.origin][result.run.kind]) for result in found]


def _are_siblings(run: StoredRun, other: StoredRun) -> bool:
    return run is not other and (run.job, run.metric) == (other.job, other.metric)


def _cut_result(run: StoredRun, cut: float, prefix: Prefix, names: Sequence[str]) -> CutResult:
    seen = prefix.num_seen
    paths = {name: path_of(name, prefix) for name in names if can_answer(name, prefix)}
    dropped = None if run.rates is None else np.maximum(annealing_paths(prefix, DROP_SHARES), 0.0)
    return CutResult(
        run=run,
        cut=cut,
        prefix=prefix,
        paths=paths,
        horizons={name: horizon_values(run.epochs, path, seen) for name, path in paths.items()},
        drop_paths=dropped,
        drop_horizons=None
        if dropped is None
        else np.asarray([horizon_values(run.epochs, path, seen) for path in dropped]),
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


class ResultGroup:
    """Results of one tier, cut, origin and kind of metric, as arrays from which figures without an origin are made.

    Attributes:
        tier, cut, origin, kind: The key.
        results: The results.
        names: Forecasters that answered for all of them.
    """

    def __init__(
        self, tier: Tier, cut: float, origin: str, kind: MetricKind, results: Sequence[CutResult]
    ) -> None:
        self.tier, self.cut, self.origin, self.kind, self.results = tier, cut, origin, kind, tuple(results)
        self.names = tuple(name for name in results[0].horizons if all(name in r.horizons for r in results))
        self._at = {name: np.stack([r.horizons[name] for r in results]) for name in self.names}
        drops = [r.drop_horizons for r in results if r.drop_horizons is not None]
        self._dropped = np.stack(drops, axis=1) if len(drops) == len(results) else None
        self._actual = np.stack([r.actual for r in results])
        self._level = np.asarray([r.prefix.level for r in results])[:, None]
        self._noise = np.asarray([r.prefix.noise for r in results])[:, None]
        self._misfit = np.asarray([misfit_of(r.prefix, r.paths) for r in results])[:, None]
        self._trust = np.asarray([sibling_trust(r.prefix) for r in results])
        self._spread = np.stack(
            [horizon_values(r.run.epochs, spread_of(r.prefix, tier), r.prefix.num_seen) for r in results]
        )

    def of(self, name: str, drop_share: float) -> Floats:
        """Errors by a forecaster at each of ``HORIZONS``, (runs, horizons)."""
        if name == _ANNEALING and self._dropped is not None:
            return np.asarray(self._dropped[DROP_SHARES.index(drop_share)], dtype=float)
        return self._at[name]

    def misses(self, name: str, drop_share: float) -> Floats:
        """Absolute errors of the final value by a forecaster, (runs,)."""
        return np.abs(self.of(name, drop_share)[:, -1] - self._actual[:, -1])

    def mixed(self, stored: Stored, drop_share: float) -> MixedGroup:
        """The mixture of the tier.

        Args:
            stored: Stored errors, see ``member_weights``.
            drop_share: Of the annealing law.
        """
        names = [name for name in PRIORS[self.tier] if name in self.names]
        weights = member_weights(names, self.tier, stored)
        members = np.stack([self.of(name, drop_share) for name in names])
        mean = np.einsum("mr,mrh->rh", trusted(weights, self._trust), members)
        scale = scale_of(self._level, self._noise, self._spread, self._misfit, members, mean)
        return MixedGroup(errors=mean, scale=scale, scores=(self._actual - mean) / scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedGroup:
    """The mixture of a tier at each of ``HORIZONS``, (runs, horizons) each.

    Attributes:
        errors: Forecast.
        scale: Its scale.
        scores: (actual - forecast) / scale.
    """

    errors: Floats
    scale: Floats
    scores: Floats


class MeanErrors:
    """Mean absolute errors of the final value by tier, cut and forecaster, some origins left out.

    Attributes:
        groups: The results behind them.
    """

    def __init__(self, groups: Sequence[ResultGroup]) -> None:
        self.groups = tuple(groups)
        # Each is asked again and again with the same origins left out.
        self.drop_shares = cache(self._drop_shares)
        self.without = cache(self._without)
        self._of_origin = cache(self._origin_errors)
        self._origins: dict[tuple[Tier, float], dict[str, list[ResultGroup]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for group in self.groups:
            self._origins[group.tier, group.cut][group.origin].append(group)
        self._by_job = {
            id(group): {
                (name, share): _mean_by_job(group, group.misses(name, share))
                for name in group.names
                for share in (DROP_SHARES if name == _ANNEALING else DROP_SHARES[:1])
            }
            for group in self.groups
        }

    def _drop_shares(self, left_out: tuple[str, ...] = ()) -> dict[MetricKind, float]:
        """The drop with the least error for each kind of metric, some origins left out.

        All kinds together count as a fraction of an origin, so that one odd origin does not decide alone.
        """
        jobs: dict[tuple[MetricKind, str], dict[str, list[Floats]]] = defaultdict(lambda: defaultdict(list))
        for group in self.groups:
            if group.tier is not Tier.SCHEDULE or group.origin in left_out:
                continue
            found = self._by_job[id(group)]
            for job in found[_ANNEALING, DROP_SHARES[0]]:
                misses = np.asarray([found[_ANNEALING, share][job][0] for share in DROP_SHARES])
                jobs[group.kind, group.origin][job].append(misses)
        means = {
            key: np.mean([np.mean(values, axis=0) for values in of_key.values()], axis=0)
            for key, of_key in jobs.items()
        }
        found_drops = dict(USUAL_DROP_SHARES)
        for kind in {kind for kind, _ in means}:
            own = np.sum([value for (of_kind, _), value in means.items() if of_kind is kind], axis=0)
            total = own + _OF_ALL_KINDS * np.mean(list(means.values()), axis=0)
            found_drops[kind] = DROP_SHARES[int(np.argmin(total))]
        return found_drops

    def _without(
        self, tier: Tier, cut: float, left_out: tuple[str, ...] = ()
    ) -> tuple[dict[str, float], int]:
        """Error of each forecaster and the number of origins behind it, origins weighing alike, some left out."""
        drops = self.drop_shares(left_out)
        of_origins = [
            self._of_origin(tier, cut, origin, tuple(drops[kind] for kind in MetricKind))
            for origin in self._origins[tier, cut]
            if origin not in left_out
        ]
        names = dict.fromkeys(name for of_origin in of_origins for name in of_origin)
        found = {name: float(np.mean([of[name] for of in of_origins if name in of])) for name in names}
        return found, len(of_origins)

    def _origin_errors(
        self, tier: Tier, cut: float, origin: str, drops: tuple[float, ...]
    ) -> dict[str, float]:
        """Error of each forecaster on an origin, its jobs weighing alike."""
        jobs: dict[str, dict[str, list[tuple[float, int]]]] = defaultdict(lambda: defaultdict(list))
        for group in self._origins[tier, cut][origin]:
            for name in group.names:
                share = drops[list(MetricKind).index(group.kind)] if name == _ANNEALING else DROP_SHARES[0]
                for job, miss in self._by_job[id(group)][name, share].items():
                    jobs[name][job].append(miss)
        return {name: float(np.mean([_mean(of_job) for of_job in of.values()])) for name, of in jobs.items()}


def _mean_by_job(group: ResultGroup, misses: Floats) -> dict[str, tuple[float, int]]:
    """Mean over the runs of each job, and their number."""
    jobs: dict[str, list[float]] = defaultdict(list)
    for result, miss in zip(group.results, misses, strict=True):
        jobs[result.run.job].append(float(miss))
    return {job: (float(np.mean(found)), len(found)) for job, found in jobs.items()}


def _mean(weighted: Sequence[tuple[float, int]]) -> float:
    return sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)


def mean_errors(results: Sequence[CutResult]) -> MeanErrors:
    """Errors of all forecasters on the results."""
    grouped: dict[tuple[Tier, float, str, MetricKind], list[CutResult]] = defaultdict(list)
    for result in results:
        for tier in tiers_of(result):
            grouped[tier, result.cut, result.run.origin, result.run.kind].append(result)
    return MeanErrors([ResultGroup(*key, found) for key, found in grouped.items()])


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
    errors: MeanErrors, provenance: Mapping[str, object], without_origin: str | None = None
) -> BacktestTable:
    """The table that a forecast needs, from back-tests; optionally as if an origin had never been seen.

    The scores behind the quantiles are those of mixtures in whose weights and drops the run's own origin took no part;
    at the cut and at those beside it, for a few origins at one cut say little of the tails.
    """
    others = () if without_origin is None else (without_origin,)
    found: dict[tuple[Tier, float], list[tuple[ResultGroup, Floats]]] = defaultdict(list)
    for group in errors.groups:
        if group.origin == without_origin:
            continue
        left_out = (group.origin, *others)
        share = errors.drop_shares(left_out)[group.kind]
        mix = group.mixed(partial(errors.without, cut=group.cut, left_out=left_out), share)
        found[group.tier, group.cut].append((group, mix.scores))
    summaries = {}
    for tier, cut in found:
        stored, num_origins = errors.without(tier, cut, others)
        groups = [of for near in _neighbours(cut) for of in found.get((tier, near), ())]
        runs = [result.run for group, _ in groups for result in group.results]
        summaries[tier, cut] = CutSummary(
            num_runs=len({id(run) for run in runs}),
            num_jobs=len({run.job for run in runs}),
            num_origins=num_origins,
            errors=stored,
            quantiles=weighted_quantiles(
                np.concatenate([scores for _, scores in groups]),
                [(run.origin, run.job) for run in runs],
                LEVELS,
            ),
        )
    return BacktestTable(
        summaries=summaries, drop_shares=errors.drop_shares(others), provenance=dict(provenance)
    )
