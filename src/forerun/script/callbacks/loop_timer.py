"""``LoopTimer``, which times the steps of a PyTorch loop, alone or inside Lightning, and writes a record.

timer = LoopTimer("runs.sqlite", subject="torchvision:resnet18", model=model, batch_size=32)
for epoch in range(3):
    with timer.epoch():
        for images, labels in loader:
            ...
            timer.step()
timer.finish()
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forerun.base.errors import InvalidSetupError
from forerun.evidence import Record, RecordStore, Scalar, at_job_start, describe_circumstances, timed_training
from forerun.question.setup import Layout, Precision, choice

__all__ = ["LoopTimer"]


class LoopTimer:
    """Times steps and epochs, and writes one measurement, which ``forerun fit`` and ``calibrate --from`` read.

    A step's time runs from the end of one step to the end of the next, so it includes the wait for data. On a GPU each
    step is waited for. The first step of an epoch, which starts the loader, is kept apart.

    Args:
        records: Store that receives the record, as for ``forerun records``; None for the default store.
        subject: Model as ``forerun.predict`` names it, so that its prediction can learn from the record.
        model: Module that is trained, for its device, format and number of parameters; None if they are not wanted.
        batch_size: Number of samples in a step on one device; None if ``step`` is told it.
        dataset_size: Number of samples in an epoch; None for those of the steps.
        optimizer: Name of the optimizer as for ``forerun.predict``.
        precision: Precision as for ``forerun.predict``; None for the format of the model's parameters.
        layout: Memory order of images, ``nchw`` or ``nhwc``.
        compile: True if the step runs under torch.compile.
        input_shape: Shape of one sample; None for the model's own.
        occasion: Label of the session; None for one of its own.

    Attributes:
        measurement: The measurement that was written; None before ``finish``.
        step_times_s, epoch_times_s: Times of all steady steps and of all epochs so far [s].

    Raises:
        InvalidSetupError: A setting has an impossible value, or the samples of a step are not known at the end.
    """

    def __init__(
        self,
        records: str | Path | None = None,
        *,
        subject: str,
        model: Any = None,
        batch_size: int | None = None,
        dataset_size: int | None = None,
        optimizer: str = "sgd",
        precision: str | None = None,
        layout: str = "nchw",
        compile: bool = False,
        input_shape: Sequence[int] | None = None,
        occasion: str = "",
    ) -> None:
        self._records, self._subject, self._model = records, subject, model
        self._batch_size, self._dataset_size = batch_size, dataset_size
        self._optimizer, self._compile, self._input_shape = optimizer, compile, input_shape
        self._precision = None if precision is None else choice(Precision, precision, "precision")
        self._layout = choice(Layout, layout, "layout")
        self._occasion = occasion
        self.measurement: Record | None = None
        self.step_times_s: list[float] = []
        self.warm_up_s: list[float] = []
        self.epoch_times_s: list[float] = []
        self._num_samples = self._num_steps = 0
        self._around: Any = None
        self._last_s: float | None = None
        self._began_s = 0.0
        self._is_first = True

    @contextlib.contextmanager
    def epoch(self) -> Iterator[LoopTimer]:
        """Surrounds the steps of one epoch."""
        self.start_epoch()
        yield self
        self.end_epoch()

    def start_epoch(self) -> None:
        """An epoch begins."""
        if self._around is None:
            self._around = at_job_start(describe_circumstances(self._device(), occasion=self._occasion))
        self._num_samples = self._num_steps = 0
        self._began_s = self._last_s = time.perf_counter()
        self._is_first = True

    def step(self, num_samples: int | None = None) -> float:
        """A step has ended; returns its time [s].

        Args:
            num_samples: Number of samples of the step; None for the batch size.
        """
        if self._last_s is None:
            self.start_epoch()
        assert self._last_s is not None
        self._wait_for_device()
        now_s = time.perf_counter()
        took_s, self._last_s = now_s - self._last_s, now_s
        (self.warm_up_s if self._is_first else self.step_times_s).append(took_s)
        self._is_first = False
        self._num_steps += 1
        self._num_samples += num_samples or self._batch_size or 0
        return took_s

    def end_epoch(self) -> None:
        """An epoch has ended; its time ends with its last step."""
        if self._last_s is not None:
            self.epoch_times_s.append(self._last_s - self._began_s)

    def finish(self, **results: Scalar) -> Record | None:
        """Writes the measurement and returns it; None if no epoch had two steps.

        Args:
            results: Further figures of the training, such as ``val_accuracy=0.93``.
        """
        if not self.step_times_s:
            return None
        self.measurement = timed_training(
            self.step_times_s,
            self.warm_up_s,
            subject=self._subject,
            family=None,
            parameters=self._parameters(),
            results={**self._figures(), **results},
            around=self._around,
        )
        with RecordStore.open(self._records) as store:
            store.add(self.measurement)
        return self.measurement

    def _device(self) -> str:
        parameter = next(self._model.parameters(), None) if self._model is not None else None
        if parameter is None or parameter.device.type != "cuda":
            return "cpu"
        return f"cuda:{parameter.device.index or 0}"

    def _wait_for_device(self) -> None:
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()

    def _samples_of_a_step(self) -> int:
        size = self._batch_size or round(self._num_samples / max(1, self._num_steps))
        if not size:
            raise InvalidSetupError(
                "the samples of a step are not known: give LoopTimer a batch_size, or tell timer.step(len(images))"
            )
        return size

    def _parameters(self) -> dict[str, Scalar]:
        shape = self._input_shape
        return {
            "batch_size": self._samples_of_a_step(),
            "input_shape": None if shape is None else "x".join(map(str, shape)),
            "precision": str(self._precision or self._format()),
            "layout": str(self._layout),
            "compile": self._compile,
            "optimizer": self._optimizer,
            "phase": "train",
            "num_epochs": max(1, len(self.epoch_times_s)),
            "dataset_size": self._dataset_size or self._num_steps * self._samples_of_a_step(),
        }

    def _format(self) -> Precision:
        parameter = next(self._model.parameters(), None) if self._model is not None else None
        words = {"torch.float16": Precision.FP16, "torch.bfloat16": Precision.BF16}
        return words.get(str(getattr(parameter, "dtype", "")), Precision.FP32)

    def _figures(self) -> dict[str, Scalar]:
        step_s = median(self.step_times_s)
        whole = self.epoch_times_s[1:] or self.epoch_times_s or [step_s * self._num_steps]
        size = self._dataset_size or self._num_steps * self._samples_of_a_step()
        figures: dict[str, Scalar] = {
            "step_time_s": step_s,
            "steps_per_epoch": self._num_steps,
            "epoch_time_s": median(whole),
            "images_per_second": size / median(whole),
            "first_step_s": self.warm_up_s[0],
            "dataset_size": size,
        }
        if self._model is not None:
            figures["num_parameters"] = sum(parameter.numel() for parameter in self._model.parameters())
        figures.update(
            {f"epoch_time_{number}_s": time_s for number, time_s in enumerate(self.epoch_times_s, start=1)}
        )
        return figures
