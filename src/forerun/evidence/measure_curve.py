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
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, MeasurementError, RecordError
from forerun.base.extras import require
from forerun.base.kept import writes
from forerun.evidence.measurement.datasets import class_count, image_batches, load_images, own_image_size
from forerun.evidence.measurement.runners.torch_device import open_device, synchroniser
from forerun.evidence.measurement.runners.training_runner import Sums, num_hits
from forerun.evidence.measurement.settings import CurveSetup
from forerun.jobs import NoiseScale, gradient_noise_scale, parse_target, schedule_of
from forerun.script import CurveLog

if TYPE_CHECKING:
    import torch

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
    # The file is begun before the training: a place that cannot be written is told at once.
    if steps_out is not None:
        _write_steps(steps_out, "w", [StepRow._fields])
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
        if steps_out is not None:
            _write_steps(steps_out, "a", row.steps)
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


def _write_steps(path: str | Path, mode: str, rows: Iterable[tuple[object, ...]]) -> None:
    """Writes rows of a CSV with a row per step, in the columns of Optimus' logs.

    Raises:
        RecordError: The file cannot be written.
    """
    with writes(path, RecordError), Path(path).open(mode, newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)


def _noise(rows: list[CurveRow], setup: CurveSetup) -> NoiseScale | None:
    norms = [norm for row in rows for norm in row.norms]
    if not norms:
        return None
    small, large = zip(*norms, strict=True)
    return gradient_noise_scale(small, large, setup.batch_size // 2, setup.batch_size)


_EVALUATION_BATCH = 256
_SHIFT = 4
_MOMENTUM, _WEIGHT_DECAY = 0.9, 5e-4

Rates = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


class StepRow(NamedTuple):
    """One step of a training, in the columns of Optimus' logs.

    Attributes:
        epoch: Number of the epoch, from 1.
        step: Steps done since the start of training.
        loss, acc: Means over the images of the step.
    """

    epoch: int
    step: int
    loss: float
    acc: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveRow:
    """One epoch of a learning curve.

    Attributes:
        epoch: Number of epochs done.
        step: Number of steps done.
        loss, accuracy: Means over the training images, during training.
        val_loss, val_accuracy: Means over held-out images, after the epoch.
        learning_rate: Learning rate of the last step.
        elapsed_s: Time of training and evaluation since the start [s].
        norms: Squared norm of the gradient of each step, over its half batches and over the whole; none without
            gradient noise.
        steps: Each step of the epoch.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float
    val_loss: float
    val_accuracy: float
    learning_rate: float
    elapsed_s: float
    norms: tuple[tuple[float, float], ...] = ()
    steps: tuple[StepRow, ...] = ()


def train_for_curve(setup: CurveSetup, rates: Rates, on_epoch: Callable[[CurveRow], bool]) -> None:
    """Trains until the last epoch, or until ``on_epoch`` returns True.

    SGD with momentum 0.9 and weight decay 5e-4, or Adam; a schedule of relative rates, set anew before each step;
    CIFAR-10 images shifted by up to four pixels and mirrored, as He et al. 2016 (section 4.2) do. With gradient noise
    on, each step runs in two halves, whose gradients give the noise scale at the cost of a few more launches.

    The same seed gives the same weights, order and images on any device; what differs is rounding, and the clock.

    Args:
        setup: Settings of the training.
        rates: Function from times [epochs] to relative learning rates, on arrays.
        on_epoch: Called after each epoch; returns True to end the run.

    Raises:
        MeasurementError: The loss became NaN or infinite.
    """
    run = _CurveRun(setup, rates)
    for epoch in range(1, setup.num_epochs + 1):
        row = run.epoch(epoch)
        if on_epoch(row):
            return
        if not math.isfinite(row.loss):
            raise MeasurementError(
                f"{setup.model} diverged in epoch {epoch}: its loss is {row.loss}; lower the learning rate, got "
                f"{setup.learning_rate:g}"
            )


class _CurveRun:
    """A network in training."""

    def __init__(self, setup: CurveSetup, rates: Rates) -> None:
        import torch

        from forerun.tracing.models.sources import build_model

        self.setup, self.rates = setup, rates
        self.device = open_device(setup.device)
        self.synchronise = synchroniser(self.device)
        torch.manual_seed(setup.seed)
        # Built on the CPU and moved: a seed gives other weights on a GPU.
        classes = class_count(setup.dataset)
        built = build_model(setup.model, device="cpu", image_size=setup.image_size, num_classes=classes)
        self.module = built.module.to(self.device)
        self.optimizer = _optimizer(setup, self.module)
        shared: dict[str, Any] = {
            "num_channels": built.input_shape[0],
            "image_size": setup.image_size,
            "seed": setup.seed,
        }
        images = load_images(setup.dataset, train=True, num_images=setup.num_images, **shared)
        self.train_batches = image_batches(images, setup.batch_size, shuffle=True, seed=setup.seed)
        limit = None if setup.num_images is None else max(256, setup.num_images // 5)
        held_out = load_images(setup.dataset, train=False, num_images=limit, **shared)
        self.test_batches = image_batches(held_out, _EVALUATION_BATCH, shuffle=False)
        self.chance = torch.Generator().manual_seed(setup.seed)
        self.num_steps = 0
        self.began_s = time.perf_counter()

    def epoch(self, number: int) -> CurveRow:
        """Trains one epoch and evaluates the network."""
        self.module.train()
        sums = Sums(self.device)
        norms: list[tuple[float, float]] = []
        # On the device: reading them would wait for it.
        steps: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        num_batches = len(self.train_batches)
        rate = 0.0
        for index, (images, labels) in enumerate(self.train_batches):
            rate = self._set_rate(number - 1 + (index + 0.5) / num_batches)
            if self.setup.dataset == "cifar10":
                images = _shifted_and_mirrored(images, self.chance)
            loss, hits, norm = self._step(images.to(self.device), labels.to(self.device))
            sums.add(loss.detach(), hits, len(labels))
            steps.append((loss, hits, len(labels)))
            if norm is not None:
                norms.append(norm)
            self.num_steps += 1
        val_loss, val_accuracy = self._evaluate()
        self.synchronise()
        loss_mean, accuracy = sums.means()
        return CurveRow(
            epoch=number,
            step=self.num_steps,
            loss=loss_mean,
            accuracy=accuracy,
            val_loss=val_loss,
            val_accuracy=val_accuracy,
            learning_rate=rate,
            elapsed_s=time.perf_counter() - self.began_s,
            norms=tuple(norms),
            steps=tuple(
                StepRow(number, self.num_steps - len(steps) + index, float(loss), float(hits) / count)
                for index, (loss, hits, count) in enumerate(steps, start=1)
            ),
        )

    def _set_rate(self, epochs_done: float) -> float:
        rate = self.setup.learning_rate * float(self.rates(np.asarray([epochs_done]))[0])
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _step(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float] | None]:
        if self.setup.with_gradient_noise and len(labels) >= 4 and len(labels) % 2 == 0:
            return self._halved_step(images, labels)
        self.module.zero_grad(set_to_none=True)
        loss, hits = self._loss(images, labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach(), hits, None

    def _halved_step(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[float, float]]:
        """Makes a step from the gradients of two halves; the norms of the halves are averaged."""
        self.module.zero_grad(set_to_none=True)
        half = len(labels) // 2
        loss_a, hits_a = self._loss(images[:half], labels[:half])
        loss_a.backward()
        # Copies: the second half adds its gradients in place.
        first = [p.grad.clone() for p in self.module.parameters() if p.grad is not None]
        loss_b, hits_b = self._loss(images[half:], labels[half:])
        loss_b.backward()
        whole = [p.grad for p in self.module.parameters() if p.grad is not None]
        small = large = 0.0
        for before, both in zip(first, whole, strict=True):
            small += 0.5 * float((before**2).sum() + ((both - before) ** 2).sum())
            both.mul_(0.5)
            large += float((both**2).sum())
        self.optimizer.step()
        return (loss_a + loss_b).detach() / 2, hits_a + hits_b, (small, large)

    def _loss(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.functional import cross_entropy

        logits = self.module(images)
        return cross_entropy(logits, labels), num_hits(logits, labels)

    def _evaluate(self) -> tuple[float, float]:
        import torch

        self.module.eval()
        sums = Sums(self.device)
        with torch.no_grad():
            for images, labels in self.test_batches:
                loss, hits = self._loss(images.to(self.device), labels.to(self.device))
                sums.add(loss, hits, len(labels))
        return sums.means()


def _optimizer(setup: CurveSetup, module: torch.nn.Module) -> torch.optim.Optimizer:
    import torch

    if setup.optimizer == "adam":
        return torch.optim.Adam(module.parameters(), lr=setup.learning_rate)
    return torch.optim.SGD(
        module.parameters(), lr=setup.learning_rate, momentum=_MOMENTUM, weight_decay=_WEIGHT_DECAY
    )


def _shifted_and_mirrored(images: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Images shifted by up to four pixels either way with zeros moved in; each is mirrored with probability 1/2."""
    import torch
    from torch.nn.functional import pad

    batch, _, height, width = images.shape
    padded = pad(images, (_SHIFT,) * 4)
    rows = torch.randint(0, 2 * _SHIFT + 1, (batch, 1), generator=chance) + torch.arange(height)
    columns = torch.randint(0, 2 * _SHIFT + 1, (batch, 1), generator=chance) + torch.arange(width)
    mirrored = torch.rand(batch, generator=chance) < 0.5
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    which = torch.arange(batch)[:, None, None]
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
