"""A job under parameter servers of TensorFlow: a cluster of local processes, timed and ended.

Parameters of the job beside those of ``keras_step_runner``: ``num_workers``, ``num_servers``, ``strategy``
(``parameter-server``). The batch size is that of one worker's step; the workers share the threads of the session.
"""

from __future__ import annotations

from statistics import median

from forerun.adapters.keras.measurement.parameter_server import measure_parameter_server
from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.records.measured_run import text_of, whole_of
from forerun.question.devices.local import gpu_index

__all__ = ["SERVER_STRATEGY", "run_keras_servers"]

SERVER_STRATEGY = "parameter-server"
_FLOAT_BYTES = 4


def run_keras_servers(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of all workers together; a repetition is a round of steps over their number.

    Results are num_parameters, gradient_bytes, world_size (workers), num_servers, throughput_samples_per_s and
    first_step_s, the first round, which traces on every worker.

    Raises:
        InvalidSetupError: The job has another strategy, or a GPU.
        MeasurementError: The cluster failed or gave no answer in time.
    """
    strategy = text_of(job.parameters, "strategy", SERVER_STRATEGY)
    if strategy != SERVER_STRATEGY or gpu_index(device_index) is not None:
        raise InvalidSetupError(
            f"with Keras, several processes are measured as {SERVER_STRATEGY} on cpu, got {strategy} on {device_index}"
        )
    times = measure_parameter_server(job, protocol)
    return RunResult(
        repetitions_s=times.step_times_s,
        warm_up_s=times.warm_up_s,
        is_stationary=times.is_stationary,
        results={
            "num_parameters": times.num_parameters,
            "gradient_bytes": _FLOAT_BYTES * times.num_trainable,
            "world_size": whole_of(job.parameters, "num_workers", 2),
            "num_servers": whole_of(job.parameters, "num_servers", 1),
            "throughput_samples_per_s": whole_of(job.parameters, "batch_size", 32)
            / median(times.step_times_s),
            "first_step_s": times.first_round_s,
        },
    )
