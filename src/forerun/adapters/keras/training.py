"""Trains networks of the Keras families on TensorFlow in a child process, and times steps of any Keras model.

Parameters of a training are those of ``training_runner``; ``strategy`` may also be ``mirrored`` with ``num_replicas``.
Steps are graphs of TensorFlow (``run_eagerly`` off). On a processor, replicas are logical devices that share its
threads: such a run shows the cost of the strategy, never a gain.

Steps are those of ``fit`` on one batch that is used again and again. Parameters of such a job (each may be left out):
``batch_size``, ``precision``, ``layout``, ``compile`` (XLA), ``optimizer``; ``image_size``, ``input_shape`` (as text),
``sequence_length``, ``num_classes``; ``seed``. A step's time runs from the end of one batch of ``fit`` to that of the
next: it holds all work of the loop, but no input pipeline.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from forerun.adapters.keras.networks import build_keras_family, keras_image_shape
from forerun.adapters.keras.runner import (
    LEARNING_RATE,
    KerasPeakMemory,
    keras_optimizer,
    open_tensorflow,
    set_keras_defaults,
)
from forerun.adapters.keras.source import KerasRequest
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.datasets import dataset_size, load_images
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.measured_job import report_progress
from forerun.evidence.measurement.runners.timing import Repetitions, time_repetitions
from forerun.evidence.measurement.runners.training_runner import EpochFigures, epoch_results
from forerun.evidence.records.measured_run import (
    flag_of,
    input_options_of,
    number_of,
    setup_of,
    text_of,
    whole_of,
)
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, Phase, TrainingSetup

_SHARE_OF_STEPS = 0.1
_EVALUATION_BATCH = 256


def run_keras_training(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Runs a training with Keras on TensorFlow.

    Raises:
        InvalidSetupError: Keras cannot run the job.
    """
    training = _KerasTraining(job, device_index, protocol)
    epochs = training.run_epochs()
    timed = time_repetitions(training.step_on_fixed_batch, lambda: None, protocol)
    results = epoch_results(
        epochs,
        median_step_s=median(timed.repetitions_s),
        batch_size=training.setup.batch_size_per_device * training.num_replicas,
        num_images=training.num_images,
    )
    results["num_parameters"] = int(training.model.count_params())
    results["first_step_s"] = training.first_step_s
    return timed.with_results(**results)


class _KerasTraining:
    """A Keras network in training on a dataset."""

    def __init__(self, job: MeasurementJob, device_index: str, protocol: Protocol) -> None:
        parameters = job.parameters
        self.setup = setup_of(parameters)
        self.num_replicas = whole_of(parameters, "num_replicas", 1)
        self.num_epochs = whole_of(parameters, "num_epochs", 3)
        self.num_steps = parameters.get("num_steps") and whole_of(parameters, "num_steps")
        self._train, self._held_out = _images_of(job, self.setup.layout)
        self.num_images = dataset_size(text_of(parameters, "dataset", "cifar10"), train=True)
        self._devices = open_tensorflow(device_index, protocol, self.num_replicas)
        self.strategy = self._strategy(text_of(parameters, "strategy", "none"))
        self.model = self._model(job)
        self._global_batch = self.setup.batch_size_per_device * self.num_replicas
        self.first_step_s = self._take_first_step()

    def _strategy(self, name: str) -> Any:
        if name == "mirrored":
            return tf.distribute.MirroredStrategy(self._devices)
        if name != "none" or self.num_replicas != 1:
            raise InvalidSetupError(
                f"several replicas need the strategy mirrored, got {self.num_replicas} with {name!r}"
            )
        return None

    def _model(self, job: MeasurementJob) -> Any:
        parameters = job.parameters
        set_keras_defaults(self.setup, whole_of(parameters, "seed", 0))
        shape = _image_shape(job)
        with self.strategy.scope() if self.strategy else nullcontext():
            model = build_keras_family(job.subject.removeprefix("keras:"), shape)
            model.compile(
                optimizer=keras_optimizer(self.setup, number_of(parameters, "learning_rate", 0.0) or None),
                loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
                jit_compile=flag_of(parameters, "compile"),
            )
        return model

    def _batch(self) -> tuple[Any, Any]:
        images, labels = self._train
        return images[: self._global_batch], labels[: self._global_batch]

    def _take_first_step(self) -> float:
        """Takes a first step, because tracing and compiling are not part of an epoch."""
        began_s = time.perf_counter()
        self.model.train_on_batch(*self._batch())
        return time.perf_counter() - began_s

    def step_on_fixed_batch(self) -> None:
        """One step; the returned loss has been computed."""
        self.model.train_on_batch(*self._batch())

    def run_epochs(self) -> list[EpochFigures]:
        """Trains by ``fit``, which traces anew: the clock of the first epoch begins after its first step."""
        if not self.num_epochs:
            return []
        clock = _EpochClock(self.num_epochs)
        self.model.fit(
            self._dataset(self._train, self._global_batch, repeats=self.num_steps is not None),
            epochs=self.num_epochs,
            steps_per_epoch=self.num_steps,
            validation_data=self._dataset(self._held_out, _EVALUATION_BATCH),
            callbacks=[clock],
            verbose=0,
        )
        return clock.epochs

    def _dataset(self, images: tuple[Any, Any], batch_size: int, *, repeats: bool = False) -> Any:
        options = tf.data.Options()
        # An epoch's iterator ends with a tick of the tuner, which takes up to the epoch's length.
        options.autotune.enabled = False
        data = tf.data.Dataset.from_tensor_slices(images)
        if repeats:
            data = data.repeat()
        return data.batch(batch_size).prefetch(2).with_options(options)


