"""``forerun forecast --evaluate`` as functions: forecasters tested on finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from forerun.api.forecast import is_logged, rate_column, schedule_from
from forerun.convergence.backtest import StoredRun, cut_results, mean_errors, summarise
from forerun.convergence.backtest_summary import Backtest, summary_of
from forerun.convergence.backtest_table import save_table
from forerun.convergence.cleaning import clean
from forerun.convergence.curve import Curve, Floats, error_scale
from forerun.convergence.curve_files import find_curve_files, read_curve
from forerun.convergence.schedule import LearningRateSchedule
from forerun.errors import RecordError

__all__ = ["Backtest", "backtest"]


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
        save_table(summarise(mean_errors(results), provenance), Path(save))
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
