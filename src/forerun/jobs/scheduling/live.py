"""A cluster that is running: its nodes, its jobs, the changes of them, and the interface of the systems that run them.

A system (Slurm, Ray, Kubernetes ...) is found through the entry points of ``forerun.clusters``, so that another package
can add one.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any

from forerun.base.errors import FailureError, RecordError, UnknownDeviceError, UsageError
from forerun.base.extras import plugin, plugin_names
from forerun.jobs.scheduling.job import NodeGroup, SharedCluster
from forerun.question.devices.catalogue import find_device

GROUP = "forerun.clusters"
"""Entry points of the systems."""

_PATIENCE_S = 60.0

FIELDS_MARK = "forerun"
"""First word of a comment, or prefix of an annotation, that holds columns of a file of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """Devices of one kind on one node.

    Attributes:
        name: As its system calls it.
        device: Kind of the devices, as its system calls it; ``gpu`` where it does not say.
        num_devices: Number of devices.
        partitions: Partitions that it belongs to; empty where its system has none.
    """

    name: str
    device: str
    num_devices: int
    partitions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """One job that runs or waits.

    Attributes:
        name: Name by which commands of its system know it.
        title: Name that its owner gave it.
        is_running: Whether it has devices now.
        num_devices: Devices it has or asks for, of all nodes together.
        device: Kind of device that it asks for or has; empty for any kind.
        nodes: Devices on each node that it has.
        kind: Kind of the devices that it has, where its system says it; empty else.
        ran_s: Time since its start [s].
        limit_s: Longest time it may run, by its system [s]; infinite without a limit.
        can_restart: Whether its system may stop and start it again.
        part: Devices of it that must lie on one node together, such as those of a pod.
        may_use: Names of the nodes that it may run on; None for all.
        fields: Columns of a file of jobs that its owner wrote into a comment, annotations or metadata.
        details: Further facts that commands for it need, such as a namespace.
    """

    name: str
    title: str
    is_running: bool
    num_devices: int
    device: str = ""
    nodes: tuple[tuple[str, int], ...] = ()
    kind: str = ""
    ran_s: float = 0.0
    limit_s: float = inf
    can_restart: bool = True
    part: int = 1
    may_use: frozenset[str] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveCluster:
    """A cluster at one moment: its nodes, and the jobs that run and wait.

    Attributes:
        system: Name of its system, such as ``slurm``.
        nodes: Usable devices.
        jobs: Jobs that run or wait.
        notes: Jobs and nodes that were left out, and the reasons.
    """

    system: str
    nodes: tuple[LiveNode, ...]
    jobs: tuple[LiveJob, ...]
    notes: tuple[str, ...] = ()


class ActionKind(StrEnum):
    """A kind of change of a job."""

    KEEP = "keep"
    SUBMIT = "submit"
    START = "start"
    WAIT = "wait"
    STOP = "stop"
    CHANGE = "change"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """The change of one job.

    Attributes:
        job: The job.
        kind: Kind of the change.
        device: Kind of devices that it is to have, by the name of the system; empty if it waits.
        nodes: Devices that it is to have on each node.
        script: Command line of a job that was not submitted yet; empty for a job that its system knows.
    """

    job: LiveJob
    kind: ActionKind
    device: str = ""
    nodes: tuple[tuple[str, int], ...] = ()
    script: str = ""

    @property
    def num_devices(self) -> int:
        """Devices from now on."""
        return sum(number for _, number in self.nodes)


def action_of(job: LiveJob, device: str, nodes: Sequence[tuple[str, int]], script: str = "") -> Action:
    """The change that gives a job these devices; without devices it waits, and with a script it is a new job."""
    nodes = tuple(nodes)
    if script:
        kind = ActionKind.SUBMIT if nodes else ActionKind.KEEP
    elif not nodes:
        kind = ActionKind.STOP if job.is_running else ActionKind.WAIT
    elif not job.is_running:
        kind = ActionKind.START
    else:
        kind = ActionKind.KEEP if sorted(nodes) == sorted(job.nodes) else ActionKind.CHANGE
    return Action(job=job, kind=kind, device=device, nodes=nodes, script=script)


