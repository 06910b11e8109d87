"""Ray: jobs (``/api/jobs/``) and nodes (``/api/v0/nodes``) of its dashboard, and ``ray job`` to change a job.

Work on a Ray cluster is many jobs to measure, one task per job, or trials of a search. The tasks only measure; this
process writes, so that one store and one identity per job serve all nodes. A job whose node is lost runs again on
another; as only its answer is written, it is written once. Only sessions on one device have anchors, because tasks here
need not follow each other on one machine. Trials, too, run again elsewhere when their node dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shlex
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forerun.adapters.clusters.job_formats import sold_as
from forerun.adapters.clusters.kubernetes import CLOUD_DEVICES
from forerun.base.errors import FailureError, MeasurementError, MissingExtraError, RecordError, UsageError
from forerun.base.received import parsed_yaml
from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import DEFAULT_RUN, NULL_JOB, key_of, measure_job
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
from forerun.jobs.scheduling.live import (
    Action,
    ActionKind,
    ClusterSystem,
    LiveCluster,
    LiveJob,
    LiveNode,
    inside,
    parse_document,
    prefixed_fields,
    wanted_list,
)
from forerun.question.devices.local import gpu_index, lock_device
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial
from forerun.script.tuning.tuner import TrialRunner

RAY_DASHBOARD = "http://127.0.0.1:8265"
"""Where ``ray start`` puts its dashboard."""

_PATIENCE_S = 60.0
_ACCELERATOR = "accelerator_type:"
_WAITING, _RUNNING = "PENDING", "RUNNING"


def ray_cluster(jobs: Any, nodes: Any, now_s: float) -> LiveCluster:
    """Submitted jobs and living nodes of Ray.

    Ray does not say on which devices a job is: jobs that run are taken to lie on the nodes in order. A job's devices
    are its metadata ``forerun.num_devices``, or 1.

    Args:
        jobs: The document of ``/api/jobs/``.
        nodes: The document of ``/api/v0/nodes?detail=1``.
        now_s: Time at which they were written, since 1970 [s].

    Raises:
        RecordError: A list or a field is missing.
    """
    found_nodes = _nodes(nodes)
    free = {node.name: node.num_devices for node in found_nodes}
    notes: list[str] = []
    found = []
    for row in wanted_list({"jobs": jobs}, "jobs", "Ray's /api/jobs/"):
        if "status" not in row:
            raise RecordError(
                f"Ray's /api/jobs/: expected the status of every job, got {', '.join(list(row)[:6])}"
            )
        if row["status"] not in (_WAITING, _RUNNING):
            continue
        if name := row.get("submission_id"):
            found.append(_job(row, str(name), now_s, free))
        else:
            notes.append(f"job {row.get('job_id')} was started by a driver, not submitted: left alone")
    return LiveCluster(system="ray", nodes=found_nodes, jobs=tuple(found), notes=tuple(notes))


def _nodes(document: Any) -> tuple[LiveNode, ...]:
    inner = document
    for key in ("data", "result"):
        inner = inner.get(key, inner) if isinstance(inner, dict) else inner
    rows = inner if isinstance(inner, list) else wanted_list(inner, "result", "Ray's /api/v0/nodes")
    found = []
    for row in rows:
        has = row.get("resources_total") or {}
        number = int(has.get("GPU", 0))
        if row.get("state") == "ALIVE" and number:
            kinds = [key.removeprefix(_ACCELERATOR) for key in has if key.startswith(_ACCELERATOR)]
            name = str(row.get("node_ip") or row.get("node_name") or row.get("node_id"))
            found.append(LiveNode(name=name, device=(kinds or ["gpu"])[0].lower(), num_devices=number))
    return tuple(found)


def _job(row: Mapping[str, Any], name: str, now_s: float, free: dict[str, int]) -> LiveJob:
    fields = prefixed_fields(row.get("metadata"))
    # The list of jobs does not say what a job asked for, so the number travels in its metadata.
    number = fields.pop("num_devices", "1")
    if not number.isdecimal() or int(number) < 1:
        raise RecordError(
            f"job {name}: expected a whole number in its metadata forerun.num_devices, got '{number}'"
        )
    is_running = row["status"] == _RUNNING
    start_s = float(row.get("start_time") or 0) / 1000
    entrypoint = str(row.get("entrypoint") or "")
    return LiveJob(
        name=name,
        title=" ".join(shlex.split(entrypoint)[:2]) if entrypoint.count("'") % 2 == 0 else entrypoint,
        is_running=is_running,
        num_devices=int(number),
        nodes=_taken(int(number), free) if is_running else (),
        ran_s=max(0.0, now_s - start_s) if is_running and start_s else 0.0,
        fields=fields,
        # Ray finds the devices of an entry point on one node.
        part=int(number),
        details={"entrypoint": entrypoint},
    )


def _taken(number: int, free: dict[str, int]) -> tuple[tuple[str, int], ...]:
    found = []
    for name, left in free.items():
        share = min(left, number)
        if share:
            found.append((name, share))
            free[name] -= share
            number -= share
    return tuple(found)


def ray_commands(action: Action) -> list[str]:
    """A job of Ray cannot be changed: it is stopped and submitted again under a new name.

    Ray starts a waiting job by itself as soon as there is room, and cannot be told to wait.
    """
    job, name = action.job, shlex.quote(action.job.name)
    starts_itself = action.kind is ActionKind.START and action.num_devices == job.num_devices
    if action.kind is ActionKind.WAIT or starts_itself:
        return []
    stop = [f"ray job stop {name}"]
    if action.kind is ActionKind.STOP:
        return stop
    metadata = {f"forerun.{key}": value for key, value in job.fields.items()}
    metadata["forerun.num_devices"] = str(action.num_devices)
    is_new = action.kind is ActionKind.SUBMIT
    again = (
        f"ray job submit --no-wait --submission-id {name if is_new else shlex.quote(_next_name(job.name))} "
        f"--entrypoint-num-gpus {action.num_devices} --metadata-json {shlex.quote(json.dumps(metadata))} -- "
        f"{action.script or job.details.get('entrypoint', '')}"
    )
    return [again] if is_new else [*stop, again]


def _next_name(name: str) -> str:
    """The same name with the number of the try behind it.

    >>> _next_name("run"), _next_name("run-try2")
    ('run-try2', 'run-try3')
    """
    base, mark, number = name.rpartition("-try")
    return f"{base}-try{int(number) + 1}" if mark and number.isdecimal() else f"{name}-try2"


def _ray_token() -> str:
    """The token of Ray's own clients, where they look for it; empty without one."""
    if "RAY_AUTH_TOKEN" in os.environ:
        return os.environ["RAY_AUTH_TOKEN"]
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "~/.ray/auth_token")).expanduser()
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _answered(url: str, path: str) -> Any:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"expected ray:URL such as ray:{RAY_DASHBOARD}, got 'ray:{url}'")
    token = _ray_token()
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
        with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
            text = answer.read().decode("utf-8")
    except urllib.error.HTTPError as error:
        raise FailureError(
            f"Ray's dashboard at {url} refused {path} ({error}); if it asks for a token, set RAY_AUTH_TOKEN as for "
            "ray's own commands"
        ) from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise FailureError(
            f"Ray's dashboard at {url} does not answer ({error}); start Ray with its dashboard (pip install "
            "'ray[default]'), or name it as ray:URL"
        ) from error
    return parse_document(text, f"the answer of {url}{path}")


