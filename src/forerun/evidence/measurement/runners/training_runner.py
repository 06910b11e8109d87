"""Epochs of training a network on images, with input pipeline, accuracy and loss; and its steps apart.

Parameters of the job beside those of ``step_runner``: ``dataset``, ``num_epochs``, ``num_steps`` (steps to which each
epoch is cut; None for whole epochs), ``num_workers``, ``learning_rate``, ``seed``.

The results hold two times of an epoch, and compare them:

    epoch_time_s = median over epochs of the loop's time * steps of an epoch / steps run      (with input pipeline)
    epoch_time_from_steps_s = median step on a batch that stays on the device * steps of an epoch
    epoch_time_difference = epoch_time_s / epoch_time_from_steps_s - 1
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.datasets import dataset_size, image_batches, load_images
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.measured_job import report_progress
from forerun.evidence.measurement.runners.step_runner import (
    autocast_region,
    built_for,
    compiled,
    make_real_optimizer,
    num_parameters,
    tensor_bytes,
)
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import (
    PeakMemory,
    open_device,
    synchroniser,
)
from forerun.evidence.records.measured_run import number_of, setup_of, text_of, whole_of
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup

if TYPE_CHECKING:
    import torch

_EVALUATION_BATCH = 256
_SHARE_OF_STEPS = 0.1  # share of the job, for the reported progress


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochFigures:
    """Figures of one epoch.

    Attributes:
        time_s: Time from the request for the first batch to the end of the last step on the device [s].
        num_steps: Number of steps in this time.
        loss, accuracy: Means over the training images, during training.
        held_out_loss, held_out_accuracy: Means over held-out images, after the epoch.
    """

    time_s: float
    num_steps: int
    loss: float
    accuracy: float
    held_out_loss: float
    held_out_accuracy: float


@runner(JobKind.TRAINING)
def run_training(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Trains for some epochs, then times steps of the trained network."""
    training = _Training(job, device_index)
    memory = PeakMemory(training.device, tensor_bytes(training.module))
    epochs = training.run_epochs()
    batch = training.fixed_batch()
    timed = time_repetitions(lambda: training.step(*batch), training.synchronise, protocol)
    results = epoch_results(
        epochs,
        median_step_s=median(timed.repetitions_s),
        batch_size=training.setup.batch_size_per_device,
        num_images=dataset_size(text_of(job.parameters, "dataset", "cifar10"), train=True),
    )
    if training.setup.compile:
        results["compile_time_s"] = max(0.0, training.first_step_s - median(timed.repetitions_s))
    return timed.with_results(num_parameters=num_parameters(training.module), **results, **memory.figures())


def epoch_results(
    epochs: list[EpochFigures], *, median_step_s: float, batch_size: int, num_images: int
) -> dict[str, Scalar]:
    """The results of a training run: both times of an epoch, and the figures of each epoch.

    Args:
        epochs: Epochs in order; without epochs the results hold only the time from steps.
        median_step_s: Median step on a batch that stays on the device [s].
        batch_size: Number of images in a step.
        num_images: Number of images in a whole epoch.
    """
    steps_per_epoch = math.ceil(num_images / batch_size)
    # Two times of an epoch: what its steps add up to, and what the clock said. Their difference is what the
    # loop costs beside the steps.
    from_steps_s = median_step_s * steps_per_epoch
    results: dict[str, Scalar] = {
        "dataset_size": num_images,
        "steps_per_epoch": steps_per_epoch,
        "step_time_s": median_step_s,
        "epoch_time_from_steps_s": from_steps_s,
    }
    epoch_time_s = from_steps_s
    if epochs:
        # An epoch that was cut short still says what one of its steps takes.
        epoch_time_s = median(epoch.time_s / epoch.num_steps for epoch in epochs) * steps_per_epoch
        results["epoch_time_difference"] = epoch_time_s / from_steps_s - 1
    results["epoch_time_s"] = epoch_time_s
    results["images_per_second"] = num_images / epoch_time_s
    results["is_extrapolated"] = not epochs or epochs[0].num_steps < steps_per_epoch
    for number, epoch in enumerate(epochs, start=1):
        results[f"epoch_time_{number}_s"] = epoch.time_s
        results[f"loss_{number}"] = _finite(epoch.loss)
        results[f"accuracy_{number}"] = epoch.accuracy
        results[f"val_loss_{number}"] = _finite(epoch.held_out_loss)
        results[f"val_accuracy_{number}"] = epoch.held_out_accuracy
    return results


def _finite(loss: float) -> float | None:
    """The loss if it is finite; records do not hold other numbers."""
    return loss if math.isfinite(loss) else None