def _images_of(job: MeasurementJob, layout: Layout) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images to train on and held out, with labels, as floats from 0 to 1; of a cut epoch only the images used."""
    parameters = job.parameters
    channels, size, _ = _image_shape(job)
    name, seed = text_of(parameters, "dataset", "cifar10"), whole_of(parameters, "seed", 0)
    steps = parameters.get("num_steps")
    batch = whole_of(parameters, "batch_size", 32) * whole_of(parameters, "num_replicas", 1)
    # The first step traces and does not count, so that one alone would leave none.
    num_images = None if steps is None else max(2, int(steps)) * batch

    def read(train: bool, limit: int | None) -> tuple[Any, Any]:
        found = load_images(
            name, train=train, num_images=limit, image_size=size, num_channels=channels, seed=seed
        )
        images = found.images.transpose(0, 2, 3, 1) if layout is Layout.NHWC else found.images
        return np.ascontiguousarray(images, dtype=np.float32) / 255, found.labels

    return read(True, num_images), read(False, num_images)


def _image_shape(job: MeasurementJob) -> tuple[int, int, int]:
    """(channels, height, width) of the network's images."""
    channels = keras_image_shape(job.subject.removeprefix("keras:"))[0]
    size = whole_of(job.parameters, "image_size", 32)
    return (channels, size, size)


class _EpochClock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not typed
    """Takes the figures of the epochs of ``fit``."""

    def __init__(self, num_epochs: int) -> None:
        super().__init__()
        self.epochs: list[EpochFigures] = []
        self._num_epochs = num_epochs
        self._began_s = self._ended_s = 0.0
        self._num_steps = 0
        self._is_first = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self._began_s, self._num_steps = time.perf_counter(), 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts a step."""
        self._ended_s = time.perf_counter()
        if self._is_first:  # it traces, which is no part of an epoch
            self._is_first, self._began_s = False, self._ended_s
        else:
            self._num_steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Takes the figures of an epoch."""
        figures = logs or {}
        nan = float("nan")
        self.epochs.append(
            EpochFigures(
                time_s=self._ended_s - self._began_s,
                num_steps=max(1, self._num_steps),
                loss=float(figures.get("loss", nan)),
                accuracy=float(figures.get("accuracy", nan)),
                held_out_loss=float(figures.get("val_loss", nan)),
                held_out_accuracy=float(figures.get("val_accuracy", nan)),
            )
        )
        report_progress((1 - _SHARE_OF_STEPS) * (epoch + 1) / self._num_epochs)


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
    clock = _FitClock(protocol)
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
    shape = model.output_shape
    if not isinstance(shape, tuple) or len(shape) != 2:
        return "mse", []
    activation = getattr(getattr(model.layers[-1], "activation", None), "__name__", "")
    if shape[1] == 1:
        return keras.losses.BinaryCrossentropy(from_logits=activation != "sigmoid"), ["accuracy"]
    return keras.losses.SparseCategoricalCrossentropy(from_logits=activation != "softmax"), ["accuracy"]


def example_batch(found: Any, batch_size: int) -> tuple[Any, Any]:
    """Random inputs and zero targets for a ``KerasModel``."""
    pairs = zip(found.input_shapes, found.input_dtypes, strict=True)
    inputs = tuple(_values((batch_size, *shape), tf.as_dtype(dtype)) for shape, dtype in pairs)
    model = found.model
    shape = model.output_shape
    if isinstance(shape, list) or (shape and isinstance(shape[0], tuple)):
        targets = tuple(tf.zeros((batch_size, *one[1:])) for one in shape)
    elif len(shape) == 2:
        # Numbers of classes for several outputs, shares for a single one.
        targets = tf.zeros((batch_size, 1), tf.int64 if shape[1] > 1 else tf.float32)
    else:
        targets = tf.zeros((batch_size, *shape[1:]))
    return (inputs[0] if len(inputs) == 1 else inputs), targets


def _values(shape: tuple[int, ...], dtype: Any) -> Any:
    return tf.random.normal(shape, dtype=dtype) if dtype.is_floating else tf.zeros(shape, dtype)


def _endless(batch: tuple[Any, Any]) -> Any:
    return tf.data.Dataset.from_tensors(batch).repeat()


def _most_steps(protocol: Protocol) -> int:
    """Upper limit of steps: the clock ends ``fit``, and a wrong clock must not run for ever."""
    return 2 + protocol.max_warm_up + protocol.num_repetitions


class _FitClock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not typed
    """Times the steps of one epoch of ``fit`` until they are enough; the first, which traces and compiles, is apart."""

    def __init__(self, protocol: Protocol) -> None:
        super().__init__()
        self.taken = Repetitions(protocol)
        self.first_step_s = 0.0
        self._protocol = protocol
        self._last_s = 0.0

    @property
    def compile_time_s(self) -> float:
        """The first step less a later one [s]."""
        return max(0.0, self.first_step_s - min(self.taken.repetitions_s, default=0.0))

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts the clock."""
        self._last_s = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Takes the time of a step."""
        now_s = time.perf_counter()
        if batch == 0:
            self.first_step_s = now_s - self._last_s
            self.taken = Repetitions(self._protocol)  # the time of the next step begins here
        elif self.taken.add(now_s - self._last_s):
            self.model.stop_training = True
        self._last_s = time.perf_counter()
