"""Kubernetes: the documents of ``kubectl get``, with the fields of Kueue and Volcano, and commands to change a job."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any

from forerun.adapters import words_of
from forerun.adapters.clusters.job_formats import asked_nodes, sold_as
from forerun.base.errors import RecordError
from forerun.base.received import parsed_yaml
from forerun.jobs.scheduling.live import (
    Action,
    ActionKind,
    ClusterSystem,
    LiveCluster,
    LiveJob,
    LiveNode,
    inside,
    prefixed_fields,
    printed_document,
    wanted_list,
    without,
)

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a job whose start Kueue decides."""

_GET = ["kubectl", "get", "jobs,pods,nodes", "-A", "-o", "json"]

PRIORITY_CLASS = "forerun-now"
"""Kueue's priority class of jobs that are to start now."""

_PRIORITY_MANIFEST = {
    "apiVersion": "kueue.x-k8s.io/v1beta1",
    "kind": "WorkloadPriorityClass",
    "metadata": {"name": PRIORITY_CLASS},
    "value": 1000,
}

GPU = "nvidia.com/gpu"
_JOB_LABELS = ("batch.kubernetes.io/job-name", "job-name", "volcano.sh/job-name")
_ENDS = {"Complete", "Completed", "Failed", "Aborted", "Terminated"}
PRODUCT_LABELS: list[str] = words_of("kubernetes")["product_labels"]
"""Labels of a node that name the product of its GPUs, of NVIDIA's own operator and of clouds."""

CLOUD_DEVICES: dict[str, str] = words_of("kubernetes")["cloud_devices"]
"""Values of these labels that more than one device has.

Sources: Google Kubernetes Engine, "About GPUs in GKE", machine types; CoreWeave, node labels ``gpu.nvidia.com/class``.
"""


def kubernetes_cluster(document: Any, now_s: float) -> LiveCluster:
    """Jobs, their pods and the nodes of one List.

    Args:
        document: The document of ``kubectl get jobs,pods,nodes -A -o json``.
        now_s: Time at which it was written, since 1970 [s].

    Raises:
        RecordError: There is no list of items, no node with GPUs, or a job lacks its name or template.
    """
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for item in wanted_list(document, "items", "kubectl get -o json"):
        by_kind.setdefault(str(item.get("kind")), []).append(item)
    pods, owners = (
        _pods_by_job(by_kind.get("Pod", [])),
        [(item, _owner(item)) for item in by_kind.get("Job", [])],
    )
    notes = [
        f"job {'/'.join(_key(item))} is part of {owner}, which alone may change it: left alone"
        for item, owner in owners
        if owner
    ]
    own = [item for item, owner in owners if not owner]
    ours = {_key(item) for item in own}
    held = Counter[str]()
    for key, shares in pods.items():
        for name, devices in shares if key not in ours else []:
            held[name] += devices
    notes += [
        f"{n} of the GPUs of {name} are those of pods of no Job: left alone" for name, n in held.items() if n
    ]
    found = [node for item in by_kind.get("Node", []) for node in _node(item)]
    nodes = without(found, {(node.name, node.device): held[node.name] for node in found})
    if not found:
        raise RecordError(
            f"kubectl get -o json: expected nodes with {GPU} among the items, got {', '.join(by_kind) or 'none'}; ask "
            "for jobs,pods,nodes"
        )
    jobs = [job for item in own if (job := _job(item, pods, now_s, notes)) is not None]
    return LiveCluster(system="kubernetes", nodes=nodes, jobs=tuple(jobs), notes=tuple(notes))


def _node(item: Mapping[str, Any]) -> list[LiveNode]:
    labels = inside(item, "metadata", "labels") or {}
    number = int(inside(item, "status", "allocatable", GPU) or 0)
    if number < 1 or inside(item, "spec", "unschedulable"):
        return []
    kind = next((str(labels[name]) for name in PRODUCT_LABELS if name in labels), "gpu")
    device = CLOUD_DEVICES.get(kind, kind).lower()
    return [LiveNode(name=_key(item)[1], device=device, num_devices=number)]


def declared_nodes(text: str) -> list[LiveNode]:
    """Nodes with GPUs of YAML: Kubernetes' own, Kueue's quotas, and what dstack's fleets and SkyPilot's tasks ask for.

    A quota counts GPUs, not nodes: they stand on nodes of eight, or of the size of the instance that is named.

    Raises:
        RecordError: A flavor of Kueue or a fleet does not name its GPUs.
    """
    try:
        found = [parsed_yaml(part) for part in _DOCUMENTS.split(text)]
    except ValueError:
        return []
    documents = [one for one in found if isinstance(one, Mapping)]
    items = [item for one in documents for item in (one.get("items") or [one])]
    flavors = {
        inside(item, "metadata", "name"): inside(item, "spec", "nodeLabels") or {}
        for item in items
        if item.get("kind") == "ResourceFlavor"
    }
    nodes = [node for item in items if item.get("kind") == "Node" for node in _node(item)]
    for item in items if flavors else ():
        for group in inside(item, "spec", "resourceGroups") or ():
            for flavor in group.get("flavors") or ():
                nodes += _of_quota(flavor, flavors)
    return nodes + [node for one in documents if "kind" not in one for node in asked_nodes(one)]


