"""Steps under a ParameterServerStrategy of TensorFlow, workers and servers in local processes.

``fit`` of Keras 3 does not work there, so a ``ClusterCoordinator`` runs the loop: a round of steps is scheduled on the
workers and the time to ``join`` is divided by their number. Training is asynchronous and updates by plain gradient
descent; no other kind exists.

Every worker needs more threads between operations than there are workers (``inter_op_parallelism_threads``); with the
default of a small machine the cluster waits for itself for ever, without a message. Servers of TensorFlow cannot be
stopped: their processes end when this process ends, in whatever way, because they read a pipe from it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

from forerun.base.errors import ForerunError, InvalidSetupError, MeasurementError, MissingExtraError
from forerun.base.isolation import error_from
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.records.measured_run import setup_of, text_of, whole_of
from forerun.question.devices.local import gpu_index

__all__ = [
    "SERVER_STRATEGY",
    "ClusterTimes",
    "check_servers",
    "measure_parameter_server",
    "run_keras_servers",
]


_LEARNING_RATE = 1e-4
_STEPS_OF_A_WORKER = 4
"""Number of steps of each worker in a round, so that the wait for the last step is a small part of the round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes:
    """Times of a cluster of parameter servers.

    Attributes:
        step_times_s: Time of a step over all workers in each timed round [s].
        warm_up_s: Time of a step in each round of the warm-up [s].
        is_stationary: True if the times had settled.
        first_round_s: Time of the first round, which traces on every worker [s].
        num_parameters: Number of parameters of the model.
        num_trainable: Number of trained parameters, which servers and workers exchange.
    """

    step_times_s: tuple[float, ...]
    warm_up_s: tuple[float, ...]
    is_stationary: bool
    first_round_s: float
    num_parameters: int
    num_trainable: int


def check_servers(num_workers: int, num_servers: int, phase: str, optimizer: str, device: str) -> None:
    """Refuse a job that parameter servers cannot run.

    Raises:
        InvalidSetupError: A number is below one, or the job has another phase or optimizer, or a GPU.
        MissingExtraError: Keras or TensorFlow is not installed.
    """
    for name, value in (("worker", num_workers), ("parameter server", num_servers)):
        if value < 1:
            raise InvalidSetupError(
                f"expected at least one {name}, got {value}; give --workers and --parameter-servers"
            )
    wanted = (("phase", phase, "train"), ("optimizer", optimizer, "sgd-plain"), ("device", device, "cpu"))
    for name, found, only in wanted:
        if found != only:
            raise InvalidSetupError(f"parameter servers are measured with {name} {only} only, got {found}")
    if find_spec("keras") is None or find_spec("tensorflow") is None:
        raise MissingExtraError("measuring parameter servers", "keras")


