"""Learning curves of forerun's own trainings: forecast at a share of the run and compared with its end.

Nothing was fitted to them: weights and intervals of the forecasts are those of the public tables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.jobs.forecasting.backtest_table import shipped_table
from forerun.jobs.forecasting.convergence import fit_batch_scaling
from forerun.jobs.forecasting.curve import Curve, Target, parse_target
from forerun.jobs.forecasting.curve_files import read_target_curve
from forerun.jobs.forecasting.forecast import CurveForecast, forecast_curve
from forerun.jobs.forecasting.forecast_answer import RunOutcome, outcome_of
from forerun.jobs.forecasting.schedule import parse_schedule

CUT = 0.3
TARGET = "val_accuracy>=0.97"
BATCH_TARGET = "val_accuracy>=0.95"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCurveRow:
    """A run at a share of its length.

    Attributes:
        name: The run.
        tier: Tier of the forecast.
        forecast: The forecast.
        outcome: End of the run.
    """

    name: str
    tier: str
    forecast: CurveForecast
    outcome: RunOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnBatches:
    """Steps to a target at the largest batch, from the smaller ones.

    Attributes:
        batch_size: The largest.
        predicted_steps, actual_steps: To ``BATCH_TARGET``.
        critical_batch_size: By the law.
        noise_batch_sizes: Gradient noise scales of single runs.
    """

    batch_size: int
    predicted_steps: float
    actual_steps: float
    critical_batch_size: float
    noise_batch_sizes: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnCurves:
    """Figures of the section.

    Attributes:
        command: Command that made the runs.
        rows: Forecasts and outcomes, once by the schedule and once with the other runs as history.
        batches: The law of batch sizes on them.
    """

    command: str
    rows: tuple[OwnCurveRow, ...]
    batches: OwnBatches


def own_curves_folder() -> Path:
    """Folder of the curves."""
    return Path(__file__).parent / "curves"


def own_curves() -> OwnCurves:
    """All shipped curves forecast; a second."""
    document = json.loads((own_curves_folder() / "curves.json").read_text(encoding="utf-8"))
    target = parse_target(TARGET)
    runs = [read_target_curve(own_curves_folder() / run["file"], target) for run in document["runs"]]
    rows = [_row(run, [], document["schedule"], target) for run in runs]
    rows += [_row(run, [r for r in runs if r is not run], document["schedule"], target) for run in runs]
    return OwnCurves(
        command=document["source"],
        rows=tuple(rows),
        batches=_batches(document["runs"], runs),
    )


def _row(run: Curve, siblings: Sequence[Curve], schedule: str, target: Target) -> OwnCurveRow:
    found = forecast_curve(
        run.first(round(CUT * len(run))),
        shipped_table(),
        target=target,
        end_epoch=float(run.epochs[-1]),
        schedule=parse_schedule(schedule),
        siblings=siblings,
    )
    name = run.name.removesuffix(".csv")
    return OwnCurveRow(name=name, tier=str(found.tier), forecast=found, outcome=outcome_of(run, found))


def _batches(described: Sequence[dict[str, float]], runs: Sequence[Curve]) -> OwnBatches:
    target = parse_target(BATCH_TARGET)
    points = [(int(d["batch_size"]), _steps_to(run, target)) for d, run in zip(described, runs, strict=True)]
    largest = max(size for size, _ in points)
    fitted = [(size, steps) for size, steps in points if size < largest]
    law = fit_batch_scaling([s for s, _ in fitted], [n for _, n in fitted])
    noise = [d["gradient_noise_batch_size"] for d in described]
    return OwnBatches(
        batch_size=largest,
        predicted_steps=float(law.steps([largest])[0]),
        actual_steps=float(np.mean([n for s, n in points if s == largest])),
        critical_batch_size=law.critical_batch_size,
        noise_batch_sizes=tuple(n for n in noise if n is not None),
    )


def _steps_to(run: Curve, target: Target) -> float:
    assert run.steps is not None
    hits = [target.is_reached_by(float(value)) for value in run.values]
    return float(run.steps[hits.index(True)])
