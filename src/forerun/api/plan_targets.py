"""``--target`` of ``forerun plan``: from curves, finished runs and batch sizes to the epochs of every candidate."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.api.forecast import forecast
from forerun.api.forecast_tables import forecast_batches
from forerun.convergence.batch_scaling import BatchScaling
from forerun.convergence.curve import Curve
from forerun.convergence.curve_files import find_curve_files, read_curve
from forerun.convergence.target import Target, parse_target
from forerun.errors import InvalidSetupError, RecordError
from forerun.planner.epochs import (
    EpochsToTarget,
    LearningRun,
    epochs_of_finished_runs,
    epochs_of_law,
    epochs_of_ranks,
)

__all__ = ["TargetEpochs", "TargetQuestion", "epochs_to_target", "read_curves"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetQuestion:
    """A user's question about the epochs to a target.

    Attributes:
        target: Target, such as ``accuracy>=0.92``.
        curve: Curve of a run so far, as in ``forecast``, or one for each model.
        curve_batch_size: Batch size of the run in ``curve``, if its file does not say it.
        schedule: Learning-rate schedule of that run.
        history: Folder of finished runs of the same job.
        batches: Table of steps or epochs to the target at several batch sizes.
        critical_batch_size: Batch size that needs twice the least number of epochs.
    """

    target: str | None = None
    curve: str | Path | Curve | Mapping[str, str | Path | Curve] | None = None
    curve_batch_size: int | None = None
    schedule: Any = None
    history: str | Path | None = None
    batches: str | Path | None = None
    critical_batch_size: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetEpochs:
    """Epochs to the target.

    Attributes:
        target: The target in words.
        epochs: Epochs of every candidate.
        notes: Remarks for the reader.
    """

    target: str
    epochs: EpochsToTarget
    notes: tuple[str, ...]


def epochs_to_target(
    question: TargetQuestion, models: Sequence[str], num_samples: int, num_epochs: float | None
) -> TargetEpochs | None:
    """Epochs to the target by model and batch size; None where no target is asked for.

    Args:
        question: The target and the evidence.
        models: The models of the plan.
        num_samples: Samples of an epoch.
        num_epochs: Length of the runs; None for that of the schedule or of the history.

    Raises:
        InvalidSetupError: There is no evidence about the learning of a model, evidence without a target, or the target
            is not likely to be reached by the end of the run.
        ForecastError: The curve allows no forecast, or no finished run reached the target.
        RecordError: A file cannot be read.
    """
    if question.target is None:
        _refuse_without_target(question)
        return None
    target = parse_target(question.target)
    law = _law(question, num_samples)
    found: dict[str, LearningRun] = {}
    notes: list[str] = []
    for model, curve in _curves(question, models).items():
        run, said = _run(question, target, curve, law, num_samples, num_epochs)
        found[model] = run
        notes += [note if len(models) == 1 else f"{model}: {note}" for note in said]
    notes.append(_batch_note(law))
    return TargetEpochs(
        target=str(target), epochs=EpochsToTarget(runs=found, law=law), notes=tuple(dict.fromkeys(notes))
    )


def _refuse_without_target(question: TargetQuestion) -> None:
    given = [
        name.replace("_", " ")
        for name in ("curve", "curve_batch_size", "schedule", "history", "batches", "critical_batch_size")
        if getattr(question, name) is not None
    ]
    if given:
        raise InvalidSetupError(
            f"{', '.join(given)}: expected a target as well; give --target 'accuracy>=0.92', or leave it out"
        )


def _law(question: TargetQuestion, num_samples: int) -> BatchScaling | None:
    critical = question.critical_batch_size
    if question.batches is not None and critical is not None:
        raise InvalidSetupError(
            "both --batches and --critical-batch-size say how epochs grow with the batch size; give one of them"
        )
    if question.batches is not None:
        return forecast_batches(question.batches, dataset_size=num_samples).law
    if critical is None:
        return None
    if not 0 < critical < math.inf:
        raise InvalidSetupError(f"a critical batch size must be above zero, got {critical:g}")
    return BatchScaling(least_steps=1.0, least_samples=critical, worst_error=0.0)


def _curves(question: TargetQuestion, models: Sequence[str]) -> Mapping[str, Any]:
    """The curve of each model, None where a history or a table takes its place."""
    if isinstance(question.curve, Mapping):
        missing = [model for model in models if model not in question.curve]
        if missing:
            raise InvalidSetupError(
                f"no curve of {', '.join(missing)} is given; add a row for each model to the table of --curve"
            )
        return {model: question.curve[model] for model in models}
    known = (question.curve, question.history, question.batches)
    if all(what is None for what in known):
        raise InvalidSetupError(
            f"the target '{question.target}' needs to know how the model learns: give --curve RUN.csv (a run so far), "
            "--history DIR (finished runs of the same job) or --batches FILE.csv (epochs at several batch sizes); or "
            "--epochs E instead of a target"
        )
    if len(models) > 1:
        raise InvalidSetupError(
            f"one run says how one model learns, and the plan has {len(models)}: give --curve a table with the columns "
            "model,run, or plan one model at a time"
        )
    return {models[0]: question.curve}


def _run(
    question: TargetQuestion,
    target: Target,
    curve: Any,
    law: BatchScaling | None,
    num_samples: int,
    num_epochs: float | None,
) -> tuple[LearningRun, list[str]]:
    """Epochs that one model needs, and notes on them."""
    if curve is None and question.history is None:
        return _by_law(law, num_samples)
    if curve is None:
        return _by_history(question, target, law, num_samples)
    found = forecast(
        curve,
        target=target,
        schedule=question.schedule,
        epochs=num_epochs,
        history=question.history if question.history is not None else (),
    ).curve_forecast
    batch_size = _batch_size(question, found.curve, law, num_samples)
    per_unit = _epochs_of_unit(found.curve, batch_size, num_samples)
    if not math.isfinite(found.epochs_to_target[1]):
        raise InvalidSetupError(
            f"{found.curve.name} reaches {target} by {found.curve.unit} {found.end_epoch:g} with a probability of "
            f"{100 * found.probability_at_end:.0f} % only; give a lower target, or a longer run with --epochs"
        )
    epochs = epochs_of_ranks(found.epochs_to_target, found.end_epoch).scaled(per_unit)
    notes = [*found.notes, f"epochs to {target}: forecast from {found.curve.name}"]
    if not math.isfinite(found.epochs_to_target[2]):
        notes.append(
            f"{target} is reached with a probability of {100 * found.probability_at_end:.0f} % only: upper ends of "
            f"time, cost and energy are those of the whole run, {found.end_epoch * per_unit:g} epochs"
        )
    return LearningRun(epochs=epochs, batch_size=batch_size), notes


def _by_law(law: BatchScaling | None, num_samples: int) -> tuple[LearningRun, list[str]]:
    assert law is not None
    notes = ["epochs to the target: those of the table of batch sizes"]
    if law.worst_error < 1e-6:
        notes.append("two batch sizes determine their law: the epochs have no interval")
    critical = law.critical_batch_size
    return epochs_of_law(law, max(critical, 1.0) if math.isfinite(critical) else 1.0, num_samples), notes


def _by_history(
    question: TargetQuestion, target: Target, law: BatchScaling | None, num_samples: int
) -> tuple[LearningRun, list[str]]:
    assert question.history is not None
    files = find_curve_files(question.history)
    runs = [read_curve(path, target.metric, target.is_rising) for path in files]
    sizes = [_batch_size(question, run, law, num_samples) for run in runs]
    reached = [
        _reached(run, target) * _epochs_of_unit(run, size, num_samples)
        for run, size in zip(runs, sizes, strict=True)
    ]
    if law is None:
        batch_size = None
    else:
        # All at the batch size of the first: the law takes their differences out.
        batch_size = sizes[0]
        shares = law.samples([size for size in sizes if size is not None])
        reached = [epoch * shares[0] / share for epoch, share in zip(reached, shares, strict=True)]
    epochs = epochs_of_finished_runs(reached)
    count = sum(math.isfinite(epoch) for epoch in reached)
    notes = [f"epochs to {target}: {count} of {len(runs)} finished runs reached it"]
    if count == 1:
        notes.append("one run has no scatter: the epochs have no interval")
    return LearningRun(epochs=epochs, batch_size=batch_size), notes


def _reached(run: Curve, target: Target) -> float:
    hits = [e for e, v in zip(run.epochs, run.values, strict=True) if target.is_reached_by(float(v))]
    return float(hits[0]) if hits else math.inf


def _batch_size(
    question: TargetQuestion, run: Curve, law: BatchScaling | None, num_samples: int
) -> float | None:
    """Batch size of a run, as given or by the steps of its epochs; None where nothing depends on it."""
    if law is None and run.unit == "epoch":
        return None
    if question.curve_batch_size is not None:
        if question.curve_batch_size < 1:
            raise InvalidSetupError(
                f"the batch size of a curve must be at least 1, got {question.curve_batch_size}"
            )
        return float(question.curve_batch_size)
    steps = run.steps_per_epoch() if run.unit == "epoch" else None
    if steps:
        return max(1.0, num_samples / steps)
    raise InvalidSetupError(f"{run.name} does not say the batch size of its steps: give --curve-batch-size B")


def _epochs_of_unit(run: Curve, batch_size: float | None, num_samples: int) -> float:
    """Epochs per unit of a curve, which counts epochs or steps."""
    if run.unit == "epoch":
        return 1.0
    assert batch_size is not None
    return batch_size / num_samples


def _batch_note(law: BatchScaling | None) -> str:
    if law is None:
        return (
            "every batch size is given the epochs of the run: how they grow with the batch is not known; give "
            "--batches FILE.csv or --critical-batch-size B"
        )
    return (
        f"epochs grow with the batch size as 1 + B / {law.critical_batch_size:.3g}; where one recipe is stretched over "
        "many batches that is a lower bound"
    )


def read_curves(path: Path) -> Path | dict[str, str | Path | Curve]:
    """A curve, or one for each model where the file is a table with the columns ``model`` and ``run``.

    Runs are looked for beside the table.

    Raises:
        RecordError: A row lacks its model or its run.
    """
    if path.is_dir() or path.suffix.lower() != ".csv":
        return path
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if not {"model", "run"} <= set(reader.fieldnames or ()):
                return path
            rows = list(reader)
    except (OSError, UnicodeDecodeError, csv.Error):
        return path  # the reader of curves reports its errors
    for number, row in enumerate(rows, start=2):
        if not row["model"] or not row["run"]:
            raise RecordError(f"{path}, line {number}: expected a model and its run, got {row}")
    return {row["model"].strip(): path.parent / row["run"].strip() for row in rows}
