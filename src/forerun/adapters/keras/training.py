"""Trains networks of the Keras families on TensorFlow in a child process, and times their steps.

Parameters of a job are those of ``training_runner``; ``strategy`` may also be ``mirrored`` with ``num_replicas``.
Steps are graphs of TensorFlow (``run_eagerly`` off). On a processor, replicas are logical devices that share its
threads: such a run shows the cost of the strategy, never a gain.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from forerun.adapters.keras.networks import build_keras_family, keras_image_shape
from forerun.adapters.keras.runner import (
    keras_optimizer,
    open_tensorflow,
    set_keras_defaults,
)
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.datasets import dataset_size, load_images
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.measured_job import report_progress
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.training_runner import EpochFigures, epoch_results
from forerun.evidence.records.measured_run import flag_of, number_of, setup_of, text_of, whole_of
from forerun.question.setup import Layout

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


@dataclass(slots=True)
class _Images:
    train: tuple[Any, Any]
    held_out: tuple[Any, Any]


class _KerasTraining:
    """A Keras network in training on a dataset."""

    def __init__(self, job: MeasurementJob, device_index: str, protocol: Protocol) -> None:
        parameters = job.parameters
        self.setup = setup_of(parameters)
        self.num_replicas = whole_of(parameters, "num_replicas", 1)
        self.num_epochs = whole_of(parameters, "num_epochs", 3)
        self.num_steps = parameters.get("num_steps") and whole_of(parameters, "num_steps")
        self._images = _images_of(job, self.setup.layout)
        self.num_images = dataset_size(text_of(parameters, "dataset", "cifar10"), train=True)
        self._devices = open_tensorflow(device_index, protocol, self.num_replicas)
        self.strategy = self._strategy(text_of(parameters, "strategy", "none"))
        self.model = self._model(job)
        self._global_batch = self.setup.batch_size_per_device * self.num_replicas
        self.first_step_s = self._take_first_step()

    def _strategy(self, name: str) -> Any:
        import tensorflow as tf

        if name == "mirrored":
            return tf.distribute.MirroredStrategy(self._devices)
        if name != "none" or self.num_replicas != 1:
            raise InvalidSetupError(
                f"several replicas need the strategy mirrored, got {self.num_replicas} with {name!r}"
            )
        return None

    def _model(self, job: MeasurementJob) -> Any:
        import keras

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
        images, labels = self._images.train
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
        clock = _epoch_clock(self.num_epochs)
        self.model.fit(
            self._dataset(self._images.train, self._global_batch, repeats=self.num_steps is not None),
            epochs=self.num_epochs,
            steps_per_epoch=self.num_steps,
            validation_data=self._dataset(self._images.held_out, _EVALUATION_BATCH),
            callbacks=[clock],
            verbose=0,
        )
        figures: list[EpochFigures] = clock.epochs
        return figures

    def _dataset(self, images: tuple[Any, Any], batch_size: int, *, repeats: bool = False) -> Any:
        import tensorflow as tf

        options = tf.data.Options()
        options.autotune.enabled = (
            False  # an epoch's iterator ends with a tick of the tuner, which takes up to the epoch's length
        )
        data = tf.data.Dataset.from_tensor_slices(images)
        if repeats:
            data = data.repeat()
        return data.batch(batch_size).prefetch(2).with_options(options)


def _images_of(job: MeasurementJob, layout: Layout) -> _Images:
    """Images as floats from 0 to 1 in the layout of the network; of a cut epoch only the images used."""
    parameters = job.parameters
    channels, size, _ = _image_shape(job)
    name, seed = text_of(parameters, "dataset", "cifar10"), whole_of(parameters, "seed", 0)
    steps = parameters.get("num_steps")
    batch = whole_of(parameters, "batch_size", 32) * whole_of(parameters, "num_replicas", 1)
    num_images = None if steps is None else max(2, int(steps)) * batch

    def read(train: bool, limit: int | None) -> tuple[Any, Any]:
        found = load_images(
            name, train=train, num_images=limit, image_size=size, num_channels=channels, seed=seed
        )
        images = found.images.transpose(0, 2, 3, 1) if layout is Layout.NHWC else found.images
        return np.ascontiguousarray(images, dtype=np.float32) / 255, found.labels

    return _Images(train=read(True, num_images), held_out=read(False, num_images))


def _image_shape(job: MeasurementJob) -> tuple[int, int, int]:
    """(channels, height, width) of the network's images."""
    channels = keras_image_shape(job.subject.removeprefix("keras:"))[0]
    size = whole_of(job.parameters, "image_size", 32)
    return (channels, size, size)


def _epoch_clock(num_epochs: int) -> Any:
    """A callback whose ``epochs`` are the figures of the epochs."""
    import keras

    class EpochClock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is not typed
        def __init__(self) -> None:
            super().__init__()
            self.epochs: list[EpochFigures] = []
            self._began_s = self._ended_s = 0.0
            self._num_steps = 0
            self._is_first = True

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._began_s, self._num_steps = time.perf_counter(), 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._ended_s = time.perf_counter()
            if self._is_first:  # it traces, which is no part of an epoch
                self._is_first, self._began_s = False, self._ended_s
            else:
                self._num_steps += 1

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
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
            report_progress((1 - _SHARE_OF_STEPS) * (epoch + 1) / num_epochs)

    return EpochClock()
