"""Steps under a ParameterServerStrategy of TensorFlow, workers and servers in local processes.

``fit`` of Keras 3 does not work there, so the loop is a ``ClusterCoordinator``'s: steps are scheduled on the workers
and the time to ``join`` is divided by their number. Training is asynchronous; no other kind exists.

Every worker needs more threads between operations than there are workers (``inter_op_parallelism_threads``); with the
default of a small machine the cluster waits for itself for ever, without a word. Servers of TensorFlow have no stop:
the processes are ended, and the whole measurement has a time limit.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from forerun.errors import InvalidSetupError, MeasurementError, MissingExtraError

__all__ = ["measure_parameter_server"]

_TIMEOUT_S = 300.0
_LEARNING_RATE = 0.01


def measure_parameter_server(
    spec: str = "cnn:depth=2,base_filters=8",
    *,
    num_workers: int = 2,
    num_servers: int = 1,
    batch_size: int = 32,
    num_steps: int = 40,
    timeout_s: float = _TIMEOUT_S,
) -> float:
    """Time of a step of a Keras family under local parameter servers [s].

    Args:
        spec: Network as ``keras_networks.build_keras_family`` takes it.
        num_workers: Processes that compute.
        num_servers: Processes that hold the weights.
        batch_size: Samples of one worker's step.
        num_steps: Steps timed together, over all workers.
        timeout_s: All processes are ended after this long [s].

    Raises:
        InvalidSetupError: A number below one.
        MissingExtraError: TensorFlow is not installed.
        MeasurementError: A process failed, or the time ran out.
    """
    from importlib.util import find_spec

    for name, value in (("workers", num_workers), ("servers", num_servers), ("steps", num_steps)):
        if value < 1:
            raise InvalidSetupError(f"expected at least one of {name}, got {value}")
    if find_spec("tensorflow") is None:
        raise MissingExtraError("measuring parameter servers", "keras")
    ports = _free_ports(num_workers + num_servers)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    asked = {"cluster": cluster, "spec": spec, "batch_size": batch_size, "num_steps": num_steps}
    processes: list[subprocess.Popen[str]] = []
    try:
        tasks = [(kind, index) for kind in ("ps", "worker") for index in range(len(cluster[kind]))]
        for kind, index in tasks:
            processes += [_start("serve", {**asked, "kind": kind, "index": index}, environment)]
        chief = _start("coordinate", asked, environment)
        processes.append(chief)
        return _answer(chief, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
    finally:
        for opened in sockets:
            opened.close()


def _start(what: str, asked: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[str]:
    is_chief = what == "coordinate"
    return subprocess.Popen(
        [sys.executable, "-m", __name__, what, json.dumps(asked)],
        env=environment,
        stdout=subprocess.PIPE if is_chief else subprocess.DEVNULL,
        stderr=subprocess.PIPE if is_chief else subprocess.DEVNULL,
        text=True,
    )


def _answer(chief: subprocess.Popen[str], timeout_s: float) -> float:
    try:
        out, err = chief.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasurementError(
            f"the cluster of parameter servers gave no answer in {timeout_s:g} s; take fewer steps or workers"
        ) from error
    if chief.returncode:
        last = err.strip().splitlines()[-1:] or [f"exit status {chief.returncode}"]
        raise MeasurementError(f"the coordinator of the parameter servers ended: {last[0]}")
    return float(json.loads(out.splitlines()[-1])["step_time_s"])


def _serve(asked: dict[str, Any]) -> None:
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = len(asked["cluster"]["worker"]) + 2
    cluster = tf.train.ClusterSpec(asked["cluster"])
    server = tf.distribute.Server(
        cluster, job_name=asked["kind"], task_index=asked["index"], config=config, protocol="grpc", start=True
    )
    server.join()


def _coordinate(asked: dict[str, Any]) -> float:
    import keras
    import tensorflow as tf

    from forerun.tracing.keras_networks import build_keras_family, keras_image_shape

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(asked["cluster"]), rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    channels, height, width = keras_image_shape(asked["spec"])
    with strategy.scope():
        model = build_keras_family(asked["spec"])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def replica_step() -> None:
        images = tf.random.uniform((asked["batch_size"], height, width, channels))
        labels = tf.zeros((asked["batch_size"],), tf.int64)
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        for variable, gradient in zip(
            model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
        ):
            variable.value.assign_sub(_LEARNING_RATE * gradient)

    @tf.function  # type: ignore[untyped-decorator]  # TensorFlow is not typed
    def step() -> None:
        strategy.run(replica_step)

    def run(number: int) -> float:
        began_s = time.perf_counter()
        for _ in range(number):
            coordinator.schedule(step)
        coordinator.join()
        return time.perf_counter() - began_s

    run(2 * len(asked["cluster"]["worker"]))  # tracing, on every worker
    step_time_s: float = run(asked["num_steps"]) / asked["num_steps"]
    return step_time_s


def main(arguments: Sequence[str]) -> None:
    """Runs a server, a worker or the coordinator; the first argument says which."""
    what, text = arguments
    asked = json.loads(text)
    if what == "serve":
        _serve(asked)
        return
    print(json.dumps({"step_time_s": _coordinate(asked)}), flush=True)
    os._exit(0)  # the threads of the coordinator outlive it


if __name__ == "__main__":
    main(sys.argv[1:])
