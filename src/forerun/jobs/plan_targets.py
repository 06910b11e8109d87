"""``--target`` of ``forerun plan``: from curves, finished runs and batch sizes to the epochs of every candidate.

    epochs(B) = epochs(b) samples(B) / samples(b),     samples(B) = S_min B + S_min B_c

with b the batch size of the run and S_min, B_c those of ``forecasting.convergence``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field
from scipy.stats import t as student_t

from forerun.base.errors import ForecastError, InvalidSetupError, RecordError
from forerun.base.tables import csv_cells, read_rows
from forerun.graph.graph import Floats, Ints
from forerun.jobs.forecast import forecast
from forerun.jobs.forecast_tables import forecast_batches
from forerun.jobs.forecasting.convergence import BatchScaling
from forerun.jobs.forecasting.curve import Curve, Target, parse_target
from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve
from forerun.prediction.estimate import Interval
from forerun.search.engine import TargetEpochs

_TO_90 = 1.6449 / 1.2816
"""Distance of the 95 % rank from the middle, where a 90 % interval ends, over that of the 90 % rank; normal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRun:
    """Epochs that a model needs to a target, and their batch size.

    Attributes:
        epochs: Epochs to the target, with their 90 % interval.
        batch_size: Batch size of the run behind them; None where it is not known or does not matter.
    """

    epochs: Interval
    batch_size: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsToTarget:
    """Epochs of every candidate; the ``EpochsOf`` of a plan.

    Attributes:
        runs: Epochs to the target by model.
        law: Samples to the target against the batch size; None leaves the epochs unchanged. With a law every run
            has its batch size.
    """

    runs: Mapping[str, LearningRun]
    law: BatchScaling | None = None

    def __call__(self, model: str, global_batch: Ints) -> Floats:
        """Value, low and high, (3, n)."""
        run = self.runs[model]
        ends = np.asarray([run.epochs.value, run.epochs.low, run.epochs.high])
        growth = np.ones(len(global_batch))
        if self.law is not None:
            assert run.batch_size is not None
            growth = self.law.samples(global_batch) / self.law.samples([run.batch_size])
        return np.asarray(ends[:, None] * growth)


def epochs_of_ranks(ranks: tuple[float, float, float], end: float) -> Interval:
    """Epochs to a target, from those at probabilities 0.1, 0.5 and 0.9.

    The 90 % interval reaches further than these ranks: in logarithms 1.28 times as far from the middle. Training ends
    at its end, reached or not: no interval goes beyond, and a rank that is never reached is the end.

    Args:
        ranks: Epochs at the three probabilities; infinite if not by the end.
        end: Epoch at which training ends.

    >>> epochs_of_ranks((18.0, 20.0, float("inf")), 30.0).high
    30.0
    """
    early, middle, late = ranks
    low = middle * (early / middle) ** _TO_90 if early > 0 else 0.0
    high = middle * (late / middle) ** _TO_90 if math.isfinite(late) else end
    return Interval(middle, min(low, middle), max(middle, min(high, end)))


def epochs_of_finished_runs(epochs: Sequence[float]) -> Interval:
    """Epochs of a future run, from those at which finished runs of the same job reached the target.

    The geometric mean m, and with n runs whose logarithms scatter by s the interval of one more,

        m exp(+-t s sqrt(1 + 1 / n)),

    t being Student's 95 % quantile with n - 1 degrees of freedom. One run has no scatter and no interval.

    Raises:
        ForecastError: No run reached the target.
    """
    reached = [epoch for epoch in epochs if math.isfinite(epoch) and epoch > 0]
    if not reached:
        raise ForecastError("no finished run reached the target; give a lower target, or longer runs")
    logs = np.log(reached)
    mean, count = float(np.mean(logs)), len(reached)
    width = 0.0
    if count > 1:
        quantile = float(student_t.ppf(0.95, count - 1))
        width = quantile * float(np.std(logs, ddof=1)) * math.sqrt(1 + 1 / count)
    return Interval(math.exp(mean), math.exp(mean - width), math.exp(mean + width))


def epochs_of_law(law: BatchScaling, batch_size: float, dataset_size: int) -> LearningRun:
    """Epochs at one batch size by the law alone; the interval is its worst error at the points behind it.

    >>> law = BatchScaling(least_steps=1000.0, least_samples=64_000.0, worst_error=0.1)
    >>> epochs_of_law(law, 64, 64_000).epochs
    Interval(value=2.0, low=1.8, high=2.2)
    """
    epochs = float(law.epochs([batch_size], dataset_size)[0])
    ends = (epochs * (1 - law.worst_error), epochs * (1 + law.worst_error))
    return LearningRun(epochs=Interval(epochs, *ends), batch_size=batch_size)