def _of_quota(flavor: Mapping[str, Any], labels_of: Mapping[str, Mapping[str, str]]) -> list[LiveNode]:
    """Nodes of a quota of GPUs."""
    name = str(flavor.get("name"))
    quotas = {one.get("name"): one.get("nominalQuota") for one in flavor.get("resources") or ()}
    left, labels = int(quotas.get(GPU) or 0), labels_of.get(name, {})
    if not left:
        return []
    sold = sold_as(labels.get(_INSTANCE_LABEL, ""))
    kind = next((labels[label] for label in PRODUCT_LABELS if label in labels), sold.device if sold else "")
    if not kind:
        raise RecordError(
            f"flavor {name} has a quota of {GPU} and does not name them; add nodeLabels: "
            f"{{{PRODUCT_LABELS[0]}: NVIDIA-A100-SXM4-80GB}} to its ResourceFlavor"
        )
    size, device = sold.num_devices if sold else _QUOTA_NODE, CLOUD_DEVICES.get(kind, kind)
    sizes = [min(size, left - taken) for taken in range(0, left, size)]
    return [LiveNode(name=f"{name}-{i}", device=device, num_devices=n) for i, n in enumerate(sizes)]


_DOCUMENTS = re.compile(r"^---.*$", re.MULTILINE)
_INSTANCE_LABEL = "node.kubernetes.io/instance-type"
_QUOTA_NODE = 8
"""GPUs of a node of which only a quota is known."""


def _namespace(item: Mapping[str, Any]) -> str:
    return str(inside(item, "metadata", "namespace") or "default")


def _key(item: Mapping[str, Any]) -> tuple[str, str]:
    return _namespace(item), str(inside(item, "metadata", "name"))


def _owner(item: Mapping[str, Any]) -> str:
    """The JobSet, RayJob or the like that made a Job and would undo each change of it; empty for none, or a CronJob."""
    for owner in inside(item, "metadata", "ownerReferences") or []:
        if owner.get("controller") and owner.get("kind") != "CronJob":
            return f"{owner.get('kind')} {owner.get('name')}"
    return ""


def _pods_by_job(pods: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], list[tuple[str, int]]]:
    """Nodes and devices of the running pods of each job, and under no name those of all others."""
    found: dict[tuple[str, str], list[tuple[str, int]]] = {}
    for pod in pods:
        labels = inside(pod, "metadata", "labels") or {}
        job = next((labels[name] for name in _JOB_LABELS if labels.get(name)), None)
        node, phase = inside(pod, "spec", "nodeName"), inside(pod, "status", "phase")
        # A pending pod that has a node holds its devices already.
        if node and phase in ("Running", "Pending"):
            key = (_namespace(pod), str(job or ""))
            found.setdefault(key, []).append((str(node), _gpus(inside(pod, "spec") or {})))
    return found