def measure_parameter_server(job: MeasurementJob, protocol: Protocol) -> ClusterTimes:
    """Times steps of a Keras model under local parameter servers.

    Args:
        job: Model, ``num_workers``, ``num_servers`` and the parameters of ``step_runner``; the batch size is that
            of one worker's step.
        protocol: Settings of the timing of rounds; all processes are ended after ``timeout_s``.

    Raises:
        InvalidSetupError: A number or setting is not possible.
        MissingExtraError: TensorFlow is not installed.
        MeasurementError: A process failed, or the time ran out.
    """
    num_workers = whole_of(job.parameters, "num_workers", 2)
    num_servers = whole_of(job.parameters, "num_servers", 1)
    setup = setup_of(job.parameters)
    check_servers(num_workers, num_servers, setup.phase, setup.optimizer, "cpu")
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_workers + num_servers)]
    cluster = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    num_threads = max(1, (protocol.num_threads or os.cpu_count() or 1) // num_workers)
    asked = {"cluster": cluster, "job": job.to_json(), "protocol": protocol.to_json(), "threads": num_threads}
    tasks = [(kind, index) for kind in ("ps", "worker") for index in range(len(cluster[kind]))]
    processes: list[subprocess.Popen[str]] = []
    lifeline, own_end = os.pipe()
    try:
        for kind, index in tasks:
            processes.append(_start("serve", {**asked, "kind": kind, "index": index}, lifeline))
        chief = _start("coordinate", asked, lifeline)
        processes.append(chief)
        return _answer(chief, protocol.timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        os.close(own_end)
        os.close(lifeline)


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def _start(what: str, asked: dict[str, Any], lifeline: int) -> subprocess.Popen[str]:
    is_chief = what == "coordinate"
    quiet = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", __name__, what, str(lifeline), json.dumps(asked)],
        env={**os.environ, **quiet},
        stdin=subprocess.DEVNULL,
        pass_fds=(lifeline,),
        stdout=subprocess.PIPE if is_chief else subprocess.DEVNULL,
        stderr=subprocess.PIPE if is_chief else subprocess.DEVNULL,
        text=True,
    )


def _answer(chief: subprocess.Popen[str], timeout_s: float) -> ClusterTimes:
    try:
        out, err = chief.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(
            f"the cluster of parameter servers gave no answer in {timeout_s:g} s; take a smaller model, fewer "
            "repetitions or workers, or a longer --timeout-s"
        ) from error
    last = out.strip().splitlines()[-1:] or [""]
    if chief.returncode:
        said = err.strip().splitlines()[-1:] or [f"exit status {chief.returncode}"]
        if not last[0].startswith("{"):
            raise MeasurementError(f"the coordinator of the parameter servers ended: {said[0]}")
        refusal = json.loads(last[0])
        raise error_from(refusal["kind"], refusal["message"])
    values: dict[str, Any] = json.loads(last[0])
    return ClusterTimes(**{**values, **{name: tuple(values[name]) for name in ("step_times_s", "warm_up_s")}})


def _end_with_the_parent(lifeline: int) -> None:
    """Ends this process when the pipe from its parent closes, which happens even if the parent is killed."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def _serve(asked: dict[str, Any]) -> None:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = len(asked["cluster"]["worker"]) + 2
    config.intra_op_parallelism_threads = asked["threads"]
    cluster = tf.train.ClusterSpec(asked["cluster"])
    server = tf.distribute.Server(
        cluster, job_name=asked["kind"], task_index=asked["index"], config=config, protocol="grpc", start=True
    )
    server.join()


def _coordinate(asked: dict[str, Any]) -> ClusterTimes:
    import tensorflow as tf

    from forerun.adapters.keras.runner import set_keras_defaults
    from forerun.adapters.keras.step_runner import build_measured_model
    from forerun.evidence.measurement.runners.timing import time_repetitions

    job, protocol = MeasurementJob.from_json(asked["job"]), Protocol.from_json(asked["protocol"])
    setup = setup_of(job.parameters)
    set_keras_defaults(setup, whole_of(job.parameters, "seed", 0))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(asked["cluster"]), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        found = build_measured_model(job, setup)
    step = _distributed_step(strategy, found, setup.batch_size_per_device)
    num_steps = _STEPS_OF_A_WORKER * len(asked["cluster"]["worker"])

    def run_round() -> None:
        for _ in range(num_steps):
            coordinator.schedule(step)
        coordinator.join()

    began_s = time.perf_counter()
    run_round()  # the first round traces on every worker
    first_round_s = time.perf_counter() - began_s
    timed = time_repetitions(run_round, _nothing, protocol)
    return ClusterTimes(
        step_times_s=tuple(time_s / num_steps for time_s in timed.repetitions_s),
        warm_up_s=tuple(time_s / num_steps for time_s in timed.warm_up_s),
        is_stationary=timed.is_stationary,
        first_round_s=first_round_s,
        num_parameters=int(found.model.count_params()),
        num_trainable=sum(
            int(variable.value.shape.num_elements()) for variable in found.model.trainable_variables
        ),
    )


def _nothing() -> None:
    """Does nothing: a round has ended when its steps have."""


def _distributed_step(strategy: Any, found: Any, batch_size: int) -> Any:
    """A step of one worker: its own batch, gradients, and an update of the servers' weights."""
    import keras
    import tensorflow as tf

    from forerun.adapters.keras.step_runner import example_batch, keras_loss

    model = found.model
    loss_of = keras.losses.get(keras_loss(model)[0])

    def replica_step() -> None:
        inputs, targets = example_batch(found, batch_size)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(loss_of(targets, model(inputs, training=True)))
        weights = model.trainable_variables
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.value.assign_sub(_LEARNING_RATE * tf.cast(gradient, variable.dtype))

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is not typed
    def step() -> None:
        strategy.run(replica_step)

    return step


def main(arguments: Sequence[str]) -> None:
    """Runs a server, a worker or the coordinator, as the first argument names it."""
    what, lifeline, text = arguments
    asked = json.loads(text)
    _end_with_the_parent(int(lifeline))
    if what == "serve":
        _serve(asked)
        return
    try:
        print(json.dumps(asdict(_coordinate(asked))), flush=True)
    except ForerunError as error:
        print(json.dumps({"kind": type(error).__name__, "message": str(error)}), flush=True)
        os._exit(1)
    os._exit(0)  # the threads of the coordinator outlive it


if __name__ == "__main__":
    main(sys.argv[1:])


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
