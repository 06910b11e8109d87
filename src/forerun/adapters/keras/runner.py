"""Jobs of Keras on TensorFlow in the child process, the counterpart of ``runners.run_job``, and the devices they open.

TensorFlow fixes its devices and threads when it is first used, so a device is opened at the beginning of a process.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

from forerun.adapters import words_of
from forerun.adapters.keras.networks import POLICIES, set_policy_and_format
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import ResidentPeak
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.question.devices.local import gpu_index
from forerun.question.setup import Precision, TrainingSetup

KERAS_OPTIMIZERS: dict[str, tuple[str, dict[str, float | bool]]] = words_of("keras")["optimizers"]
"""Optimizers of Keras by the names of ``tracing.optimizers``."""

LEARNING_RATE = 1e-4
"""Learning rate, small so that weights stay finite over hundreds of steps on one batch of noise."""

_FLOAT_BYTES = 4
_TRAINED_IN = [precision for precision in POLICIES if precision not in (Precision.FP16, Precision.FP64)]
"""Precisions that are measured: updates of weights in fp16 alone soon give no numbers, records hold no fp64."""


def use_tensorflow() -> None:
    """Chooses TensorFlow as the backend of Keras, which Keras fixes when it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ["KERAS_BACKEND"] = "tensorflow"


def open_tensorflow(device_index: str, protocol: Protocol, num_replicas: int = 1) -> list[str]:
    """Sets the threads, hides all devices but the measured ones, and returns the names of these.

    Args:
        device_index: Device: ``cpu``, or ``cuda:N`` for the first of the replicas' GPUs.
        protocol: Settings of the measurement, for the number of threads.
        num_replicas: Number of devices; on a processor these are logical devices that share its threads.

    Raises:
        InvalidSetupError: TensorFlow sees no such GPU.
    """
    import tensorflow as tf

    if protocol.num_threads:
        tf.config.threading.set_intra_op_parallelism_threads(protocol.num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, protocol.num_threads))
    index = gpu_index(device_index)
    if index is not None:
        gpus = tf.config.list_physical_devices("GPU")
        if index >= len(gpus):
            raise InvalidSetupError(
                f"TensorFlow sees {len(gpus)} GPUs, expected one at {device_index}; install a TensorFlow with CUDA"
            )
        chosen = gpus[index : index + num_replicas]
        tf.config.set_visible_devices(chosen, "GPU")
        return [f"GPU:{i}" for i in range(len(chosen))]
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)
    return [f"CPU:{i}" for i in range(num_replicas)]


def check_keras_precision(precision: Precision) -> None:
    """Raises ``InvalidSetupError`` for a precision that Keras does not train in."""
    if precision not in _TRAINED_IN:
        raise InvalidSetupError(f"Keras trains in {', '.join(_TRAINED_IN)}, got {precision}")


def set_keras_defaults(setup: TrainingSetup, seed: int = 0) -> None:
    """Sets the seed, image format and dtype policy of all that Keras builds from now on.

    Raises:
        InvalidSetupError: Keras does not train in this precision.
    """
    import keras

    check_keras_precision(setup.precision)
    keras.utils.set_random_seed(seed)
    set_policy_and_format(setup)


def check_keras_optimizer(name: str) -> None:
    """Raises ``InvalidSetupError`` for an optimizer that Keras does not have."""
    if name not in KERAS_OPTIMIZERS:
        raise InvalidSetupError(
            f"expected an optimizer of {', '.join(KERAS_OPTIMIZERS)} for Keras, got {name!r}"
        )


def keras_optimizer(setup: TrainingSetup, learning_rate: float | None = None) -> Any:
    """The Keras optimizer of a setup.

    Raises:
        InvalidSetupError: Keras has no optimizer with this name.
    """
    import keras

    check_keras_optimizer(setup.optimizer)
    name, options = KERAS_OPTIMIZERS[setup.optimizer]
    rate = {"learning_rate": learning_rate} if learning_rate else {}
    return getattr(keras.optimizers, name)(**{**options, **rate})


def tensorflow_synchroniser(device: str) -> Callable[[], None]:
    """A function that returns when the device has finished; a processor always has."""
    if device.startswith("CPU"):
        return lambda: None
    import tensorflow as tf

    wait: Callable[[], None] = tf.test.experimental.sync_devices
    return wait


class KerasPeakMemory:
    """Peak memory since this object was made, under the names of ``torch_device.PeakMemory``.

    Args:
        device: Name of TensorFlow's device.
        num_parameters: Weights in memory already, which count as well.
    """

    def __init__(self, device: str, num_parameters: int) -> None:
        self._device, self._held_bytes = device, _FLOAT_BYTES * num_parameters
        if device.startswith("CPU"):
            self._resident = ResidentPeak()
        else:
            import tensorflow as tf

            tf.config.experimental.reset_memory_stats(device)

    def figures(self) -> dict[str, Scalar]:
        """``peak_memory_bytes`` of a GPU, ``peak_rss_delta_bytes`` of a processor."""
        if self._device.startswith("CPU"):
            return {"peak_rss_delta_bytes": self._resident.grown_bytes() + self._held_bytes}
        import tensorflow as tf

        return {"peak_memory_bytes": int(tf.config.experimental.get_memory_info(self._device)["peak"])}


_RUNNERS = {
    JobKind.TRAINING: "training:run_keras_training",
    JobKind.LAYER: "layers:run_keras_layer",
    JobKind.STEP: "training:run_keras_step",
    JobKind.DATA_PARALLEL: "parameter_server:run_keras_servers",
}


def run_keras_job(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Runs a training, a layer, steps of a model alone or under parameter servers, or a null step.

    Raises:
        InvalidSetupError: Keras cannot run the job.
        OutOfMemory: The job does not fit.
    """
    if job.kind is JobKind.NULL:
        return time_repetitions(lambda: None, lambda: None, protocol)
    if job.kind not in _RUNNERS:
        raise InvalidSetupError(
            f"with Keras, {', '.join(_RUNNERS)} are measured, got a job of kind {job.kind}"
        )
    use_tensorflow()
    module, _, name = _RUNNERS[job.kind].partition(":")
    run: Any = getattr(importlib.import_module(f"forerun.adapters.keras.{module}"), name)
    try:
        result: RunResult = run(job, device_index, protocol)
    except Exception as error:
        # TensorFlow's error, recognised without loading TensorFlow.
        if type(error).__name__ != "ResourceExhaustedError":
            raise
        from forerun.evidence.measurement.runners.table import OutOfMemory

        raise OutOfMemory(str(error).splitlines()[0]) from error
    return result
