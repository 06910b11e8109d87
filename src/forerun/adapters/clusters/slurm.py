"""Slurm: ``squeue --json`` and ``sinfo --json`` by the layouts of 21.08 to 24.11, and ``scontrol`` to change a job."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from forerun.adapters import words_of
from forerun.base.errors import RecordError
from forerun.jobs.scheduling.live import (
    Action,
    ActionKind,
    ClusterSystem,
    LiveCluster,
    LiveJob,
    LiveNode,
    fields_of_text,
    inside,
    printed_document,
    wanted_list,
    without,
)

_GRES = re.compile(
    r"(?:gres[:/])?gpu(?::([^:=(,]+(?=[:=]\d)|[^:=(,]*[^:=(,\d][^:=(,]*))?(?:[:=](\d+))?(?:\(.*?\))?"
)
_UNUSABLE: list[str] = words_of("slurm")["unusable"]
_WAITING, _RUNNING = "PENDING", "RUNNING"
_HOLDING: list[str] = words_of("slurm")["holding"]
"""States in which a job holds its devices and is not to be touched; older versions say them instead of running.

Source: Slurm, squeue(1), "Job state codes".
"""
_OWN_REASONS: dict[str, str] = words_of("slurm")["own_reasons"]
"""Beginnings of reasons for which Slurm holds a job that free devices do not start, and what it waits for.

Source: Slurm, squeue(1), "Job reason codes".
"""
_FOR_DEVICES: list[str] = words_of("slurm")["for_devices"]
"""Reasons of a job that free devices may start."""


def slurm_cluster(squeue: Any, sinfo: Any, now_s: float) -> LiveCluster:
    """Jobs and nodes of Slurm.

    Args:
        squeue: The document of ``squeue --json``.
        sinfo: The document of ``sinfo --json``, or of ``scontrol show nodes --json``.
        now_s: Time at which they were written, since 1970 [s].

    Raises:
        RecordError: A list or a field is missing.
    """
    notes: list[str] = []
    rows = wanted_list(squeue, "jobs", "squeue --json")
    taken = {name for row in rows if _takes_whole_nodes(row) for name in expand_host_list(str(row["nodes"]))}
    notes += [f"left out, as a job without GPUs has it whole: {name}" for name in sorted(taken)]
    nodes = tuple(node for node in _nodes(sinfo, notes) if node.name not in taken)
    usable = {node.name for node in nodes}
    jobs, held = [], Counter[tuple[str, str]]()
    for row in rows:
        job = _job(row, nodes, now_s, notes, held)
        if job is None:
            continue
        lost = [name for name, _ in job.nodes if name not in usable]
        if lost:
            notes.append(f"job {job.name} runs on {', '.join(lost)}, which takes no new jobs: left alone")
        elif job.may_use == frozenset():
            notes.append(f"job {job.name}: no node of its partition and features takes jobs: left alone")
        else:
            jobs.append(job)
    return LiveCluster(system="slurm", nodes=without(nodes, held), jobs=tuple(jobs), notes=tuple(notes))


def _takes_whole_nodes(row: Mapping[str, Any]) -> bool:
    """True for a running job with ``--exclusive`` and no GPU, beside which no other starts."""
    is_exclusive = "NONE" in _words(row.get("shared")) or "TRUE" in _words(row.get("exclusive"))
    has_gpus = row.get("gres_detail") or _asked(row, 1)[0] or _devices(_text(row.get("tres_alloc_str")))
    return bool(is_exclusive and row.get("nodes") and not has_gpus)


def _nodes(sinfo: Any, notes: list[str]) -> tuple[LiveNode, ...]:
    key = "nodes" if isinstance(sinfo, dict) and "nodes" in sinfo else "sinfo"
    found: dict[tuple[str, str], int] = {}
    partitions: dict[str, dict[str, None]] = {}
    for row in wanted_list(sinfo, key, "sinfo --json"):
        if key == "nodes":
            names, gres = [str(row.get("name"))], row.get("gres")
            states = [*_words(row.get("state")), *_words(row.get("state_flags"))]
        else:
            # From 23.02 on a row is a group of like nodes.
            names = [str(name) for name in inside(row, "nodes", "nodes") or []]
            gres = inside(row, "gres", "total")
            states = _words(inside(row, "node", "state"))
        if any(bad in state for state in states for bad in _UNUSABLE):
            notes.append(f"left out, as {'/'.join(states).lower()}: {', '.join(names)}")
            continue
        # A group of like nodes is of one partition, and a node in as many groups as it has partitions.
        of = inside(row, "partition", "name") or row.get("partitions") or []
        for name in names:
            partitions.setdefault(name, {}).update(dict.fromkeys([of] if isinstance(of, str) else of))
            for kind, number in _devices(str(gres or "")).items():
                found[name, kind] = number
    return tuple(
        LiveNode(name=name, device=kind, num_devices=n, partitions=tuple(partitions[name]))
        for (name, kind), n in found.items()
        if n
    )


def _may_use(row: Mapping[str, Any], nodes: Sequence[LiveNode]) -> frozenset[str] | None:
    """Nodes of a job's partitions without those that it excludes; None where all of them."""
    wanted = set(filter(None, _text(row.get("partition")).split(",")))
    excluded = set(expand_host_list(_text(row.get("excluded_nodes"))))
    able = [
        node.name
        for node in nodes
        if node.name not in excluded
        and (not wanted or not node.partitions or wanted.intersection(node.partitions))
    ]
    return None if len(able) == len(nodes) else frozenset(able)


