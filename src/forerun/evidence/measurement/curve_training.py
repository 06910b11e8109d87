"""Trains a network for its learning curve: a row of loss, accuracy, learning rate and time per epoch.

SGD with momentum 0.9 and weight decay 5e-4, or Adam; a schedule of relative rates, set anew before each step;
CIFAR-10 images shifted by up to four pixels and mirrored, as He et al. 2016 (section 4.2) do. With gradient noise on,
each step runs in two halves, whose gradients give the noise scale at the cost of a few more launches.

The same seed gives the same weights, order and images on any device; what differs is rounding, and the clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import MeasurementError
from forerun.evidence.measurement.datasets import class_count, load_images
from forerun.evidence.measurement.image_loading import image_batches
from forerun.evidence.measurement.runners.torch_device import open_device, synchroniser
from forerun.evidence.measurement.settings import CurveSetup

if TYPE_CHECKING:
    import torch

__all__ = ["CurveRow", "GradientNorms", "StepRow", "train_for_curve"]

_EVALUATION_BATCH = 256
_SHIFT = 4
_MOMENTUM, _WEIGHT_DECAY = 0.9, 5e-4

Rates = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """Squared norms of gradients in an epoch, over half batches and whole batches, (steps,) each."""

    small: tuple[float, ...]
    large: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step of a training.

    Attributes:
        epoch: Number of the epoch, from 1.
        step: Steps done since the start of training.
        loss, accuracy: Means over the images of the step.
    """

    epoch: int
    step: int
    loss: float
    accuracy: float


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
        norms: Norms of gradients; None without gradient noise.
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
    norms: GradientNorms | None = None
    steps: tuple[StepRow, ...] = ()


def train_for_curve(setup: CurveSetup, rates: Rates, on_epoch: Callable[[CurveRow], bool]) -> None:
    """Trains until the last epoch, or until ``on_epoch`` returns True.

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
        sums = _Sums()
        norms: list[tuple[float, float]] = []
        steps: list[
            tuple[torch.Tensor, torch.Tensor, int]
        ] = []  # on the device: reading them would wait for it
        num_batches = len(self.train_batches)
        rate = 0.0
        for index, (images, labels) in enumerate(self.train_batches):
            rate = self._set_rate(number - 1 + (index + 0.5) / num_batches)
            if self.setup.dataset == "cifar10":
                images = _shifted_and_mirrored(images, self.chance)
            loss, hits, norm = self._step(images.to(self.device), labels.to(self.device))
            sums.add(loss, hits, len(labels))
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
            norms=GradientNorms(small=tuple(n[0] for n in norms), large=tuple(n[1] for n in norms))
            if norms
            else None,
            steps=tuple(
                StepRow(
                    epoch=number,
                    step=self.num_steps - len(steps) + index,
                    loss=float(loss),
                    accuracy=float(hits) / count,
                )
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
        return cross_entropy(logits, labels), (logits.detach().argmax(1) == labels).sum()

    def _evaluate(self) -> tuple[float, float]:
        import torch

        self.module.eval()
        sums = _Sums()
        with torch.no_grad():
            for images, labels in self.test_batches:
                loss, hits = self._loss(images.to(self.device), labels.to(self.device))
                sums.add(loss, hits, len(labels))
        return sums.means()


class _Sums:
    """Sums of loss and correct answers over images, on the device."""

    def __init__(self) -> None:
        self.loss: Any = 0.0
        self.hits: Any = 0
        self.num_images = 0

    def add(self, loss: torch.Tensor, hits: torch.Tensor, num_images: int) -> None:
        """Adds a batch."""
        self.loss = self.loss + loss * num_images
        self.hits = self.hits + hits
        self.num_images += num_images

    def means(self) -> tuple[float, float]:
        """Loss and accuracy per image."""
        return float(self.loss) / self.num_images, float(self.hits) / self.num_images


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