_PATHS = {"ray_jobs": "/api/jobs/", "ray_nodes": "/api/v0/nodes?detail=1"}


def ray_nodes(text: str) -> list[LiveNode]:
    """Nodes with GPUs that the YAML of a Ray cluster may start, all of them; none where it is no such file.

    Raises:
        RecordError: A type of node has GPUs that it does not name.
    """
    try:
        document = parsed_yaml(text)
    except ValueError:
        return []
    types = inside(document, "available_node_types")
    found: list[LiveNode] = []
    for name, one in types.items() if isinstance(types, Mapping) else ():
        told, config = inside(one, "resources") or {}, inside(one, "node_config") or {}
        number = told.get("GPU", 0)
        kind = next((key.removeprefix(_ACCELERATOR) for key in told if key.startswith(_ACCELERATOR)), "")
        for attached in config.get("guestAccelerators", ()):
            kind = kind or str(attached["acceleratorType"]).rpartition("/")[2]
            number = number or int(attached["acceleratorCount"])
        vm = inside(config, "azure_arm_parameters", "vmSize")
        instance = str(config.get("InstanceType") or config.get("machineType") or vm or "")
        if sold := sold_as(instance):
            number, kind = number or sold.num_devices, kind or sold.device
        if (number or _GPU_INSTANCE.match(instance)) and not (isinstance(number, int) and number and kind):
            raise RecordError(
                f"node type {name} ({instance or 'no instance type'}) does not say its GPUs; add resources: "
                f"{{GPU: 4, {_ACCELERATOR}T4: 1}}"
            )
        # A head is one node, and of its type there are no workers unless it says so.
        most, is_head = document.get("max_workers", 2), document.get("head_node_type") == name
        of_type = inside(one, "max_workers")
        count = min((0 if is_head else most) if of_type is None else of_type, most) + is_head
        kind = CLOUD_DEVICES.get(kind, kind)
        found += [
            LiveNode(name=f"{name}-{i}", device=kind, num_devices=number) for i in range(count) if number
        ]
    return found


_GPU_INSTANCE = re.compile(r"p\d|g\d|a[23]-|Standard_N")
"""Beginnings of the names of instances that have GPUs."""

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
        try:
            # Ray itself would try for minutes.
            if address not in ("auto", "local"):
                _connect(address.rpartition("://")[2])
            # Without an address Ray looks for a cluster of this machine and, finding none, starts one.
            ray.init(address=None if address == "auto" else address, include_dashboard=False)
        except (OSError, ValueError, RuntimeError) as error:
            raise MeasurementError(
                f"expected a Ray cluster at '{address}' (HOST:PORT), got: {str(error).splitlines()[0]}; start one "
                "with 'ray start --head', or give 'auto' for one on this machine"
            ) from error
        try:
            yield ray
        finally:
            ray.shutdown()


