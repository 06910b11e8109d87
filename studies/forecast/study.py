"""Forecasters on the public learning curves: final value, coverage, epochs to target, epochs against batch, system C.

A run's job is never in what its forecast rests on: neither in the weights, nor the intervals, nor the regression on
stored falls. In the tier "history" the other runs of the job are given to the forecaster as its siblings, which is the
point of that tier; weights and intervals are those of other jobs there too.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.convergence.backtest import (
    CutResult,
    cut_results,
    mean_errors,
    summarise,
)
from forerun.convergence.backtest_summary import Backtest, summary_of
from forerun.convergence.backtest_table import save_table
from forerun.convergence.curve import Floats, final_error
from forerun.convergence.futures import futures_of, target_times
from forerun.convergence.held_out import HeldOutForecast, leave_jobs_out
from forerun.convergence.mixture import Tier
from studies.forecast.curve_tables import CURVE_TABLES, read_all_curves

__all__ = ["FORECAST_STUDY_VERSION", "ForecastStudy", "TargetErrors", "forecast_study"]

SCHEDULED_TABLE = CURVE_TABLES[0]

FORECAST_STUDY_VERSION = 4
"""Raised whenever forecasters, weights or intervals change; a kept study of another version is not used."""

_DROP_SHARE = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetErrors:
    """Relative error of the epochs to 98 % of the whole fall, by cut."""

    median: Mapping[float, float]
    mean: Mapping[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastStudy:
    """Results of the study of learning curves.

    Attributes:
        scheduled: Forecasters and tiers on the table with known schedules.
        together: Coverage of 90 % intervals over all tables, by tier words and cut: runs, jobs alike, mean width.
        epochs_to_target: Errors by forecaster or tier.
        curve_alone: Forecasters and the curve-alone tier over all tables.
        num_runs: Runs of each table.
    """

    scheduled: Backtest
    together: Mapping[str, Mapping[float, tuple[float, float, float, int]]]
    epochs_to_target: Mapping[str, TargetErrors]
    curve_alone: Backtest
    num_runs: Mapping[str, int]


def forecast_study(
    folder: Path, report: Callable[[int, int], None] | None = None, save: Path | None = None
) -> ForecastStudy:
    """Runs the study.

    Args:
        folder: Folder of the public tables.
        report: Receives the number of finished runs.
        save: File for the figures that come with the package.
    """
    runs = read_all_curves(folder)
    results = cut_results(runs, report=report)
    held = leave_jobs_out(results)
    if save is not None:
        _save_shipped_table(results, held, save)
    scheduled = [r for r in results if r.run.table == SCHEDULED_TABLE]
    of_scheduled = [h for h in held if h.result.run.table == SCHEDULED_TABLE]
    return ForecastStudy(
        scheduled=summary_of(scheduled, of_scheduled),
        together={
            "job never seen": _coverage([h for h in held if _is_cold(h)]),
            "with siblings": _coverage([h for h in held if h.tier is Tier.HISTORY]),
            "curve alone, schedules withheld": _coverage([h for h in held if h.tier is Tier.CURVE]),
        },
        epochs_to_target=_target_study(scheduled, of_scheduled),
        curve_alone=summary_of(results, held),
        num_runs={table: sum(run.table == table for run in runs) for table in CURVE_TABLES},
    )


def _is_cold(held: HeldOutForecast) -> bool:
    """Whether a user without finished runs of the job would get this forecast."""
    wanted = Tier.CURVE if held.result.run.rates is None else Tier.SCHEDULE
    return held.tier is wanted


def _coverage(held: Sequence[HeldOutForecast]) -> dict[float, tuple[float, float, float, int]]:
    found = {}
    for cut in sorted({h.result.cut for h in held}):
        of_cut = [h for h in held if h.result.cut == cut]
        jobs: dict[str, list[bool]] = {}
        for h in of_cut:
            jobs.setdefault(h.result.run.job, []).append(h.is_covered)
        width = float(np.mean([h.high_90 - h.low_90 for h in of_cut]))
        covered = float(np.mean([h.is_covered for h in of_cut]))
        found[cut] = (covered, float(np.mean([np.mean(c) for c in jobs.values()])), width, len(of_cut))
    return found


def _target_study(results: Sequence[CutResult], held: Sequence[HeldOutForecast]) -> dict[str, TargetErrors]:
    names = ("optimus", "pow3", "annealing", "scaled siblings", "siblings", "best so far")
    found = {
        name: _target_errors([(r, _path_epoch(r, r.paths[name])) for r in results if name in r.paths])
        for name in names
    }
    for tier in (Tier.SCHEDULE, Tier.HISTORY):
        of_tier = [h for h in held if h.tier is tier]
        found[f"mixture, {tier}"] = _target_errors([(h.result, _likely_epoch(h)) for h in of_tier])
    return found


def _target_errors(pairs: Sequence[tuple[CutResult, float]]) -> TargetErrors:
    """Errors |predicted / actual - 1| where the target lies ahead; one never reached counts as reached at the end."""
    misses: dict[float, list[float]] = {}
    for result, predicted in pairs:
        actual = _first_at(result.run.errors, result.run.epochs, _wanted(result))
        if actual is not None and actual > result.run.epochs[result.prefix.num_seen - 1]:
            end = float(result.run.epochs[-1])
            misses.setdefault(result.cut, []).append(abs(min(predicted, end) / actual - 1))
    return TargetErrors(
        median={cut: float(np.median(m)) for cut, m in misses.items()},
        mean={cut: float(np.mean(m)) for cut, m in misses.items()},
    )


def _wanted(result: CutResult) -> float:
    """The error after 98 % of the whole fall."""
    errors = result.run.errors
    return float(errors[0]) - _DROP_SHARE * (float(errors[0]) - final_error(errors))


def _path_epoch(result: CutResult, path: Floats) -> float:
    seen = result.prefix.num_seen
    full = np.concatenate([result.run.errors[:seen], path[seen:]])
    found = _first_at(full, result.run.epochs, _wanted(result))
    return float("inf") if found is None else found


def _likely_epoch(held: HeldOutForecast) -> float:
    """Forecasts like those of ``forecast_curve``."""
    prefix = held.result.prefix
    seen = prefix.num_seen
    lucky = futures_of(held.mix, prefix, held.quantiles) * (1 - prefix.noise)
    now = (float(prefix.epochs[seen - 1]), prefix.best)
    return target_times(lucky, prefix.epochs[seen:], _wanted(held.result), now).likely_epoch


def _first_at(errors: Floats, epochs: Floats, wanted: float) -> float | None:
    hits = np.flatnonzero(np.minimum.accumulate(errors) <= wanted)
    return float(epochs[hits[0]]) if len(hits) else None


def _save_shipped_table(results: Sequence[CutResult], held: Sequence[HeldOutForecast], out: Path) -> None:
    """Writes the figures that come with the package: all jobs, with the coverage that jobs left out showed."""
    runs = {id(r.run): r.run for r in results}.values()
    provenance = {
        "source": "public learning curves: " + ", ".join(CURVE_TABLES),
        "num_runs": len(runs),
        "num_jobs": len({run.job for run in runs}),
        "date": datetime.date.today().isoformat(),
        "coverage_90": summary_of(results, held).rounded_coverage(),
    }
    save_table(summarise(results, mean_errors(results), provenance), out)
