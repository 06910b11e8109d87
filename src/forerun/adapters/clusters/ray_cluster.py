"""A Ray cluster for measurements: the connection, the suitable nodes, and the task that runs on a node."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.base.errors import MeasurementError, MissingExtraError
from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import NULL_JOB, measure_job
from forerun.evidence.records.measurement import Circumstances, Measurement
from forerun.question.devices.local import gpu_index, lock_device

__all__ = [
    "Order",
    "RayCluster",
    "connected_ray",
    "first_ready",
    "is_head_gone",
    "reason_of",
]

_DESCRIBE_TIMEOUT_S = 120.0  # a new worker process imports Python packages, maybe from a network folder
_CONNECT_TIMEOUT_S = 10.0
_HEAD_CHECK_S = 1.0
_HEAD_PATIENCE_S = 10.0
"""Time after which a head that does not answer counts as gone; Ray itself would end this process after 60 s."""
_NUM_RETRIES = 3
# A node with twice the cores of the smallest is sent two tasks, of which one waits while the other measures.
_LOCK_PATIENCE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Settings of a task beside its job."""

    device_index: str
    protocol: Protocol
    occasion: str
    run: str


@contextlib.contextmanager
def connected_ray(address: str) -> Iterator[Any]:
    """The module ``ray``, connected to the cluster at ``HOST:PORT``, or ``auto`` (found or started here).

    While it is connected, Ray prints messages of its nodes on stdout, which belongs to the answer: until the connection
    is closed, such output goes to stderr.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingExtraError("measuring on a Ray cluster", "ray") from None
    with contextlib.redirect_stdout(sys.stderr):
        if ray.is_initialized():
            yield ray
            return
        _check_reachable(address)
        try:
            # Without an address Ray looks for a cluster of this machine and, finding none, starts one.
            ray.init(address=None if address == "auto" else address, include_dashboard=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, error) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Tries a connection first, because Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from error


def _no_cluster(address: str, error: Exception) -> MeasurementError:
    return MeasurementError(
        f"expected a Ray cluster at '{address}' (HOST:PORT), got: {str(error).splitlines()[0]}; start one with "
        "'ray start --head', or give 'auto' for one on this machine"
    )


def first_ready(ray: Any, refs: Iterable[Any]) -> Any:
    """The first of some references that is ready.

    Raises:
        MeasurementError: The head of the cluster is gone, so none will ever be.
    """
    waited = list(refs)
    silent_since_s = None
    while True:
        ready, _ = ray.wait(waited, num_returns=1, timeout=_HEAD_CHECK_S)
        if ready:
            return ready[0]
        if not is_head_gone(ray):
            silent_since_s = None
            continue
        now_s = time.monotonic()
        silent_since_s = silent_since_s or now_s
        if now_s - silent_since_s >= _HEAD_PATIENCE_S:
            raise MeasurementError(
                f"the head of the Ray cluster at '{ray.get_runtime_context().gcs_address}' is gone; everything that "
                "was finished is kept: start the cluster again with 'ray start --head', and run the same command again"
            )


def is_head_gone(ray: Any) -> bool:
    """True if nothing answers at the address of the cluster's head."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError:
        return True
    return False


class RayCluster:
    """The nodes that can run a job, and the tasks sent to them."""

    def __init__(self, ray: Any, order: Order, resources: Mapping[str, float]) -> None:
        self.ray = ray
        self._order = order
        self._needs = self._needed(resources)
        self._nodes = [node for node in ray.nodes() if node["Alive"] and self._suits(node)]
        if not self._nodes:
            needs = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
            raise MeasurementError(
                f"expected a node of the Ray cluster with {needs}, found none among {len(ray.nodes())}; "
                "add one, or choose another device"
            )

    def describe(self) -> list[Circumstances]:
        """Circumstances on each node with room to answer; busy nodes are not waited for."""
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        refs = [
            self._task(_describe_node, scheduling_strategy=affinity(node["NodeID"], soft=False)).remote(
                self._order
            )
            for node in self._nodes
        ]
        ready, late = self.ray.wait(refs, num_returns=len(refs), timeout=_DESCRIBE_TIMEOUT_S)
        for ref in late:
            self.ray.cancel(ref)
        try:
            places: list[Circumstances] = self.ray.get(ready)
        except self.ray.exceptions.RayError as error:
            raise MeasurementError(f"expected every node to describe itself: {reason_of(error)}") from error
        return places

    def submit(self, job: MeasurementJob) -> Any:
        """A reference to the measurements of a job."""
        return self._task(_measure_on_node, max_retries=_NUM_RETRIES).remote(job, self._order)

    def _task(self, function: Callable[..., object], **options: Any) -> Any:
        needs = dict(self._needs)
        # Ray would end a worker after each task on a GPU, but this worker never touches the GPU: its children do.
        return self.ray.remote(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            resources=needs,
            max_calls=0,
            **options,
        )(function)

    def _needed(self, resources: Mapping[str, float]) -> dict[str, float]:
        if gpu_index(self._order.device_index) is not None:
            return {"GPU": 1, **resources}
        with_cores = [node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"]]
        return {"CPU": min((num for num in with_cores if num >= 1), default=1), **resources}

    def _suits(self, node: Mapping[str, Any]) -> bool:
        return all(node["Resources"].get(name, 0) >= amount for name, amount in self._needs.items())


# -- in the tasks -----------------------------------------------------------------------------------------------------

_null_steps: dict[Order, Measurement] = {}


def _describe_node(order: Order) -> Circumstances:
    return describe_circumstances(order.device_index, protocol=order.protocol, occasion=order.occasion)


def _measure_on_node(job: MeasurementJob, order: Order) -> list[Measurement]:
    """Measurements of a job and of the null step, which a worker process measures once."""
    place = _describe_node(order)
    with lock_device(order.device_index, wait_s=_LOCK_PATIENCE * order.protocol.timeout_s):
        if order not in _null_steps:
            _null_steps[order] = measure_job(
                NULL_JOB, protocol=order.protocol, circumstances=place, run=order.run
            )
        null = _null_steps[order]
        null_step_s = null.summary.median_s if null.summary else None
        measurement = measure_job(
            job, protocol=order.protocol, circumstances=place, null_step_s=null_step_s, run=order.run
        )
    return [null, measurement]


def reason_of(error: Exception) -> str:
    """The error in one line: the task's own error if there is one, not Ray's copy of its traceback."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return lines[0] if lines else type(cause).__name__
