"""Work on a Ray cluster: many jobs to measure, one task per job, or trials of a search.

The tasks only measure; this process writes, so that one store and one identity per job serve all nodes. A job whose
node is lost runs again on another; as only its answer is written, it is written once. Only sessions on one device have
anchors, because tasks here need not follow each other on one machine. Trials, too, run again
elsewhere when their node dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from forerun.adapters.clusters.ray_cluster import (
    Order,
    RayCluster,
    connected_ray,
    first_ready,
    is_head_gone,
    reason_of,
)
from forerun.base.errors import MeasurementError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import DEFAULT_RUN, key_of
from forerun.evidence.measurement.session import (
    Event,
    JobFinished,
    JobLost,
    MeasurementSink,
    SessionReport,
    Tally,
    remaining_time_s,
)
from forerun.evidence.records.measurement import Circumstances, Measurement
from forerun.question.devices.local import gpu_index
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial
from forerun.script.tuning.tuner import TrialRunner

__all__ = [
    "ray_runner",
    "run_jobs_on_ray",
]


def run_jobs_on_ray(
    jobs: Iterable[MeasurementJob],
    store: MeasurementSink,
    *,
    address: str = "auto",
    device_index: str = "cpu",
    protocol: Protocol | None = None,
    occasion: str = "",
    on_event: Callable[[Event], None] | None = None,
    expected_s: Callable[[MeasurementJob], float] | None = None,
    resources: Mapping[str, float] | None = None,
    run: str = DEFAULT_RUN,
) -> SessionReport:
    """Measures the jobs that the store does not have yet on the nodes of a Ray cluster.

    A job on ``cuda`` takes one GPU, a job on ``cpu`` as many cores as the smallest node has; each task also holds the
    lock of its device, so that a session outside Ray is not disturbed. A job counts as done if it is done on any kind
    of device of the cluster. Ray's output goes to stderr. Every node needs forerun and the models of the jobs.

    Args:
        jobs: Jobs to measure; equal jobs count once.
        store: Store of the measurements, written by this process only.
        address: Address of the cluster; ``auto`` for the cluster of this machine, or a new one on this machine alone.
        device_index: Kind of device, ``cpu`` or ``cuda``.
        protocol: Settings of the measurements; None for the defaults.
        occasion: Label of the session; the same label resumes it.
        on_event: Called with each event; ``JobStarted`` is not among them.
        expected_s: Time a job is expected to take, for the remaining time [s].
        resources: Custom resources of Ray that a task also needs, such as ``{"a100": 1}``.
        run: Function that runs a job, as ``module:function``.
    """
    order = Order(device_index=device_index, protocol=protocol or Protocol(), occasion=occasion, run=run)
    with connected_ray(address) as ray:
        cluster = RayCluster(ray, order, resources or {})
        wanted = _wanted(jobs, cluster.describe())
        done = store.done_keys([key for keys in wanted.values() for key in keys])
        left = [job for job, keys in wanted.items() if not done.intersection(keys)]
        return _Collection(store, cluster, on_event or _ignore, expected_s).collect(
            [MeasurementJob.from_json(text) for text in left], len(wanted) - len(left)
        )


def _ignore(_: Event) -> None:
    """Ignores an event."""


def _wanted(jobs: Iterable[MeasurementJob], places: Sequence[Circumstances]) -> dict[str, list[str]]:
    """Each different job, as JSON, with its keys on the cluster's kinds of device."""
    return {job.to_json(): [key_of(job, place) for place in places] for job in jobs}


