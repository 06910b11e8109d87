"""Forecasters on the public learning curves: final value, coverage, epochs to target.

A run's origin (a family of logs, see ``curve_tables``) is never in what its forecast rests on: neither in the learned
prior nor in the intervals. In the tiers with history the other runs of the job are given
to the forecaster as its siblings, which is their point; weights and intervals are those of other origins there too.
Errors and coverage are means over the runs of a job, then over the jobs of an origin, then over origins.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.jobs.forecasting.backtest import (
    Backtest,
    CutResult,
    HeldOutForecast,
    StoredRun,
    cut_results,
    leave_origins_out,
    mean_of_origins,
    summarise,
    summary_of,
    tier_results,
)
from forerun.jobs.forecasting.backtest_table import (
    MOST_KEPT,
    TargetTimes,
    futures_of,
    save_table,
    target_times,
)
from forerun.jobs.forecasting.curve import Floats, final_error
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.prior import PRIOR_SCHEMA, LearnedPrior, mixed_paths
from studies.forecast.curve_tables import CURVE_TABLES, read_all_curves, read_trials_as_logged
from studies.forecast.fit_prior import fit_priors
from studies.forecast.sweeps import DivergenceScore, SweepScore, divergence_score, sweep_scores, winning_score

SCHEDULED_TABLE, TRIALS_TABLE = CURVE_TABLES[0], CURVE_TABLES[-1]

FORECAST_STUDY_VERSION = 14
"""Raised whenever forecasters, weights or intervals change; a kept study of another version is not used."""

_DROP_SHARE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStudy:
    """Results of the study of learning curves.

    Attributes:
        everything: Forecasters and tiers on all runs.
        known: The same on the runs whose schedule is known.
        epochs_to_target: Mean relative error of the epochs to 98 % of the whole fall, by forecaster or tier and cut, on
            ``SCHEDULED_TABLE``.
        target_coverage: Share of the runs that reach the target from p10 to p90, by tier and cut, trials left out.
        num_runs: Runs of each table.
        sweeps: Simulated searches, by group of pools, policy and budget.
        divergence: Scores of the chance that a trial diverges.
        winning: As by ``winning_score``, over all pools.
    """

    everything: Backtest
    known: Backtest
    epochs_to_target: Mapping[str, Mapping[float, float]]
    target_coverage: Mapping[str, Mapping[float, float]]
    num_runs: Mapping[str, int]
    sweeps: Mapping[str, Mapping[str, Mapping[float, SweepScore]]]
    divergence: DivergenceScore
    winning: tuple[float, float]


def forecast_study(
    folder: Path, report: Callable[[int, int], None] | None = None, save: Path | None = None
) -> ForecastStudy:
    """Runs the study; a few minutes.

    Args:
        folder: Folder of the public tables.
        report: Receives the number of finished runs.
        save: File for the figures that come with the package.
    """
    runs = read_all_curves(folder)
    results = cut_results(runs, report=report)
    priors = fit_priors(results)
    held = leave_origins_out(results, priors.__getitem__, MOST_KEPT)
    everything = summary_of(results, held)
    if save is not None:
        _save_shipped(results, priors, everything, save)
    known = [r for r in results if r.run.rates is not None]
    scheduled = [r for r in results if r.run.table == SCHEDULED_TABLE]
    of_scheduled = [h for h in held if h.result.run.table == SCHEDULED_TABLE]
    return ForecastStudy(
        everything=everything,
        known=summary_of(known, [h for h in held if h.result.run.rates is not None]),
        epochs_to_target=_target_study(scheduled, of_scheduled),
        target_coverage=target_coverage([h for h in held if h.result.run.table != TRIALS_TABLE]),
        num_runs={table: sum(run.table == table for run in runs) for table in CURVE_TABLES},
        sweeps=sweep_scores(runs),
        divergence=divergence_score(read_trials_as_logged(folder)),
        winning=winning_score(runs),
    )


def _target_study(
    results: Sequence[CutResult], held: Sequence[HeldOutForecast]
) -> dict[str, dict[float, float]]:
    names = ("optimus", "annealing 20%", "siblings")
    found = {
        name: _target_errors([(r, _path_epoch(r, r.paths[name])) for r in results if name in r.paths])
        for name in names
    }
    for tier in (Tier.SCHEDULE, Tier.HISTORY):
        of_tier = [h for h in held if h.tier is tier]
        found[f"mixture, {tier}"] = _target_errors(
            [(h.result, _target_times(h).epochs_to_target[1]) for h in of_tier]
        )
    return found


def _target_errors(pairs: Sequence[tuple[CutResult, float]]) -> dict[float, float]:
    """Errors |predicted / actual - 1| where the target lies ahead; one never reached counts as reached at the end."""
    misses: dict[float, list[float]] = {}
    for result, predicted in pairs:
        actual = _reached_later(result)
        if actual is not None:
            end = float(result.run.epochs[-1])
            misses.setdefault(result.cut, []).append(abs(min(predicted, end) / actual - 1))
    return {cut: float(np.mean(m)) for cut, m in misses.items()}


def _reached_later(result: CutResult) -> float | None:
    """The epoch at which the target is reached; None if that is before the cut."""
    actual = _first_at(result.run.errors, result.run.epochs, _wanted(result))
    is_ahead = actual is not None and actual > result.run.epochs[result.prefix.num_seen - 1]
    return actual if is_ahead else None


def target_coverage(held: Sequence[HeldOutForecast]) -> dict[str, dict[float, float]]:
    """Share of the runs that reach the target between p10 and p90, by tier and cut, a mean of origins."""
    found: dict[tuple[str, float], list[tuple[StoredRun, float]]] = {}
    for one in held:
        actual = _reached_later(one.result)
        if actual is not None:
            low, _, high = _target_times(one).epochs_to_target
            inside = float(low <= actual <= high)
            found.setdefault((str(one.tier), one.result.cut), []).append((one.result.run, inside))
    return {
        tier: {cut: mean_of_origins(values) for (other, cut), values in found.items() if other == tier}
        for tier in dict.fromkeys(tier for tier, _ in found)
    }


def _wanted(result: CutResult) -> float:
    """The error after 98 % of the whole fall."""
    errors = result.run.errors
    return float(errors[0]) - _DROP_SHARE * (float(errors[0]) - final_error(errors))


def _path_epoch(result: CutResult, path: Floats) -> float:
    seen = result.prefix.num_seen
    full = np.concatenate([result.run.errors[:seen], path[seen:]])
    found = _first_at(full, result.run.epochs, _wanted(result))
    return float("inf") if found is None else found


def _target_times(held: HeldOutForecast) -> TargetTimes:
    """As ``forecast_curve`` answers."""
    result, prefix = held.result, held.result.prefix
    futures = futures_of(
        mixed_paths(prefix, result.paths, held.scale, held.weights), prefix, held.quantiles, held.kept
    )
    seen = prefix.num_seen
    last = float(prefix.epochs[seen - 1])
    return target_times(futures, prefix.epochs[seen:], _wanted(result), last, prefix.noise)


def _first_at(errors: Floats, epochs: Floats, wanted: float) -> float | None:
    hits = np.flatnonzero(np.minimum.accumulate(errors) <= wanted)
    return float(epochs[hits[0]]) if len(hits) else None


def _save_shipped(
    results: Sequence[CutResult], priors: Mapping[str, LearnedPrior], found: Backtest, out: Path
) -> None:
    """Writes the prior of all runs, and quantiles by priors that had not seen the origin of the run."""
    source = f"{found.num_runs} public learning curves: " + ", ".join(CURVE_TABLES)
    provenance = {
        "source": source,
        "num_runs": found.num_runs,
        "num_jobs": found.num_jobs,
        "num_origins": found.num_origins,
        "date": datetime.date.today().isoformat(),
        "coverage_90": found.rounded_coverage(),
    }
    tested = tier_results(results, priors.__getitem__)
    save_table(summarise(tested, provenance, most_kept=MOST_KEPT), out)
    prior = json.dumps(prior_document(priors[""], source), separators=(",", ":"))
    out.with_name("prior.json").write_text(prior + "\n", encoding="utf-8")


def prior_document(prior: LearnedPrior, source: str) -> dict[str, Any]:
    """A prior as it is written."""
    arrays = {"middle": prior.middle, "spread": prior.spread, "shares": prior.shares}
    rounded = {name: np.round(array, 4).tolist() for name, array in arrays.items()}
    layers = [np.round(layer, 3).tolist() for layer in prior.layers]
    return {"schema": PRIOR_SCHEMA, "source": source, **rounded, "layers": layers}
