"""Trains a network and writes its learning curve: ``forerun measure curve`` as a function.

    B_simple = tr(covariance of the gradient of one sample) / |gradient|^2

From the squared norms of gradients over a small and a large batch of the same weights, without bias:

    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)
    S     = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)

Both are noisy; their averages over many steps, and only then the ratio, are what counts. B_simple approximates the
critical batch size of ``batch_scaling`` up to a factor that depends on the optimizer and grows in the course of a run.

Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, RecordError
from forerun.base.extras import require
from forerun.evidence.measurement.curve_training import CurveRow, StepRow, train_for_curve
from forerun.evidence.measurement.datasets import own_image_size
from forerun.evidence.measurement.settings import CurveSetup
from forerun.jobs import NoiseScale, gradient_noise_scale, parse_target, schedule_of
from forerun.script import CurveLog

__all__ = ["TrainedCurve", "measure_curve"]


_METRICS = ("loss", "accuracy", "val_loss", "val_accuracy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedCurve(Answer):
    """A finished training.

    Attributes:
        file: File of the curve.
        setup: Model and settings of the training.
        rows: One row per epoch.
        noise: The gradient noise scale, None unless asked for.
        reached_epoch: First epoch at which the target was reached, or None.
    """

    file: str
    setup: CurveSetup
    rows: tuple[CurveRow, ...]
    noise: NoiseScale | None
    reached_epoch: int | None

    def sentence(self) -> str:
        """The result in one or two sentences."""
        last = self.rows[-1]
        words = (
            f"{self.setup.model} on {self.setup.dataset}: {last.epoch} epochs, {last.step} steps, "
            f"{last.elapsed_s:.1f} s, held-out accuracy {last.val_accuracy:.4f}; written to {self.file}"
        )
        if self.reached_epoch is not None:
            words += f"; target reached at epoch {self.reached_epoch}"
        if self.noise is not None:
            words += f"; gradient noise scale {self.noise.batch_size:,.0f} images"
        return words

    def json_fields(self) -> dict[str, Any]:
        """The setup, and the end of the curve."""
        last = self.rows[-1]
        return {
            "file": self.file,
            **fields_of(self.setup),
            "num_steps": last.step,
            "elapsed_s": last.elapsed_s,
            **{name: getattr(last, name) for name in _METRICS},
            "reached_epoch": self.reached_epoch,
            "gradient_noise": self.noise,
        }


def measure_curve(
    model: str,
    out: str | Path,
    *,
    schedule: Any = None,
    target: str | None = None,
    num_epochs: int = 30,
    steps_out: str | Path | None = None,
    on_row: Callable[[str], None] | None = None,
    **setup: Any,
) -> TrainedCurve:
    """Trains a network and writes its curve, one row per epoch, on disk before the next epoch begins.

    Args:
        model: Model specification, as in ``predict``.
        out: File for the curve, a CSV.
        schedule: See ``forerun.jobs.schedule_of``; a cosine over all epochs if None.
        target: Target that ends the training, such as ``val_accuracy>=0.92``.
        num_epochs: Epochs of the training, if no target ends it.
        steps_out: File for a row per step, a CSV with the columns epoch, step, loss and acc of Optimus' logs.
        on_row: Receives a line about each epoch.
        setup: The other attributes of ``CurveSetup``.

    Raises:
        UsageError: The setup, the schedule or the target is not possible.
        MeasurementError: The dataset cannot be loaded, or the run diverged.
    """
    wanted = None if target is None else parse_target(target)
    if wanted is not None and wanted.metric not in _METRICS:
        raise InvalidSetupError(
            f"a curve has the metrics {', '.join(_METRICS)}, got a target of '{wanted.metric}'"
        )
    require("training a model", "torch")
    setup = {"image_size": own_image_size(str(setup.get("dataset", "cifar10"))), **setup}
    chosen = CurveSetup(model=model, num_epochs=num_epochs, **setup)
    plan = schedule_of(schedule if schedule is not None else f"cosine:epochs={num_epochs}", num_epochs)
    log = CurveLog(out)
    step_log = None if steps_out is None else _StepLog(steps_out)
    rows: list[CurveRow] = []

    def on_epoch(row: CurveRow) -> bool:
        rows.append(row)
        figures = {name: getattr(row, name) for name in _METRICS}
        log.append(
            epoch=row.epoch,
            step=row.step,
            **figures,
            learning_rate=row.learning_rate,
            elapsed_s=row.elapsed_s,
        )
        if step_log is not None:
            step_log.append(row.steps)
        if on_row is not None:
            on_row(
                f"epoch {row.epoch}/{num_epochs}: loss {row.loss:.4f}, accuracy {row.accuracy:.4f}, held out "
                f"{row.val_accuracy:.4f}, {row.elapsed_s:.0f} s"
            )
        return wanted is not None and wanted.is_reached_by(getattr(row, wanted.metric))

    train_for_curve(chosen, plan.rate, on_epoch)
    reached = None
    if wanted is not None and wanted.is_reached_by(getattr(rows[-1], wanted.metric)):
        reached = rows[-1].epoch
    return TrainedCurve(
        file=str(out), setup=chosen, rows=tuple(rows), noise=_noise(rows, chosen), reached_epoch=reached
    )


class _StepLog:
    """A CSV with a row per step, in the columns of Optimus' logs: ``epoch, step, loss, acc``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._write("w", [("epoch", "step", "loss", "acc")])

    def append(self, steps: Iterable[StepRow]) -> None:
        """Adds the steps of an epoch.

        Raises:
            RecordError: The file cannot be written.
        """
        self._write("a", [(row.epoch, row.step, row.loss, row.accuracy) for row in steps])

    def _write(self, mode: str, rows: Iterable[tuple[object, ...]]) -> None:
        try:
            with self.path.open(mode, newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
        except OSError as error:
            raise RecordError(
                f"the log '{self.path}' cannot be written: {error.strerror or error}"
            ) from error


def _noise(rows: list[CurveRow], setup: CurveSetup) -> NoiseScale | None:
    norms = [row.norms for row in rows if row.norms is not None]
    if not norms:
        return None
    small = [value for n in norms for value in n.small]
    large = [value for n in norms for value in n.large]
    return gradient_noise_scale(small, large, setup.batch_size // 2, setup.batch_size)