class _Collection:
    """Takes answers as they come and writes them."""

    def __init__(
        self,
        store: MeasurementSink,
        cluster: RayCluster,
        tell: Callable[[Event], None],
        expected_s: Callable[[MeasurementJob], float] | None,
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._tell = tell
        self._expected_s = expected_s or (lambda _: 1.0)
        self._tally = Tally(tell)

    def collect(self, jobs: Sequence[MeasurementJob], num_skipped: int) -> SessionReport:
        return self._tally.session(lambda: self._collect(jobs), num_jobs=len(jobs), num_skipped=num_skipped)

    def _collect(self, jobs: Sequence[MeasurementJob]) -> None:
        ray = self._cluster.ray
        pending = {self._cluster.submit(job): job for job in jobs}
        left_s = {ref: self._expected_s(job) for ref, job in pending.items()}
        expected_s, began_s = sum(left_s.values()), time.monotonic()
        try:
            while pending:
                ref = first_ready(ray, pending)
                job = pending.pop(ref)
                del left_s[ref]
                measurement = self._take(ref, job)
                if measurement is None:
                    continue
                # All nodes together are one worker: the expected work done so far took the time that has passed.
                behind = (expected_s - sum(left_s.values()), time.monotonic() - began_s)
                self._tell(
                    JobFinished(
                        job=job,
                        index=len(jobs) - len(pending) - 1,
                        num_jobs=len(jobs),
                        measurement=measurement,
                        remaining_time_s=remaining_time_s([behind], left_s.values()),
                    )
                )
        finally:
            for ref in () if is_head_gone(ray) else pending:
                ray.cancel(ref, force=True)

    def _take(self, ref: Any, job: MeasurementJob) -> Measurement | None:
        """Writes the answer of a task; None if the task has no answer."""
        try:
            null, measurement = self._cluster.ray.get(ref)
        except self._cluster.ray.exceptions.RayError as error:
            self._tally.num_lost += 1
            self._tell(JobLost(job=job, reason=reason_of(error)))
            return None
        self._store.add(null)
        self._store.add(measurement)
        taken: Measurement = measurement
        self._tally.null_step_s = measurement.results.get("null_step_s")
        self._tally.count(taken)
        return taken


_NUM_RETRIES = 3

_Judge = Callable[[int, float], bool]


@contextlib.contextmanager
def ray_runner(address: str) -> Iterator[TrialRunner]:
    """A runner that gives each trial to a node with a free core, or a free GPU if the trials need one.

    The script and its data must have the same path on the node. Several processes of studies may use one cluster; each
    waits for its own trial, and judges each value that the trial prints on its node.

    Args:
        address: Address of the Ray cluster: ``auto`` or ``HOST:PORT``.

    Raises:
        MissingExtraError, MeasurementError: Ray is not installed, or there is no cluster.
    """
    with connected_ray(address) as ray:
        yield partial(_run_remotely, ray)


def _run_remotely(
    ray: Any,
    order: TrialOrder,
    configuration: ScriptConfiguration,
    *,
    on_value: _Judge | None = None,
    **ignored: Any,
) -> TrialResult:
    resources = {"num_cpus": 1, "num_gpus": 0 if gpu_index(order.device_index) is None else 1}
    task = ray.remote(_run_on_node).options(max_retries=_NUM_RETRIES, **resources)
    mailbox = None if on_value is None else _mailbox_here(ray)
    try:
        running = task.remote(order, configuration, mailbox)
        if on_value is not None:
            _judge_until_done(ray, running, mailbox, on_value)
        result: TrialResult = ray.get(first_ready(ray, [running]))
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]
        raise MeasurementError(f"expected a trial to run on the cluster, got: {reason}") from error
    finally:
        if mailbox is not None and not is_head_gone(ray):
            ray.kill(mailbox)
    return result


def _mailbox_here(ray: Any) -> Any:
    """A mailbox on the node of this process, which outlives the death of other nodes."""
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    here = affinity(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(_Mailbox).options(num_cpus=0, scheduling_strategy=here).remote()


def _judge_until_done(ray: Any, running: Any, mailbox: Any, on_value: _Judge) -> None:
    """Judges each value of a trial until the trial has ended."""
    while True:
        asked = mailbox.next_value.remote()
        if first_ready(ray, [running, asked]) == running:
            return
        try:
            ticket, *told = ray.get(asked)
        except ray.exceptions.RayActorError:  # the mailbox was killed: the trial runs to its end
            return
        mailbox.answer.remote(ticket, on_value(*told))


class _Mailbox:
    """An actor between a trial, which asks about each value, and the session that judges the values.

    The trial waits for each answer, so that its values are judged as without a cluster: in turn, before the next line
    is read. If its node dies, the answer is dropped, and the trial asks from the start when it runs again.
    """

    def __init__(self) -> None:
        self._values: asyncio.Queue[tuple[int, int, float]] = asyncio.Queue()
        self._answers: list[asyncio.Future[bool]] = []

    async def ask(self, number: int, value: float) -> bool:
        """True if the value with this number ends the trial."""
        ticket, answer = len(self._answers), asyncio.get_running_loop().create_future()
        self._answers.append(answer)
        self._values.put_nowait((ticket, number, value))
        return bool(await answer)

    async def next_value(self) -> tuple[int, int, float]:
        """The next question: its ticket, the number of the value, and the value."""
        return await self._values.get()

    async def answer(self, ticket: int, is_end: bool) -> None:
        """Answers a question."""
        self._answers[ticket].set_result(is_end)


# -- in the tasks -----------------------------------------------------------------------------------------------------


def _run_on_node(order: TrialOrder, configuration: ScriptConfiguration, mailbox: Any) -> TrialResult:
    if mailbox is None:
        return run_trial(order, configuration)
    import ray

    def ask(number: int, value: float) -> bool:
        try:
            return bool(ray.get(mailbox.ask.remote(number, value)))
        except ray.exceptions.RayActorError:  # the session no longer judges
            return False

    return run_trial(order, configuration, on_value=ask)