def _job(
    row: Mapping[str, Any],
    nodes: Sequence[LiveNode],
    now_s: float,
    notes: list[str],
    held: Counter[tuple[str, str]],
) -> LiveJob | None:
    """One job; None for one that neither runs nor waits, or that has no devices to share.

    Devices of a job of several kinds, whose speed nobody knows, are counted as held.
    """
    if "job_id" not in row or "job_state" not in row:
        raise RecordError(
            f"squeue --json: expected job_id and job_state of every job, got {', '.join(list(row)[:6])}"
        )
    name, states = _name(row), _words(row["job_state"])
    is_running, is_kept = _RUNNING in states, not set(states).isdisjoint(_HOLDING)
    if not (is_running or is_kept or _WAITING in states):
        return None
    is_running |= is_kept
    if not is_running and (why := _why_not_ours(row)):
        notes.append(f"job {name} waits for {why}: left alone")
        return None
    had = [_devices(text) for text in row.get("gres_detail") or []]
    num_nodes = max(1, int(_number(row.get("node_count"), 1)))
    asked, way = _asked(row, num_nodes)
    asked = asked or (_devices(_text(row.get("tres_alloc_str"))) if is_running else {})
    kinds = {kind: sum(one.get(kind, 0) for one in had) for one in had for kind in one} or asked
    number = sum(kinds.values())
    if number < 1:
        notes.append(f"job {name} asks for no GPU: left alone")
        return None
    names = expand_host_list(str(row.get("nodes") or "")) if is_running else []
    if len([kind for kind in kinds.values() if kind]) > 1:
        for name_of_node, one in zip(names, had, strict=False):
            held.update({(name_of_node, kind): n for kind, n in one.items()})
        notes.append(f"job {name} is on devices of several kinds, {', '.join(kinds)}: left alone")
        return None
    shares = [sum(one.values()) for one in had] or [number // max(1, len(names))] * len(names)
    start_s = _number(row.get("start_time"), 0.0)
    limit_min = _number(row.get("time_limit"), inf)
    fields = fields_of_text(_text(row.get("comment")), name)
    if not way and fields.pop("elastic", "false").lower() == "true":
        notes.append(
            f"job {name} asks for GPUs by task or socket, which cannot be changed: it keeps their number"
        )
    # What it has may be of a kind that it did not ask for.
    only = next(iter(asked or kinds), "")
    return LiveJob(
        name=name,
        title=str(row.get("name") or name),
        is_running=is_running,
        num_devices=number,
        device="" if only == "gpu" else only,
        nodes=tuple(zip(names, shares, strict=False)),
        kind=next(iter(kinds)) if is_running else "",
        ran_s=max(0.0, now_s - start_s) if is_running and start_s else 0.0,
        limit_s=60.0 * limit_min,
        # Where only some tasks of an array may run at once, the next of them would take what a stopped one leaves.
        can_restart=bool(row.get("requeue", True))
        and not (is_kept or _is_part(row) or _number(row.get("array_max_tasks"), 0)),
        may_use=_may_use(row, nodes),
        fields=fields,
        part=int(number // num_nodes) if way == "TresPerNode" else 1,
        details={"way": way, **({"held": "yes"} if "Held" in str(row.get("state_reason", "")) else {})},
    )


def _why_not_ours(row: Mapping[str, Any]) -> str:
    """Reason for which a job waits beside devices, so that Slurm would not start it on ours; empty if nothing."""
    reason = str(row.get("state_reason") or "").removeprefix("Job").lower()
    found = next((words for start, words in _OWN_REASONS.items() if reason.startswith(start)), "")
    if found:
        return found
    if reason not in _FOR_DEVICES:
        return f"what Slurm calls {row['state_reason']}"
    # Tasks that were not yet told apart share one row: to give it nodes would give them to every task. The reason of a
    # job that is held says nothing of what it waits for besides.
    ways = {"array_task_string": "arraytasklimit", "dependency": "dependency", "resv_name": "reservation"}
    more = [_OWN_REASONS[reason] for key, reason in ways.items() if _text(row.get(key))]
    if _text(row.get("features")):
        more.append("nodes with its features")
    if _is_part(row):
        more.append("the other parts of its heterogeneous job")
    return next(iter(more), "")


def _is_part(row: Mapping[str, Any]) -> bool:
    """True for a component of a heterogeneous job, which starts and is requeued as a whole."""
    return _number(row.get("het_job_id"), 0) > 0


def _name(row: Mapping[str, Any]) -> str:
    array, task = _number(row.get("array_job_id"), 0), _number(row.get("array_task_id"), -1)
    return f"{int(array)}_{int(task)}" if array and task >= 0 else str(int(_number(row["job_id"], 0)))


def _asked(row: Mapping[str, Any], num_nodes: int) -> tuple[dict[str, int], str]:
    """Devices that a job asks for by kind, from the first of Slurm's ways that says any, and the way to change them.

    Slurm refuses to change them in another way than the job asked by. Those of tasks and sockets stay as they are.
    """
    tasks = max(1, int(_number(row.get("tasks"), 1)))
    ways = (
        ("tres_per_job", 1, "TresPerJob"),
        ("tres_per_node", num_nodes, "TresPerNode"),
        ("tres_per_task", tasks, ""),
        ("tres_per_socket", num_nodes, ""),
        ("tres_req_str", 1, ""),
    )
    for key, times, way in ways:
        found = {kind: times * number for kind, number in _devices(_text(row.get(key))).items()}
        if found:
            return found, way
    return {}, ""


def _devices(text: str) -> dict[str, int]:
    """GPUs by kind in Slurm's words, such as ``gpu:t4:2(S:0)``, ``gres/gpu=4`` or ``gres:gpu:2``.

    A count of a kind stands beside the count of all kinds in ``tres_req_str``; the kind counts.

    >>> _devices("gpu:a100:4(IDX:0-3),shard:8"), _devices("cpu=8,gres/gpu=2"), _devices("gpu:4090:2")
    ({'a100': 4}, {'gpu': 2}, {'4090': 2})
    >>> _devices("gpu:1g.10gb:7"), _devices("gres:gpu"), _devices("gpu:4")
    ({'1g.10gb': 7}, {'gpu': 1}, {'gpu': 4})
    """
    found: dict[str, int] = {}
    for part in re.split(r",(?![^(]*\))", text):
        match = _GRES.fullmatch(part.strip())
        if match:
            kind = match[1] or "gpu"
            found[kind] = found.get(kind, 0) + int(match[2] or 1)
    if len(found) > 1:
        found.pop("gpu", None)
    return {kind: number for kind, number in found.items() if number}


def _number(value: Any, otherwise: float) -> float:
    """A number as older versions write it, or as ``{"set": true, "infinite": false, "number": 5}``."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return otherwise
        value = value.get("number")
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else otherwise


def _text(value: Any) -> str:
    """A text, or the one that newer versions wrap in an object."""
    if isinstance(value, dict):
        value = value.get("job") or value.get("string")
    return str(value or "")


def _words(value: Any) -> list[str]:
    words = value if isinstance(value, list) else [value]
    return [str(word).upper() for word in words if word]


def expand_host_list(text: str) -> list[str]:
    """Names of nodes from Slurm's short form.

    >>> expand_host_list("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']
    """
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        match = re.fullmatch(r"(.*?)\[([^\]]*)\](.*)", part.strip())
        if match is None:
            found += [part.strip()] if part.strip() else []
            continue
        for number in _numbers(match[2].split(",")):
            found += expand_host_list(f"{match[1]}{number}{match[3]}")
    return found


def _numbers(parts: Iterable[str]) -> Iterable[str]:
    for part in parts:
        low, mark, high = part.partition("-")
        high = high if mark else low
        if not (low.isdigit() and high.isdigit() and int(high) - int(low) < _MOST_NODES):
            raise RecordError(
                f"expected a range of at most {_MOST_NODES:,} nodes such as 01-16, got '{part}'"
            )
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


_MOST_NODES = 100_000


def slurm_nodes(text: str) -> list[LiveNode]:
    """Nodes with GPUs of ``slurm.conf``, or of ``scontrol show nodes -o``, that are in a partition and not down."""
    defaults: dict[str, str] = {}
    names, open_to, found = set[str](), set[str](), list[LiveNode]()
    for line in text.replace("\\\n", " ").splitlines():
        fields = {key.lower(): value for key, value in _FIELD.findall(line.partition("#")[0])}
        is_down = any(bad in fields.get("state", "").upper() for bad in _UNUSABLE if bad != "UNKNOWN")
        if fields.get("nodename") == "DEFAULT":
            defaults = fields
        elif "nodename" in fields:
            fields, some = defaults | fields, expand_host_list(fields["nodename"])
            names.update(some)
            kinds = {} if is_down else _devices(fields.get("gres", ""))
            found += [
                LiveNode(name=one, device=kind, num_devices=n) for one in some for kind, n in kinds.items()
            ]
        elif "partitionname" in fields and not is_down:
            open_to.update(expand_host_list(fields.get("nodes", "")))
    # Names that are no nodes stand for sets of them, or for all.
    return [node for node in found if node.name in open_to or not open_to or open_to - names]


_FIELD = re.compile(r"(\w+)=(\S+)")


def slurm_plan(actions: Sequence[Action]) -> list[str]:
    """Commands of a whole decision: jobs that will start are held before any device becomes free.

    Otherwise Slurm itself may start one of them on the devices that a stopped job leaves, before it is given its nodes.
    """
    starting = [action.job for action in actions if action.kind is ActionKind.START]
    held = [f"scontrol hold {shlex.quote(job.name)}" for job in starting if not job.details.get("held")]
    return held + [line for action in actions for line in _commands(action)]


def _commands(action: Action) -> list[str]:
    """A job that is changed goes back to the queue, held, so that it can be changed, and is let go."""
    job, name = action.job, shlex.quote(action.job.name)
    if action.kind is ActionKind.STOP:
        return [f"scontrol requeuehold {name}"]
    if action.kind is ActionKind.WAIT:
        return [] if job.details.get("held") else [f"scontrol hold {name}"]
    names = ",".join(node for node, _ in action.nodes)
    per_node = max(number for _, number in action.nodes)
    # A job that asks for GPUs of no kind cannot be changed to a kind: its node says which it gets.
    is_typed = action.device != "gpu" and (bool(job.device) or action.kind is ActionKind.SUBMIT)
    kind = f":{action.device}" if is_typed else ""
    if action.kind is ActionKind.SUBMIT:
        only = job.details.get("partition")
        partition = f"--partition={shlex.quote(only)} " if only else ""
        return [
            f"sbatch --job-name={name} {partition}--nodes={len(action.nodes)} --gres=gpu{kind}:{per_node} "
            f"--nodelist={shlex.quote(names)} --wrap {shlex.quote(action.script)}"
        ]
    lines = [f"scontrol requeuehold {name}"] if action.kind is ActionKind.CHANGE else []
    way = job.details.get("way", "TresPerNode")
    number = per_node if way == "TresPerNode" else action.num_devices
    gpus = f"{way}=gres:gpu{kind}:{number} " if way else ""
    lines.append(
        f"scontrol update JobId={name} NumNodes={len(action.nodes)} {gpus}ReqNodeList={shlex.quote(names)}"
    )
    lines.append(f"scontrol release {name}")
    return lines


SLURM = ClusterSystem(
    name="slurm",
    keys=("squeue", "sinfo"),
    documents=lambda address: {name: printed_document([name, "--json"]) for name in ("squeue", "sinfo")},
    read=lambda found, now_s: slurm_cluster(found["squeue"], found["sinfo"], now_s),
    commands=slurm_plan,
    configured=slurm_nodes,
)
"""Slurm as a system of ``forerun schedule live``."""
