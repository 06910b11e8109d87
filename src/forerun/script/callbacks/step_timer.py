"""``StepTimer``, which times any ``model.fit`` of Keras step by step and writes a record.

    from forerun.keras import StepTimer

    model.fit(data, epochs=3, callbacks=[StepTimer("runs.sqlite", dataset_size=50_000)])

Importing this module imports Keras.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from forerun.base.extras import needing
from forerun.evidence import Scalar, describe_circumstances
from forerun.question.setup import Layout, Precision
from forerun.script.callbacks.loop import LoopTimer

with needing("the callback StepTimer"):
    import keras

_PRECISIONS = {
    "mixed_float16": Precision.AMP,
    "mixed_bfloat16": Precision.AMP_BF16,
    "float16": Precision.FP16,
    "bfloat16": Precision.BF16,
    "float64": Precision.FP64,
}
_LAYOUTS = {"channels_last": Layout.NHWC, "channels_first": Layout.NCHW}


class StepTimer(LoopTimer, keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not typed
    """Times the steps and epochs of ``fit`` and writes one measurement when training ends.

    A step's time runs from the end of one batch to the end of the next, so it includes the wait for data. The first
    step of ``fit``, which traces and compiles, and the first of each epoch, which follows validation, are kept apart.
    Keras hands the logs of each batch to its callbacks as numbers, so a counted step has ended on the device;
    with ``steps_per_execution`` above 1 the time of an execution is divided by its steps. The results
    include the wait of an epoch for its first batch (``epoch_start_s``): on TensorFlow the iterator of the epoch before
    ends there, which may wait for the tuner of tf.data.

    Args:
        records: Store that receives the record, as for ``forerun records``; None for the default store.
        subject: Model as ``forerun.predict`` names it; None for ``keras:`` and the model's name.
        family: Group that must not be split between fit and test; None for the subject.
        dataset_size: Number of samples in an epoch; None for steps times batch size.
        batch_size: Number of samples in a step; None takes the argument of ``fit``, or the size of the first batch.
        optimizer: Name of the optimizer as for ``forerun.predict``; None for Keras' own name in small letters.
        device: Device that trains, ``cpu`` or ``cuda:N``.
        occasion: Label of the session.

    Attributes:
        measurement: The measurement that was written; None before the end of training.
        step_times_s, epoch_times_s: Times of all steps and epochs so far [s].
        epoch_starts_s: Time from the beginning of each epoch to its first batch [s].

    Raises:
        MissingExtraError: Keras is not installed (when the module is imported).
        RecordError: The store cannot be used (at the end of training).
    """

    def __init__(
        self,
        records: str | Path | None = None,
        *,
        subject: str | None = None,
        family: str | None = None,
        dataset_size: int | None = None,
        batch_size: int | None = None,
        optimizer: str | None = None,
        device: str = "cpu",
        occasion: str = "",
    ) -> None:
        keras.callbacks.Callback.__init__(self)
        super().__init__(
            records,
            subject=subject or "",
            batch_size=batch_size,
            dataset_size=dataset_size,
            occasion=occasion,
            family=family,
        )
        self._device_index, self._named_optimizer = device, optimizer

    def _forget(self) -> None:
        super()._forget()
        self.epoch_starts_s: list[float] = []
        self._logs: list[Mapping[str, Any]] = []

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit``."""
        self._forget()

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit``."""
        self.start_epoch()

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit`` before a step."""
        if not self._num_steps:
            self.epoch_starts_s.append(time.perf_counter() - self._begin_s)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit`` after a step, or after all steps of an execution, with the number of the last."""
        self.step(num_steps=batch + 1 - self._num_steps)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit`` after the epoch and its validation; the epoch's time ends with its last step."""
        self.end_epoch()
        self._logs.append(dict(logs or {}))

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        """Called by ``fit`` at the end; writes the measurement."""
        model = self.model
        self._subject = self._subject or f"keras:{model.name}"
        self._optimizer = self._named_optimizer or type(model.optimizer).__name__.lower()
        self._precision = _PRECISIONS.get(getattr(model.dtype_policy, "name", "float32"), Precision.FP32)
        self._layout = _LAYOUTS[keras.config.image_data_format()]
        self._compile = bool(model.jit_compile)
        shape = tuple(model.input_shape[1:]) if isinstance(getattr(model, "input_shape", None), tuple) else ()
        self._input_shape = shape if shape and all(isinstance(n, int) for n in shape) else None
        self.finish()  # epochs of one step leave nothing to time

    def _circumstances(self) -> Any:
        return describe_circumstances(self._device_index, occasion=self._occasion, framework="keras")

    def _samples_of_a_step(self) -> int:
        if self._batch_size is not None:
            return self._batch_size
        if self._dataset_size is not None:
            return math.ceil(self._dataset_size / self._num_steps)
        return int((self.params or {}).get("batch_size") or 32)

    def _figures(self) -> dict[str, Scalar]:
        # The first epoch holds tracing.
        results = self._times(self.epoch_times_s[1:])
        results["epoch_start_s"] = median(self.epoch_starts_s[1:] or self.epoch_starts_s)
        results["num_parameters"] = int(self.model.count_params())
        for number, logs in enumerate(self._logs, start=1):
            for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
                value = logs.get(name)
                if isinstance(value, (int, float)) and math.isfinite(value):
                    results[f"{name}_{number}"] = float(value)
        return results