def _job(
    item: Mapping[str, Any],
    pods: Mapping[tuple[str, str], list[tuple[str, int]]],
    now_s: float,
    notes: list[str],
) -> LiveJob | None:
    name, namespace = inside(item, "metadata", "name"), _namespace(item)
    if not name:
        raise RecordError("kubectl get -o json: expected a name in the metadata of every job, got none")
    if _is_over(item):
        return None
    number, parallelism, replicas_of = _asked(item, str(name))
    if number < 1:
        notes.append(f"job {namespace}/{name} asks for no {GPU}: left alone")
        return None
    shares: dict[str, int] = {}
    for node, devices in pods.get((namespace, str(name)), []):
        shares[node] = shares.get(node, 0) + devices
    says_so = inside(item, "status", "active") or inside(item, "status", "state", "phase") == "Running"
    is_running = bool(shares or says_so)
    started = inside(item, "status", "startTime") or inside(item, "status", "state", "lastTransitionTime")
    limit = inside(item, "spec", "activeDeadlineSeconds")
    # Devices of a running job whose pods are not known would be given to somebody else.
    if is_running and not shares:
        raise RecordError(
            f"job {namespace}/{name} runs, but none of its pods is among the items; ask for jobs,pods,nodes"
        )
    annotations = inside(item, "metadata", "annotations") or {}
    # Kueue took its queue from an annotation before 0.3, as old manifests have it.
    labels = {**annotations, **(inside(item, "metadata", "labels") or {})}
    return LiveJob(
        name=f"{namespace}/{name}",
        title=str(name),
        is_running=is_running,
        num_devices=sum(shares.values()) if is_running else number,
        nodes=tuple(shares.items()),
        ran_s=max(0.0, now_s - _seconds(started, str(name))) if is_running and started else 0.0,
        limit_s=float(limit) if limit else inf,
        part=max(1, number // max(1, parallelism)),
        fields=prefixed_fields(annotations),
        details={
            "api": str(item.get("apiVersion", "batch/v1")),
            "queue": str(labels.get(QUEUE_LABEL, "")),
            "per_pod": str(number // max(1, parallelism)),
            "task": replicas_of,
        },
    )


def _asked(item: Mapping[str, Any], name: str) -> tuple[int, int, str]:
    """Devices of all pods together, pods, and the name of the task whose replicas count (Volcano)."""
    tasks = inside(item, "spec", "tasks")
    if isinstance(tasks, list):
        number = [
            (int(task.get("replicas", 1)), _gpus(inside(task, "template", "spec") or {})) for task in tasks
        ]
        first = next((i for i, (_, gpus) in enumerate(number) if gpus), 0)
        total = sum(replicas * gpus for replicas, gpus in number)
        return total, number[first][0] if number else 1, str(tasks[first].get("name", "")) if tasks else ""
    template = inside(item, "spec", "template", "spec")
    if template is None:
        raise RecordError(f"job {name}: expected a pod template in its spec, got none")
    parallelism = int(inside(item, "spec", "parallelism") or 1)
    return parallelism * _gpus(template), parallelism, ""


def _is_over(item: Mapping[str, Any]) -> bool:
    conditions = inside(item, "status", "conditions") or []
    states = {one.get("type") for one in conditions if str(one.get("status")) == "True"}
    return bool(_ENDS & {*states, inside(item, "status", "state", "phase")})


def _gpus(pod: Mapping[str, Any]) -> int:
    return sum(int(inside(one, "resources", "limits", GPU) or 0) for one in pod.get("containers") or [])


def _seconds(text: str, job: str) -> float:
    try:
        return datetime.fromisoformat(text).astimezone(UTC).timestamp()
    except ValueError as error:
        raise RecordError(f"job {job}: expected a date as its start, got '{text}'") from error


def kubernetes_commands(action: Action) -> list[str]:
    """Jobs are suspended and resumed; those of Kueue are put before others in its queue, Volcano has commands."""
    job = action.job
    namespace, _, name = job.name.partition("/")
    to = f"kubectl --namespace {shlex.quote(namespace)}"
    if job.details.get("api", "").startswith("batch.volcano.sh"):
        return _volcano(action, to, name)

    def patched(**spec: Any) -> str:
        patch = shlex.quote(json.dumps({"spec": spec}))
        return f"{to} patch job {shlex.quote(name)} --type merge --patch {patch}"

    if action.kind in (ActionKind.STOP, ActionKind.WAIT):
        return [patched(suspend=True)]
    pods = max(1, action.num_devices // max(1, int(job.details.get("per_pod", "1"))))
    if not job.details.get("queue"):
        return [patched(parallelism=pods, suspend=False)]
    # Kueue itself resumes what it admits; the priority class puts a job before the others.
    label = f"kueue.x-k8s.io/priority-class={PRIORITY_CLASS}"
    return [patched(parallelism=pods), f"{to} label job {shlex.quote(name)} --overwrite {label}"]


def _volcano(action: Action, to: str, name: str) -> list[str]:
    """Volcano starts and stops whole jobs; how many pods a job has is its manifest's."""
    command = "AbortJob" if action.kind in (ActionKind.STOP, ActionKind.WAIT) else "ResumeJob"
    manifest = {
        "apiVersion": "bus.volcano.sh/v1alpha1",
        "kind": "Command",
        "metadata": {"generateName": f"{name}-"},
        "action": command,
        "target": {"apiVersion": action.job.details["api"], "kind": "Job", "name": name},
    }
    return [_piped(manifest, f"{to} create")]


def _piped(manifest: dict[str, Any], command: str) -> str:
    return f"echo {shlex.quote(json.dumps(manifest))} | {command} --filename -"


def _commands(actions: Sequence[Action]) -> list[str]:
    lines = [line for action in actions for line in kubernetes_commands(action)]
    # Kueue knows a class of priority only once it has been made.
    needs_class = any(PRIORITY_CLASS in line for line in lines)
    return [_piped(_PRIORITY_MANIFEST, "kubectl apply"), *lines] if needs_class else lines


KUBERNETES = ClusterSystem(
    name="kubernetes",
    keys=("items",),
    documents=lambda address: printed_document(_GET),
    read=kubernetes_cluster,
    commands=_commands,
    no_new_jobs="a job for Kubernetes needs an image: create it suspended and it will be read",
    configured=declared_nodes,
)
"""Kubernetes as a system of ``forerun schedule live``."""
