"""Steps of ``fit`` of any Keras model on TensorFlow, on one batch that is used again and again.

Parameters of the job (each may be left out): ``batch_size``, ``precision``, ``layout``, ``compile`` (XLA),
``optimizer``; ``image_size``, ``input_shape`` (as text), ``sequence_length``, ``num_classes``; ``seed``. A step's time
runs from the end of one batch of ``fit`` to the end of the next: it holds all work of the loop, but no input pipeline.
"""

from __future__ import annotations

import time
from typing import Any

from forerun.adapters.keras.runner import (
    LEARNING_RATE,
    KerasPeakMemory,
    keras_optimizer,
    open_tensorflow,
    set_keras_defaults,
)
from forerun.adapters.keras.source import KerasRequest
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.timing import Repetitions
from forerun.evidence.records.measured_run import input_options_of, setup_of, whole_of
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, TrainingSetup


def run_keras_step(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of ``fit``; results are num_parameters, first_step_s, compile_time_s and the peak memory.

    Raises:
        InvalidSetupError: Keras cannot run this phase, precision, optimizer or input.
        UnknownModelError, ModelBuildError: The model cannot be built.
    """
    setup = setup_of(job.parameters)
    if setup.phase is not Phase.TRAIN:
        raise InvalidSetupError(f"steps of Keras are measured in training only, got phase {setup.phase}")
    device = open_tensorflow(device_index, protocol)[0]
    set_keras_defaults(setup, whole_of(job.parameters, "seed", 0))
    found = build_measured_model(job, setup)
    model = found.model
    memory = KerasPeakMemory(device, int(model.count_params()))
    loss, metrics = keras_loss(model)
    model.compile(
        optimizer=keras_optimizer(setup, LEARNING_RATE),
        loss=loss,
        metrics=metrics,
        jit_compile=setup.compile,
    )
    clock = _fit_clock(protocol)
    batch = example_batch(found, setup.batch_size_per_device)
    model.fit(
        _endless(batch), steps_per_epoch=_most_steps(protocol), callbacks=[clock], shuffle=False, verbose=0
    )
    return RunResult(
        repetitions_s=tuple(clock.taken.repetitions_s),
        warm_up_s=tuple(clock.taken.warm_up_s),
        is_stationary=clock.taken.is_stationary,
        results={
            "num_parameters": int(model.count_params()),
            "first_step_s": clock.first_step_s,
            **({"compile_time_s": clock.compile_time_s} if setup.compile else {}),
            **memory.figures(),
        },
    )


def build_measured_model(job: MeasurementJob, setup: TrainingSetup) -> Any:
    """The model of a job as ``adapters.keras.build`` builds it, here on TensorFlow.

    Raises:
        UnknownModelError, InvalidSetupError, ModelBuildError: As in ``build_keras``.
    """
    from forerun.adapters.keras.build import build_keras

    model = ModelRequest(model=job.subject, **input_options_of(job.parameters))
    return build_keras(KerasRequest(model=model, setup=setup), setup)


def keras_loss(model: Any) -> tuple[Any, list[str]]:
    """The loss for the model's last activation, as the tracer takes it, and the metric for that loss."""
    import keras

    shape = model.output_shape
    if not isinstance(shape, tuple) or len(shape) != 2:
        return "mse", []
    activation = getattr(getattr(model.layers[-1], "activation", None), "__name__", "")
    if shape[1] == 1:
        return keras.losses.BinaryCrossentropy(from_logits=activation != "sigmoid"), ["accuracy"]
    return keras.losses.SparseCategoricalCrossentropy(from_logits=activation != "softmax"), ["accuracy"]


def example_batch(found: Any, batch_size: int) -> tuple[Any, Any]:
    """Random inputs and zero targets for a ``KerasModel``."""
    import tensorflow as tf

    pairs = zip(found.input_shapes, found.input_dtypes, strict=True)
    inputs = tuple(_values((batch_size, *shape), tf.as_dtype(dtype)) for shape, dtype in pairs)
    model = found.model
    shape = model.output_shape
    if isinstance(shape, list) or (shape and isinstance(shape[0], tuple)):
        targets = tuple(tf.zeros((batch_size, *one[1:])) for one in shape)
    elif len(shape) == 2:
        targets = tf.zeros((batch_size, 1), tf.int64 if shape[1] > 1 else tf.float32)
    else:
        targets = tf.zeros((batch_size, *shape[1:]))
    return (inputs[0] if len(inputs) == 1 else inputs), targets


def _values(shape: tuple[int, ...], dtype: Any) -> Any:
    import tensorflow as tf

    return tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)


def _endless(batch: tuple[Any, Any]) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(batch).repeat()


def _most_steps(protocol: Protocol) -> int:
    """Upper limit of steps: the clock ends ``fit``, and a wrong clock must not run for ever."""
    return 2 + protocol.max_warm_up + protocol.num_repetitions


def _fit_clock(protocol: Protocol) -> Any:
    """A callback that times the steps of ``fit`` and stops it after enough steps."""
    import keras

    class FitClock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not typed
        """Times the steps of one epoch; the first, which traces and compiles, is kept apart."""

        def __init__(self) -> None:
            super().__init__()
            self.taken = Repetitions(protocol)
            self.first_step_s = 0.0
            self._last_s = 0.0

        @property
        def compile_time_s(self) -> float:
            return max(0.0, self.first_step_s - min(self.taken.repetitions_s, default=0.0))

        def on_train_begin(self, logs: Any = None) -> None:
            self._last_s = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            now_s = time.perf_counter()
            if batch == 0:
                self.first_step_s = now_s - self._last_s
                self.taken = Repetitions(protocol)  # the time of the next step begins here
            elif self.taken.add(now_s - self._last_s):
                self.model.stop_training = True
            self._last_s = time.perf_counter()

    return FitClock()
