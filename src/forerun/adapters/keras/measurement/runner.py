"""Runs a job with Keras on TensorFlow, in the child process: the counterpart of ``runners.run_job``."""

from __future__ import annotations

import importlib
from typing import Any

from forerun.adapters.keras.measurement.tensorflow_device import use_tensorflow
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.records.measurement import JobKind

__all__ = ["run_keras_job"]

_RUNNERS = {
    JobKind.TRAINING: "training:run_keras_training",
    JobKind.LAYER: "layer_runner:run_keras_layer",
    JobKind.STEP: "step_runner:run_keras_step",
    JobKind.DATA_PARALLEL: "server_runner:run_keras_servers",
}


def run_keras_job(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Runs a training, a layer, steps of a model alone or under parameter servers, or a null step.

    Raises:
        InvalidSetupError: Keras cannot run the job.
        OutOfMemory: The job does not fit.
    """
    if job.kind is JobKind.NULL:
        timed = time_repetitions(lambda: None, lambda: None, protocol)
        return RunResult(repetitions_s=timed.repetitions_s, warm_up_s=timed.warm_up_s)
    if job.kind not in _RUNNERS:
        raise InvalidSetupError(
            f"with Keras, {', '.join(_RUNNERS)} are measured, got a job of kind {job.kind}"
        )
    use_tensorflow()
    module, _, name = _RUNNERS[job.kind].partition(":")
    run: Any = getattr(importlib.import_module(f"forerun.adapters.keras.measurement.{module}"), name)
    try:
        result: RunResult = run(job, device_index, protocol)
    except Exception as error:
        if (
            type(error).__name__ != "ResourceExhaustedError"
        ):  # TensorFlow's error, recognised without loading TensorFlow
            raise
        from forerun.evidence.measurement.runners.table import OutOfMemory

        raise OutOfMemory(str(error).splitlines()[0]) from error
    return result
