"""Ray: jobs (``/api/jobs/``) and nodes (``/api/v0/nodes``) of its dashboard, and ``ray job`` to change a job."""

from __future__ import annotations

import json
import os
import shlex
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import FailureError, RecordError, UsageError
from forerun.jobs.scheduling.live import (
    Action,
    ActionKind,
    ClusterSystem,
    LiveCluster,
    LiveJob,
    LiveNode,
    parse_document,
    prefixed_fields,
    wanted_list,
)

if TYPE_CHECKING:
    from forerun.evidence.measurement.jobs import MeasurementJob
    from forerun.evidence.measurement.session import MeasurementSink, SessionReport
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
        name = row.get("submission_id")
        if not name:
            notes.append(f"job {row.get('job_id')} was started by a driver, not submitted: left alone")
            continue
        found.append(_job(row, str(name), now_s, free))
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


def _documents(address: str) -> dict[str, Any]:
    url = address or RAY_DASHBOARD
    return {
        "ray_jobs": _answered(url, "/api/jobs/"),
        "ray_nodes": _answered(url, "/api/v0/nodes?detail=1"),
    }


class RaySystem(ClusterSystem):
    """Ray, which also measures jobs and runs the trials of a search on its nodes."""

    __slots__ = ()

    def measure(
        self, jobs: Iterable[MeasurementJob], store: MeasurementSink, **settings: Any
    ) -> SessionReport:
        """Measures jobs on the nodes, see ``ray_jobs.run_jobs_on_ray``."""
        from forerun.adapters.clusters.ray_jobs import run_jobs_on_ray

        return run_jobs_on_ray(jobs, store, **settings)

    def trial_runner(self, address: str) -> AbstractContextManager[TrialRunner]:
        """A runner of trials on the nodes, see ``ray_jobs.ray_runner``."""
        from forerun.adapters.clusters.ray_jobs import ray_runner

        return ray_runner(address)


RAY = RaySystem(
    name="ray",
    keys=("ray_jobs", "ray_nodes"),
    documents=_documents,
    read=lambda found, now_s: ray_cluster(found["ray_jobs"], found["ray_nodes"], now_s),
    commands=lambda actions: [line for action in actions for line in ray_commands(action)],
)
"""Ray as a system of ``forerun schedule live``."""