class _Training:
    """A network in training on a dataset."""

    def __init__(self, job: MeasurementJob, device_index: str) -> None:
        from forerun.tracing.step import prepared_batch

        parameters = job.parameters
        self.setup = setup_of(parameters)
        _check(self.setup)
        self.device = open_device(device_index)
        self.synchronise = synchroniser(self.device)
        self.num_epochs = whole_of(parameters, "num_epochs", 3)
        self.num_steps = parameters.get("num_steps") and whole_of(parameters, "num_steps")
        built = built_for(job, self.setup, self.device)
        # The maker's own batch has the form of the images; its conversion is that of every batch.
        self.image_dtype = prepared_batch(built, self.setup, 2)["args"][0].dtype
        self.module = built.module
        self._network = compiled(self.module, self.setup)
        rate = number_of(parameters, "learning_rate", 0.0) or None
        self._optimizer = make_real_optimizer(self.setup, self.module, rate)
        self._loss = built.loss
        self._region = autocast_region(self.setup.precision, self.device)
        self._load(text_of(parameters, "dataset", "cifar10"), built.input_shape, parameters)
        self.first_step_s = 0.0

    def _load(self, dataset: str, shape: tuple[int, ...], parameters: dict[str, Scalar]) -> None:
        batch_size, seed = self.setup.batch_size_per_device, whole_of(parameters, "seed", 0)
        limit = None if not self.num_steps else self.num_steps * batch_size
        shared: dict[str, Any] = {"num_channels": shape[0], "image_size": shape[1], "seed": seed}
        shared["num_classes"] = whole_of(parameters, "num_classes", 10)
        num_held_out = None if limit is None else min(limit, dataset_size(dataset, train=False))
        pipeline: dict[str, Any] = {
            "num_workers": whole_of(parameters, "num_workers", 0),
            "pin_memory": self.device.type == "cuda",
        }
        images = load_images(dataset, train=True, num_images=limit, **shared)
        held_out = load_images(dataset, train=False, num_images=num_held_out, **shared)
        self._train_batches = image_batches(images, batch_size, shuffle=True, seed=seed, **pipeline)
        self._test_batches = image_batches(held_out, _EVALUATION_BATCH, shuffle=False)

    def fixed_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A full batch that stays on the device."""
        images, labels = next(iter(self._train_batches))
        return self._placed(images, labels)

    def _placed(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        is_nhwc = self.setup.layout is Layout.NHWC
        order = torch.channels_last if is_nhwc else torch.contiguous_format
        images = images.to(self.device, self.image_dtype, non_blocking=True, memory_format=order)
        return images, labels.to(self.device, non_blocking=True)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One training step; loss and logits stay on the device."""
        self.module.zero_grad(set_to_none=True)
        with self._region():
            logits = self._network(images)
            loss = self._loss(logits, {"args": (images,), "target": labels})
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
        return loss.detach(), logits.detach()

    def run_epochs(self) -> list[EpochFigures]:
        """Trains the epochs; nothing synchronises inside an epoch, as in a user's loop."""
        epochs = []
        for index in range(self.num_epochs):
            time_s, num_steps, (loss, accuracy) = self._train_epoch(index)
            held_out_loss, held_out_accuracy = self._evaluate()
            epochs.append(
                EpochFigures(
                    time_s=time_s,
                    num_steps=num_steps,
                    loss=loss,
                    accuracy=accuracy,
                    held_out_loss=held_out_loss,
                    held_out_accuracy=held_out_accuracy,
                )
            )
            report_progress((1 - _SHARE_OF_STEPS) * (index + 1) / self.num_epochs)
        return epochs

    def _train_epoch(self, index: int) -> tuple[float, int, tuple[float, float]]:
        self.module.train()
        sums = Sums(self.device)
        if index == 0:
            self._take_first_step()
        self.synchronise()
        began_s = time.perf_counter()
        num_steps = 0
        for images, labels in self._train_batches:
            placed, wanted = self._placed(images, labels)
            loss, logits = self.step(placed, wanted)
            sums.add(loss, num_hits(logits, wanted), len(wanted))
            num_steps += 1
        self.synchronise()
        return time.perf_counter() - began_s, num_steps, sums.means()

    def _take_first_step(self) -> None:
        """Takes a first step, because loading and compiling in that step are not part of an epoch."""
        batch = self.fixed_batch()
        self.synchronise()
        began_s = time.perf_counter()
        self.step(*batch)
        self.synchronise()
        self.first_step_s = time.perf_counter() - began_s

    def _evaluate(self) -> tuple[float, float]:
        import torch

        self.module.eval()
        sums = Sums(self.device)
        with torch.no_grad(), self._region():
            for images, labels in self._test_batches:
                placed, wanted = self._placed(images, labels)
                logits = self.module(
                    placed
                )  # not the compiled module, which would compile again for this batch size
                loss = self._loss(logits, {"args": (placed,), "target": wanted})
                sums.add(loss, num_hits(logits, wanted), len(wanted))
        self.module.train()
        return sums.means()


class Sums:
    """Sums of loss and correct answers on the device, so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._loss = torch.zeros((), device=device)
        self._num_hits = torch.zeros((), dtype=torch.int64, device=device)
        self._num_images = 0

    def add(self, loss: torch.Tensor, hits: torch.Tensor, num_images: int) -> None:
        """Adds the mean loss of a batch and its correct answers."""
        self._loss += loss.float() * num_images
        self._num_hits += hits
        self._num_images += num_images

    def means(self) -> tuple[float, float]:
        """Loss and accuracy per image."""
        return self._loss.item() / self._num_images, self._num_hits.item() / self._num_images


def num_hits(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Correct answers in a batch, on the device."""
    return (logits.detach().argmax(1) == labels).sum()


def _check(setup: TrainingSetup) -> None:
    if setup.phase is not Phase.TRAIN or setup.optimizer == "none":
        raise InvalidSetupError(
            f"training needs the phase train and an optimizer, got {setup.phase} and {setup.optimizer}; "
            "use 'measure model' for other phases"
        )
    if setup.precision is Precision.FP16:
        raise InvalidSetupError("fp16 weights do not train without scaled gradients; use amp, bf16 or fp32")