def commands_for(system: ClusterSystem, actions: Sequence[Action]) -> list[str]:
    """Lines for a shell: first those that free devices, then those that take them."""
    # A job that is to wait is held before anything comes free, or its system would start it at once.
    order = [ActionKind.WAIT, ActionKind.STOP, ActionKind.CHANGE, ActionKind.START, ActionKind.SUBMIT]
    return system.commands([action for kind in order for action in actions if action.kind is kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSystem:
    """One system that runs jobs on a cluster.

    Attributes:
        name: Name on the command line.
        keys: Keys of the documents that say how the cluster is, as a file holds them.
        documents: Function of an address (the text behind the name, as in ``ray:http://head:8265``; empty without one)
            that asks the system for these documents, by key.
        read: Function of the documents and the time at which they were written, since 1970 [s].
        commands: Function of changes that gives the lines for a shell that make them, in their order.
        no_new_jobs: Reason why jobs that it does not know cannot be submitted to it; empty if they can.
        configured: Function of the text of a configuration file that gives the nodes with GPUs in it; none where it is
            the file of another system.
    """

    name: str
    keys: tuple[str, ...]
    documents: Callable[[str], Mapping[str, Any]]
    read: Callable[[Mapping[str, Any], float], LiveCluster]
    commands: Callable[[Sequence[Action]], list[str]]
    no_new_jobs: str = ""
    configured: Callable[[str], Sequence[LiveNode]] = lambda text: ()


def system_of(name: str) -> ClusterSystem:
    """A system by name.

    Raises:
        UsageError: No package declares one of this name.
    """
    found: ClusterSystem | None = plugin(GROUP, name)
    if found is None:
        raise UsageError(f"unknown cluster system '{name}'; known: {', '.join(plugin_names(GROUP))}")
    return found


def read_live_cluster(source: str, now_s: float | None = None) -> LiveCluster:
    """Jobs and nodes at this moment.

    Args:
        source: A system and, behind a colon, its address: ``slurm``, ``ray``, ``ray:URL``, ``kubernetes``; or a file
            with the documents that its commands print (see ``ClusterSystem.keys``), with ``"read_at_s"`` for the
            seconds since 1970 at which an old one was written.
        now_s: Time since 1970; None: this moment [s].

    Raises:
        UsageError: The source is none of these.
        FailureError: A command is missing or failed, or the dashboard does not answer.
        RecordError: A document is cut off, or lacks what is needed.
    """
    now_s = time.time() if now_s is None else now_s
    name, _, address = source.partition(":")
    if name in plugin_names(GROUP):
        system = system_of(name)
        return system.read(system.documents(address), now_s)
    return _from_file(Path(source), now_s)


def _from_file(path: Path, now_s: float) -> LiveCluster:
    systems = [system_of(name) for name in plugin_names(GROUP)]
    if not path.is_file():
        raise UsageError(
            f"expected {', '.join(system.name for system in systems)}, ray:URL or a file with the documents that their "
            f"commands print, got '{path}', and there is no such file"
        )
    try:
        kinds = ", or ".join(" and ".join(system.keys) for system in systems)
        text = path.read_text(encoding="utf-8-sig")
        again = f"write one object with {kinds}, each as its command prints it as JSON"
        document = parse_document(text, path.name, again)
    except UnicodeDecodeError as error:
        raise RecordError(f"{path.name} is no text in UTF-8: {error}; save it as such") from error
    keys = document if isinstance(document, dict) else {}
    now_s = float(keys["read_at_s"]) if isinstance(keys.get("read_at_s"), (int, float)) else now_s
    for system in systems:
        if set(system.keys) <= set(keys):
            return system.read(keys, now_s)
    raise RecordError(f"{path.name}: expected an object with {kinds}, got {', '.join(keys) or 'a list'}")


def configured_cluster(path: Path) -> SharedCluster:
    """The devices of a configuration file of a system, such as ``slurm.conf`` or the YAML of a Ray cluster.

    Raises:
        RecordError: It cannot be read, or describes no node with GPUs.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path.name}: expected the configuration of a cluster, but {error}") from error
    try:
        nodes = next(filter(None, (system_of(name).configured(text) for name in plugin_names(GROUP))), ())
    except (RecordError, UsageError, TypeError, ValueError) as error:
        raise RecordError(f"{path.name}: {error}; correct the file, or give NxMxDEVICE") from error
    if not nodes:
        raise RecordError(
            f"{path.name}: expected nodes with GPUs, as slurm.conf (NodeName=gpu[01-04] Gres=gpu:a100:8, without what "
            "it includes) or the YAML of a Ray cluster (available_node_types), of Kueue (ClusterQueue with "
            "ResourceFlavor), dstack or SkyPilot names them, got none; give NxMxDEVICE"
        )
    by_kind: dict[str, list[LiveNode]] = {}
    for node in largest_first(nodes):
        by_kind.setdefault(catalogue_name(node.device), []).append(node)
    return shared_cluster(by_kind)


def catalogue_name(name: str) -> str:
    """A device as the catalogue calls it; as its system calls it where the catalogue has none of that name."""
    try:
        return find_device(name).name
    except UnknownDeviceError:
        return name.lower()


def shared_cluster(groups: Mapping[str, Sequence[LiveNode]]) -> SharedCluster:
    """Nodes as groups of the simulator, by name; those without a node are left out."""
    return SharedCluster(
        groups=tuple(
            NodeGroup(
                device=name,
                num_nodes=len(nodes),
                devices_per_node=max(node.num_devices for node in nodes),
                devices_by_node=tuple(node.num_devices for node in nodes),
            )
            for name, nodes in groups.items()
            if nodes
        )
    )


def parse_document(text: str, what: str, again: str = "write it again") -> Any:
    """A JSON document; ``again`` is the advice where it is none.

    Raises:
        RecordError: It is empty, cut off, or no JSON.
    """
    if not text.strip():
        raise RecordError(f"{what} is empty: expected a JSON document; run it again and look at its messages")
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(text.rstrip()) - 1 or error.msg.startswith("Unterminated")
        why = f"it ends after {len(text):,} characters, in the middle" if is_cut else str(error)
        raise RecordError(f"{what} is no whole JSON document: {why}; {again}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, or a thousand brackets
        raise RecordError(f"{what} is no JSON document that can be read: {error}; {again}") from error


def wanted_list(document: Any, key: str, what: str) -> list[dict[str, Any]]:
    """A list of objects inside a document.

    Raises:
        RecordError: There is no such list.
    """
    found = document.get(key) if isinstance(document, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        keys = ", ".join(document) if isinstance(document, dict) else type(document).__name__
        raise RecordError(f"{what}: expected a list of objects under '{key}', got {keys or 'nothing'}")
    return found


def inside(item: Any, *keys: str) -> Any:
    """The value under nested keys of a document; None where one is missing."""
    for key in keys:
        item = item.get(key) if isinstance(item, Mapping) else None
    return item


def fields_of_text(text: str, job: str) -> dict[str, str]:
    """Columns that a comment holds, such as ``forerun model=resnet50 batch_size=256 steps=9000``; else none.

    >>> fields_of_text("forerun points='1:100 2:190' steps=50", "17")
    {'points': '1:100 2:190', 'steps': '50'}
    >>> fields_of_text("for the paper, do not stop", "17")
    {}

    Raises:
        RecordError: The comment begins with the word but does not go on with names and values.
    """
    mark, _, rest = text.strip().partition(" ")
    if mark.rstrip(":") != FIELDS_MARK:
        return {}
    try:
        words = shlex.split(rest)
    except ValueError as error:
        raise RecordError(
            f"job {job}: its comment cannot be read: {error}; close the quotation mark"
        ) from error
    found = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not (mark and name and value):
            raise RecordError(
                f"job {job}: expected name=value in its comment, got '{word}'; quote values with spaces"
            )
        found[name] = value
    return found


def prefixed_fields(values: Mapping[str, Any] | None) -> dict[str, str]:
    """Columns among annotations or metadata, named with the prefix: ``forerun/model``, ``forerun.model``."""
    marks = (f"{FIELDS_MARK}/", f"{FIELDS_MARK}.")
    return {
        name[len(FIELDS_MARK) + 1 :]: str(value)
        for name, value in (values or {}).items()
        if name.startswith(marks)
    }


def largest_first(nodes: Sequence[LiveNode]) -> list[LiveNode]:
    """Nodes by kind in the order of appearance, those with most devices first."""
    kinds = list(dict.fromkeys(node.device for node in nodes))
    return sorted(nodes, key=lambda node: (kinds.index(node.device), -node.num_devices))


def without(nodes: Sequence[LiveNode], taken: Mapping[tuple[str, str], int]) -> tuple[LiveNode, ...]:
    """Nodes without devices that are not to be shared, by name of the node and kind."""
    left = [(node, node.num_devices - taken.get((node.name, node.device), 0)) for node in nodes]
    return tuple(replace(node, num_devices=number) for node, number in left if number > 0)


def printed_document(command: list[str]) -> Any:
    """The JSON document that a command prints."""
    line = " ".join(command)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise FailureError(
            f"'{command[0]}' is not installed here; run this where it is, or save what '{line}' prints into a file"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise FailureError(
            f"'{line}' gave no answer within {_PATIENCE_S:.0f} s; look whether it works"
        ) from error
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FailureError(f"'{line}' failed: {said}")
    return parse_document(done.stdout, f"what '{line}' printed")