def _connect(address: str) -> None:
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


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
    try:
        _connect(ray.get_runtime_context().gcs_address)
    except OSError:
        return True
    return False


class RayCluster:
    """The nodes that can run a job, and the tasks sent to them."""

    def __init__(self, ray: Any, order: Order, resources: Mapping[str, float]) -> None:
        self.ray = ray
        self._order = order
        self._needs = self._needed(resources)
        self._nodes = [
            node
            for node in ray.nodes()
            if node["Alive"] and all(node["Resources"].get(name, 0) >= n for name, n in self._needs.items())
        ]
        if not self._nodes:
            needs = ", ".join(f"{amount:g} {name}" for name, amount in self._needs.items())
            raise MeasurementError(
                f"expected a node of the Ray cluster with {needs}, found none among {len(ray.nodes())}; "
                "add one, or choose another device"
            )

    def describe(self) -> list[Circumstances]:
        """Circumstances on each node with room to answer; busy nodes are not waited for."""
        affinity = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        where = [affinity(node["NodeID"], soft=False) for node in self._nodes]
        refs = [self._task(_describe_node, scheduling_strategy=one).remote(self._order) for one in where]
        ready, late = self.ray.wait(refs, num_returns=len(refs), timeout=_DESCRIBE_TIMEOUT_S)
        for ref in late:
            self.ray.cancel(ref)
        try:
            return list(self.ray.get(ready))
        except self.ray.exceptions.RayError as error:
            raise MeasurementError(f"expected every node to describe itself: {reason_of(error)}") from error

    def submit(self, job: MeasurementJob) -> Any:
        """A reference to the measurements of a job."""
        return self._task(_measure_on_node, max_retries=_NUM_RETRIES).remote(job, self._order)

    def _task(self, function: Callable[..., object], **options: Any) -> Any:
        needs = dict(self._needs)
        # Ray would end a worker after each task on a GPU, but this worker never touches the GPU: its children do.
        options |= {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0)}
        return self.ray.remote(resources=needs, max_calls=0, **options)(function)

    def _needed(self, resources: Mapping[str, float]) -> dict[str, float]:
        if gpu_index(self._order.device_index) is not None:
            return {"GPU": 1, **resources}
        with_cores = [node["Resources"].get("CPU", 0) for node in self.ray.nodes() if node["Alive"]]
        return {"CPU": min((num for num in with_cores if num >= 1), default=1), **resources}


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
        places = cluster.describe()
        wanted = {job.to_json(): [key_of(job, place) for place in places] for job in jobs}
        # A job has a key for each kind of node that may run it; one of them done is enough.
        done = store.done_keys([key for keys in wanted.values() for key in keys])
        left = [MeasurementJob.from_json(job) for job, keys in wanted.items() if not done.intersection(keys)]
        tally = Tally(on_event or (lambda event: None))
        work = partial(_collect, left, store, cluster, tally, expected_s or (lambda job: 1.0))
        return tally.session(work, num_jobs=len(left), num_skipped=len(wanted) - len(left))


def _collect(
    jobs: Sequence[MeasurementJob],
    store: MeasurementSink,
    cluster: RayCluster,
    tally: Tally,
    expected_s: Callable[[MeasurementJob], float],
) -> None:
    """Takes answers as they come and writes them."""
    ray = cluster.ray
    pending = {cluster.submit(job): job for job in jobs}
    left_s = {ref: expected_s(job) for ref, job in pending.items()}
    whole_s, began_s = sum(left_s.values()), time.monotonic()
    try:
        while pending:
            ref = first_ready(ray, pending)
            job = pending.pop(ref)
            del left_s[ref]
            try:
                null, measurement = ray.get(ref)
            except ray.exceptions.RayError as error:
                tally.num_lost += 1
                tally.tell(JobLost(job=job, reason=reason_of(error)))
                continue
            store.add(null)
            store.add(measurement)
            tally.null_step_s = measurement.results.get("null_step_s")
            tally.count(measurement)
            # All nodes together are one worker: the expected work done so far took the time that has passed.
            behind = (whole_s - sum(left_s.values()), time.monotonic() - began_s)
            tally.tell(
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


class RaySystem(ClusterSystem):
    """Ray, which also measures jobs and runs the trials of a search on its nodes."""

    __slots__ = ()
    measure = staticmethod(run_jobs_on_ray)
    trial_runner = staticmethod(ray_runner)


RAY = RaySystem(
    name="ray",
    keys=("ray_jobs", "ray_nodes"),
    documents=lambda address: {
        key: _answered(address or RAY_DASHBOARD, path) for key, path in _PATHS.items()
    },
    read=lambda found, now_s: ray_cluster(found["ray_jobs"], found["ray_nodes"], now_s),
    commands=lambda actions: [line for action in actions for line in ray_commands(action)],
    configured=ray_nodes,
)
"""Ray as a system of ``forerun schedule live``."""