def epochs_to_target(
    given: Mapping[str, Any], models: Sequence[str], num_samples: int, num_epochs: float | None
) -> TargetEpochs:
    """Epochs to the target by model and batch size.

    Args:
        given: The target and the evidence, by the names of ``_Evidence``.
        models: The models of the plan.
        num_samples: Samples of an epoch.
        num_epochs: Length of the runs; None for that of the schedule or of the history.

    Raises:
        InvalidSetupError: There is no evidence about the learning of a model, evidence without a target, or the target
            is not likely to be reached by the end of the run.
        ForecastError: The curve allows no forecast, or no finished run reached the target.
        RecordError: A file cannot be read.
    """
    if (target := given.get("target")) is None:
        raise InvalidSetupError(
            f"{', '.join(name.replace('_', ' ') for name in given)}: expected a target as well; give --target "
            "'accuracy>=0.92', or leave it out"
        )
    question = {**given, "target": parse_target(target)}
    if isinstance(given.get("curve"), str | Path):
        question["curve"] = read_curves(Path(given["curve"]))
    evidence = _Evidence(**question, num_samples=num_samples, num_epochs=num_epochs)
    found: dict[str, LearningRun] = {}
    notes: list[str] = []
    for model, curve in evidence.curves(models).items():
        found[model], said = evidence.of(curve)
        notes += [note if len(models) == 1 else f"{model}: {note}" for note in said]
    notes.append(_batch_note(evidence.law))
    return TargetEpochs(
        target=str(evidence.target),
        epochs=EpochsToTarget(runs=found, law=evidence.law),
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True, kw_only=True)
class _Evidence:
    """A user's question about the epochs to a target, and what it says of them.

    Attributes:
        target: Target, such as ``accuracy>=0.92``.
        curve: Curve of a run so far, as in ``forecast``, or one for each model.
        curve_batch_size: Batch size of the run in ``curve``, if its file does not say it.
        schedule: Learning-rate schedule of that run.
        history: Folder of finished runs of the same job.
        batches: Table of steps or epochs to the target at several batch sizes.
        critical_batch_size: Batch size that needs twice the least number of epochs.
        num_samples, num_epochs: As in ``epochs_to_target``.
    """

    target: Target
    curve: Path | Curve | Mapping[str, str | Path | Curve] | None = None
    curve_batch_size: int | None = None
    schedule: Any = None
    history: str | Path | None = None
    batches: str | Path | None = None
    critical_batch_size: float | None = None
    num_samples: int
    num_epochs: float | None

    @cached_property
    def law(self) -> BatchScaling | None:
        """Samples to the target against the batch size; None where nothing is said about it."""
        critical = self.critical_batch_size
        if self.batches is not None and critical is not None:
            raise InvalidSetupError(
                "both --batches and --critical-batch-size say how epochs grow with the batch size; give one of them"
            )
        if self.batches is not None:
            return forecast_batches(self.batches, dataset_size=self.num_samples).law
        if critical is None:
            return None
        if not 0 < critical < math.inf:
            raise InvalidSetupError(f"a critical batch size must be above zero, got {critical:g}")
        return BatchScaling(least_steps=1.0, least_samples=critical, worst_error=0.0)

    def curves(self, models: Sequence[str]) -> Mapping[str, Any]:
        """The curve of each model, None where a history or a table takes its place."""
        if isinstance(self.curve, Mapping):
            missing = [model for model in models if model not in self.curve]
            if missing:
                raise InvalidSetupError(
                    f"no curve of {', '.join(missing)} is given; add a row for each model to the table of --curve"
                )
            return {model: self.curve[model] for model in models}
        known = (self.curve, self.history, self.batches)
        if all(what is None for what in known):
            raise InvalidSetupError(
                f"the target '{self.target}' needs to know how the model learns: give --curve RUN.csv (a run so far), "
                "--history DIR (finished runs of the same job) or --batches FILE.csv (epochs at several batch sizes); "
                "or --epochs E instead of a target"
            )
        if len(models) > 1:
            raise InvalidSetupError(
                f"one run says how one model learns, and the plan has {len(models)}: give --curve a table with the "
                "columns model,run, or plan one model at a time"
            )
        return {models[0]: self.curve}

    def of(self, curve: Any) -> tuple[LearningRun, list[str]]:
        """Epochs that a model needs, by its curve if it has one, and notes on them."""
        if curve is not None:
            return self._by_curve(curve)
        return self._by_law() if self.history is None else self._by_history(self.history)

    def _by_curve(self, curve: Any) -> tuple[LearningRun, list[str]]:
        target, history = self.target, self.history if self.history is not None else ()
        answer = forecast(
            curve, target=target, schedule=self.schedule, epochs=self.num_epochs, history=history
        )
        found = answer.curve_forecast
        batch_size = self._batch_size(found.curve)
        per_unit = self._epochs_of_unit(found.curve, batch_size)
        share = f"with a probability of {100 * found.probability_at_end:.0f} % only"
        if not math.isfinite(found.epochs_to_target[1]):
            raise InvalidSetupError(
                f"{found.curve.name} reaches {target} by {found.curve.unit} {found.end_epoch:g} {share}; give a lower "
                "target, or a longer run with --epochs"
            )
        epochs = epochs_of_ranks(found.epochs_to_target, found.end_epoch).scaled(per_unit)
        notes = [*found.notes, f"epochs to {target}: forecast from {found.curve.name}"]
        if not math.isfinite(found.epochs_to_target[2]):
            notes.append(
                f"{target} is reached {share}: upper ends of time, cost and energy are those of the whole run, "
                f"{found.end_epoch * per_unit:g} epochs"
            )
        return LearningRun(epochs=epochs, batch_size=batch_size), notes

    def _by_law(self) -> tuple[LearningRun, list[str]]:
        assert self.law is not None
        notes = ["epochs to the target: those of the table of batch sizes"]
        if self.law.worst_error < 1e-6:
            notes.append("two batch sizes determine their law: the epochs have no interval")
        critical = self.law.critical_batch_size
        batch_size = max(critical, 1.0) if math.isfinite(critical) else 1.0
        return epochs_of_law(self.law, batch_size, self.num_samples), notes

    def _by_history(self, history: str | Path) -> tuple[LearningRun, list[str]]:
        target = self.target
        runs = [read_curve(path, target.metric, target.is_rising) for path in find_curve_files(history)]
        sizes = [self._batch_size(run) for run in runs]
        reached = [
            (run.reached(target) or math.inf) * self._epochs_of_unit(run, size)
            for run, size in zip(runs, sizes, strict=True)
        ]
        if self.law is not None:
            # All at the batch size of the first: the law takes their differences out.
            shares = self.law.samples([size for size in sizes if size is not None])
            reached = [epoch * shares[0] / share for epoch, share in zip(reached, shares, strict=True)]
        epochs = epochs_of_finished_runs(reached)
        count = sum(math.isfinite(epoch) for epoch in reached)
        notes = [f"epochs to {target}: {count} of {len(runs)} finished runs reached it"]
        if count == 1:
            notes.append("one run has no scatter: the epochs have no interval")
        return LearningRun(epochs=epochs, batch_size=None if self.law is None else sizes[0]), notes

    def _batch_size(self, run: Curve) -> float | None:
        """Batch size of a run, as given or by the steps of its epochs; None where nothing depends on it."""
        given = self.curve_batch_size
        if self.law is None and run.unit == "epoch":
            return None
        if given is not None:
            if given < 1:
                raise InvalidSetupError(f"the batch size of a curve must be at least 1, got {given}")
            return float(given)
        steps = run.steps_per_epoch() if run.unit == "epoch" else None
        if steps:
            return max(1.0, self.num_samples / steps)
        raise InvalidSetupError(
            f"{run.name} does not say the batch size of its steps: give --curve-batch-size B"
        )

    def _epochs_of_unit(self, run: Curve, batch_size: float | None) -> float:
        """Epochs per unit of a curve, which counts epochs or steps."""
        if run.unit == "epoch":
            return 1.0
        assert batch_size is not None
        return batch_size / self.num_samples


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
        named = {name for cells in csv_cells(path).values() for name in cells}
    except RecordError:
        return path  # the reader of curves reports its errors
    if not {"model", "run"} <= named:
        return path
    return {row.model: path.parent / row.run for _, row in read_rows(path, _ModelRun)}


class _ModelRun(BaseModel):
    """A row of a table of curves."""

    model: Annotated[str, Field(description="a model")]
    run: Annotated[str, Field(description="the file of its curve, from the table")]
