"""Steps under a ParameterServerStrategy of TensorFlow, workers and servers in local processes.

Parameters of the job beside those of ``training``: ``num_workers``, ``num_servers``, ``strategy``
(``parameter-server``). The batch size is that of one worker's step; the workers share the threads of the session.

``fit`` of Keras 3 does not work there, so a ``ClusterCoordinator`` runs the loop: a round of steps is scheduled on the
workers and the time to ``join`` is divided by their number. Training is asynchronous and updates by plain gradient
descent; no other kind exists.

Every worker needs more threads between operations than there are workers (``inter_op_parallelism_threads``); with the
default of a small machine the cluster waits for itself for ever, without a message. Servers of TensorFlow cannot be
stopped: they are children that are killed, and that end with this process, in whatever way it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from statistics import median
from typing import Any

from forerun.base.errors import InvalidSetupError, IsolationError, MeasurementError
from forerun.base.extras import require
from forerun.base.isolation import Child, EndedError, LateError, Reply, error_from
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.records.measured_run import setup_of, text_of, whole_of
from forerun.question.devices.local import gpu_index

SERVER_STRATEGY = "parameter-server"

_LEARNING_RATE = 1e-4
_FLOAT_BYTES = 4
_STEPS_OF_A_WORKER = 4
"""Number of steps of each worker in a round, so that the wait for the last step is a small part of the round."""
_ENVIRONMENT = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cluster:
    """A cluster and its work.

    Attributes:
        addresses: Addresses of the processes by kind, ``ps`` and ``worker``.
        job: The job.
        protocol: Settings of the timing of rounds.
        num_threads: Threads of each process.
    """

    addresses: Mapping[str, list[str]]
    job: MeasurementJob
    protocol: Protocol
    num_threads: int


def check_installed(purpose: str) -> None:
    """Refuses a machine without Keras or TensorFlow."""
    require(purpose, "keras", "tensorflow")


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
    check_installed("measuring parameter servers")


def run_keras_servers(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of a Keras model under local parameter servers; a repetition is a round of steps over their number.

    Results are num_parameters, gradient_bytes, world_size (workers), num_servers, throughput_samples_per_s and
    first_step_s, the first round, which traces on every worker.

    Args:
        job: Model, ``num_workers``, ``num_servers`` and the parameters of ``training``.
        device_index: Must be ``cpu``.
        protocol: Settings of the timing of rounds; all processes are ended after ``timeout_s``.

    Raises:
        InvalidSetupError: The job has another strategy, or a GPU, or a number or setting is not possible.
        MissingExtraError: TensorFlow is not installed.
        MeasurementError: A process failed, or the time ran out.
    """
    strategy = text_of(job.parameters, "strategy", SERVER_STRATEGY)
    if strategy != SERVER_STRATEGY or gpu_index(device_index) is not None:
        raise InvalidSetupError(
            f"with Keras, several processes are measured as {SERVER_STRATEGY} on cpu, got {strategy} on {device_index}"
        )
    num_workers = whole_of(job.parameters, "num_workers", 2)
    num_servers = whole_of(job.parameters, "num_servers", 1)
    setup = setup_of(job.parameters)
    check_servers(num_workers, num_servers, setup.phase, setup.optimizer, "cpu")
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(num_workers + num_servers)]
    cluster = _Cluster(
        addresses={"worker": addresses[:num_workers], "ps": addresses[num_workers:]},
        job=job,
        protocol=protocol,
        num_threads=max(1, (protocol.num_threads or os.cpu_count() or 1) // num_workers),
    )
    with ExitStack() as children:
        for kind, of_kind in cluster.addresses.items():
            for index in range(len(of_kind)):
                children.enter_context(_child()).begin(_serve, cluster, kind, index)
        reply = _answer(children.enter_context(_child()), cluster)
    if reply.error == IsolationError.__name__:  # an error of TensorFlow
        raise MeasurementError(f"the coordinator of the parameter servers ended: {reply.text}")
    if reply.error:
        raise error_from(reply.error, reply.text)
    result: RunResult = reply.result
    return result


def _child() -> closing[Child]:
    """A new interpreter for one process of the cluster, because TensorFlow fixes its threads at its first use."""
    spawn = multiprocessing.get_context("spawn")
    return closing(Child(spawn, environment={**os.environ, **_ENVIRONMENT}, name="forerun-cluster"))


def _answer(chief: Child, cluster: _Cluster) -> Reply:
    timeout_s = cluster.protocol.timeout_s
    try:
        return chief.ask(_coordinate, cluster, timeout_s=timeout_s)
    except LateError as error:
        raise MeasurementError(
            f"the cluster of parameter servers gave no answer in {timeout_s:g} s; take a smaller model, fewer "
            "repetitions or workers, or a longer --timeout-s"
        ) from error
    except EndedError as ended:
        raise MeasurementError(f"the coordinator of the parameter servers: {ended}") from ended


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        opened = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]


def _be_silent() -> None:
    """Sends all output to nowhere: TensorFlow's native code reports every process of the cluster that is killed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _serve(cluster: _Cluster, kind: str, index: int) -> None:
    """Is a server or a worker until it is killed."""
    _be_silent()
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = len(cluster.addresses["worker"]) + 2
    config.intra_op_parallelism_threads = cluster.num_threads
    spec = tf.train.ClusterSpec(dict(cluster.addresses))
    server = tf.distribute.Server(
        spec, job_name=kind, task_index=index, config=config, protocol="grpc", start=True
    )
    server.join()


def _coordinate(cluster: _Cluster) -> RunResult:
    """Gives rounds of steps to the workers and times them."""
    _be_silent()
    import tensorflow as tf

    from forerun.adapters.keras.runner import set_keras_defaults
    from forerun.adapters.keras.training import build_measured_model
    from forerun.evidence.measurement.runners.timing import time_repetitions

    job, num_workers = cluster.job, len(cluster.addresses["worker"])
    setup = setup_of(job.parameters)
    set_keras_defaults(setup, whole_of(job.parameters, "seed", 0))
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(dict(cluster.addresses)), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        found = build_measured_model(job, setup)
    step = _distributed_step(strategy, found, setup.batch_size_per_device)
    num_steps = _STEPS_OF_A_WORKER * num_workers

    def run_round() -> None:
        for _ in range(num_steps):
            coordinator.schedule(step)
        coordinator.join()

    began_s = time.perf_counter()
    run_round()  # the first round traces on every worker
    first_round_s = time.perf_counter() - began_s
    # A round has ended when its steps have: there is nothing else to wait for.
    timed = time_repetitions(run_round, lambda: None, cluster.protocol)
    step_times_s = tuple(time_s / num_steps for time_s in timed.repetitions_s)
    weights = found.model.trainable_variables
    return RunResult(
        repetitions_s=step_times_s,
        warm_up_s=tuple(time_s / num_steps for time_s in timed.warm_up_s),
        is_stationary=timed.is_stationary,
        results={
            "num_parameters": int(found.model.count_params()),
            "gradient_bytes": _FLOAT_BYTES
            * sum(int(weight.value.shape.num_elements()) for weight in weights),
            "world_size": num_workers,
            "num_servers": len(cluster.addresses["ps"]),
            "throughput_samples_per_s": setup.batch_size_per_device / median(step_times_s),
            "first_step_s": first_round_s,
        },
    )


def _distributed_step(strategy: Any, found: Any, batch_size: int) -> Any:
    """A step of one worker: its own batch, gradients, and an update of the servers' weights."""
    import keras
    import tensorflow as tf

    from forerun.adapters.keras.training import example_batch, keras_loss

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
