"""``schedule live``: the devices that each job of a running cluster should have, and the commands that give them."""

from __future__ import annotations

import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from forerun.base.answers import Answer
from forerun.base.errors import FailureError, InvalidSetupError, RecordError, UsageError
from forerun.jobs.schedule import draws_of, entries_of, finish_times, schedule_notes, simulation_progress
from forerun.jobs.schedule_jobs import KnownJob, Links, Say, known_jobs
from forerun.jobs.scheduling.job import Allocation, DataParallelTraining
from forerun.jobs.scheduling.jobs_file import JobEntry, check_entries
from forerun.jobs.scheduling.live import (
    Action,
    LiveCluster,
    LiveJob,
    LiveNode,
    action_of,
    catalogue_name,
    commands_for,
    largest_first,
    read_live_cluster,
    shared_cluster,
    system_of,
    without,
)
from forerun.jobs.scheduling.outcome import Decision
from forerun.jobs.scheduling.placement import NodeShare, Placement
from forerun.jobs.scheduling.policy import find_policy
from forerun.jobs.scheduling.running_job import Standing
from forerun.jobs.scheduling.simulation import simulate
from forerun.prediction.estimate import Interval

LIMIT_SPREAD = 0.5
"""Standard deviation of the logarithm of a job's time where only its limit is known: owners ask for much more."""


_PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAdvice(Answer):
    """One job: its share now and the share it should have.

    Attributes:
        job: Name by which its system knows it.
        title: Name that its owner gave it.
        has: Devices by node now; empty while it waits.
        action: Change to make.
        finish_s: Time from now until it is done, if that change is made [s]; 90 % interval.
        reason: Reason for the change.
    """

    job: str
    title: str
    has: tuple[tuple[str, int], ...]
    action: Action
    finish_s: Interval
    reason: str

    def json_fields(self) -> dict[str, Any]:
        """Its part of the JSON object."""
        return {
            "job": self.job,
            "title": self.title,
            "has": [{"node": node, "num_devices": number} for node, number in self.has],
            "action": str(self.action.kind),
            "device": self.action.device or None,
            "gets": [{"node": node, "num_devices": number} for node, number in self.action.nodes],
            "finish_s": self.finish_s,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveSchedule(Answer):
    """Advice for a cluster.

    Attributes:
        system: Name of its system, such as ``slurm``.
        cluster: Its devices as text.
        policy: Name of the policy.
        jobs: Advice for each job, those with devices first.
        commands: Lines for a shell that bring it about; none was run.
        notes: What the advice rests on, and what was left out.
    """

    system: str
    cluster: str
    policy: str
    jobs: tuple[JobAdvice, ...]
    commands: tuple[str, ...]
    notes: tuple[str, ...]


def schedule_live(
    source: str,
    jobs: str | Path | Sequence[Mapping[str, Any]] | None = None,
    *,
    policy: str = "foresight",
    round_s: float = 60.0,
    seed: int = 0,
    intra: str | None = None,
    inter: str | None = None,
    say: Say | None = None,
) -> LiveSchedule:
    """The devices that each job of a running cluster should have, its end then, and the commands for that.

    Nothing is run. The speed of a job is that of the columns its owner wrote into the comment (Slurm), the annotations
    (Kubernetes) or the metadata (Ray) of the job; without any it keeps its devices and number, and its time is its
    system's limit. A job that runs has done what that speed makes in the time it ran, or what its curve says.

    Args:
        source: A system such as ``slurm``, ``ray:URL`` or ``kubernetes``, or a file; see ``read_live_cluster``.
        jobs: Further jobs that are not submitted yet, as in ``schedule``.
        policy: Who decides.
        round_s: Time between two decisions [s].
        seed: Of the draws behind the intervals.
        intra: Link inside a node for jobs whose speed is predicted, as in ``schedule``.
        inter: Link between nodes for these jobs.
        say: Told what is being done, a few words at a time.

    Raises:
        UsageError: The question must be changed, or a job's fields are impossible.
        FailureError: The cluster cannot be read.
        RecordError: A document is cut off, or no device can be shared.
    """
    chosen = find_policy(policy)
    live = read_live_cluster(source)
    new = [] if jobs is None else entries_of(jobs)
    system = system_of(live.system)
    if new and system.no_new_jobs:
        raise UsageError(f"{system.no_new_jobs}; leave out JOBS")
    if not live.nodes:
        raise RecordError(
            f"{live.system}: expected nodes with GPUs that take jobs, got none; {'; '.join(live.notes)}"
        )
    found = _Devices(live)
    live = found.live
    known, notes = _known(live, new, found, Links(intra=intra, inter=inter))
    if not known:
        return LiveSchedule(
            system=live.system,
            cluster=str(found.plain),
            policy=chosen.name,
            jobs=(),
            commands=(),
            notes=(*live.notes, "no job is left to decide about"),
        )
    standing = {
        job.name: _standing(job, item, found)
        # Jobs that are not submitted yet stand behind those of the cluster.
        for job, item in zip(live.jobs, known, strict=False)
        if job.is_running
    }
    words = simulation_progress(chosen.name, say)
    main = simulate([k.job for k in known], found.cluster, chosen, round_s, standing=standing, say=words)
    draws = draws_of(known, found.cluster, chosen, round_s, seed, standing)
    ends = {finish.job: finish.finish_s for finish in finish_times(main, draws)}
    scripts = {entry.name: entry.script for entry in new}
    submitted = [
        LiveJob(name=entry.name, title=entry.name, is_running=False, num_devices=entry.num_devices)
        for entry in new
    ]
    by_name = {job.name: job for job in (*live.jobs, *submitted)}
    advice = tuple(
        _advice(d, by_name[d.job], found, ends[d.job], scripts.get(d.job, "")) for d in main.first_decisions
    )
    return LiveSchedule(
        system=live.system,
        cluster=str(found.plain),
        policy=chosen.name,
        jobs=tuple(sorted(advice, key=lambda a: a.action.num_devices == 0)),
        commands=tuple(commands_for(system, [item.action for item in advice])),
        notes=(*live.notes, *notes, *schedule_notes(known, with_intervals=draws is not None)),
    )


class _Devices:
    """Nodes of a live cluster as groups of the simulator, and back.

    A group has one kind of devices and is open to the same jobs: where partitions or excluded nodes tell nodes of a
    kind apart, their groups count as kinds of their own.

    Attributes:
        live: The cluster without jobs on nodes of several groups, which keep what they have.
        kind_of: Catalogue name of the devices of each group.
        cluster: The groups.
        plain: The same with one group a kind, for speeds.
    """

    def __init__(self, live: LiveCluster) -> None:
        nodes = largest_first(live.nodes)
        self.catalogue_name = {node.device: catalogue_name(node.device) for node in nodes}
        self._limits = list(dict.fromkeys(job.may_use for job in live.jobs if job.may_use is not None))
        names: dict[tuple[str, tuple[bool, ...]], str] = {}
        for node in nodes:
            kind = self.catalogue_name[node.device]
            number = sum(kind == other for other, _ in names)
            names.setdefault((kind, self._open_to(node)), f"{kind}#{number}" if number else kind)
        self.kind_of = {name: kind for (kind, _), name in names.items()}
        self._open = {name: dict(zip(self._limits, signs, strict=True)) for (_, signs), name in names.items()}
        group_of = {
            (node.name, node.device): names[self.catalogue_name[node.device], self._open_to(node)]
            for node in nodes
        }
        self.live, left = _weighable(live, nodes, group_of, self.catalogue_name)
        nodes = list(left)
        if not nodes:
            raise RecordError(
                f"every device is held by jobs that are left alone; nothing to share: {'; '.join(self.live.notes)}"
            )
        by_group: dict[str, list[LiveNode]] = {name: [] for name in self.kind_of}
        for node in nodes:
            by_group[group_of[node.name, node.device]].append(node)
        self.nodes = [node for group in by_group.values() for node in group]
        self.live_name = {group_of[node.name, node.device]: node.device for node in nodes}
        places = [(node.name, name) for name, group in by_group.items() for node in group]
        self.number = {place: i for i, place in enumerate(places)}
        self.cluster = shared_cluster(by_group)
        by_kind: dict[str, list[LiveNode]] = {}
        for node in nodes:
            by_kind.setdefault(self.catalogue_name[node.device], []).append(node)
        self.plain = shared_cluster(by_kind)

    def _open_to(self, node: LiveNode) -> tuple[bool, ...]:
        return tuple(node.name in limit for limit in self._limits)

    def speeds(
        self, training: DataParallelTraining, may_use: frozenset[str] | None = None, only: str | None = None
    ) -> DataParallelTraining:
        """The same training with speeds on the groups that a job may use."""
        found = {
            name: training.speeds[kind]
            for name, kind in self.kind_of.items()
            if kind in training.speeds
            and only in (None, kind)
            and (may_use is None or self._open[name][may_use])
        }
        return replace(training, speeds=found)

    def placement(self, job: LiveJob) -> tuple[str, Placement]:
        """Kind and nodes of what a job has."""
        kinds = {kind for name, _ in job.nodes for node, kind in self.number if node == name}
        asked = self.catalogue_name.get(job.kind, self.catalogue_name.get(job.device, ""))
        able = [k for k in self.cluster.kinds if k in kinds]
        kind = next((k for k in able if self.kind_of[k] == asked), next(iter(able), ""))
        if any((name, kind) not in self.number for name, _ in job.nodes):
            raise RecordError(
                f"job {job.name} has {job.num_devices} devices of several kinds, or on nodes that are not listed "
                f"({', '.join(name for name, _ in job.nodes)}); that cannot be weighed"
            )
        shares = sorted((self.number[name, kind], number) for name, number in job.nodes)
        return kind, tuple(NodeShare(node, number) for node, number in shares)


def _weighable(
    live: LiveCluster,
    nodes: Sequence[LiveNode],
    group_of: Mapping[tuple[str, str], str],
    kind_of: Mapping[str, str],
) -> tuple[LiveCluster, tuple[LiveNode, ...]]:
    """The jobs that can be decided about, and the nodes without the devices of those that cannot.

    Left alone are jobs whose time nobody knows, running ones on nodes of several groups, and those that wait for more
    devices than there are.
    """
    groups: dict[str, set[str]] = {}
    for (name, _), group in group_of.items():
        groups.setdefault(name, set()).add(group)
    kept, notes, taken = [], list(live.notes), Counter[tuple[str, str]]()
    for job in live.jobs:
        known = [groups[name] for name, _ in job.nodes if name in groups]
        if not (_has_speed(job) or isfinite(job.limit_s)):
            why = f"says neither how fast it is nor how long it may run: left alone; {_TELLS[live.system]}"
        elif known and not set.intersection(*known):
            why = "runs on nodes that are open to different jobs: it keeps them"
        else:
            kept.append(job)
            continue
        notes.append(f"job {job.name} {why}")
        for name, number in job.nodes:
            kinds = [device for other, device in group_of if other == name]
            if kinds:
                taken[name, job.kind if job.kind in kinds else kinds[0]] += number
    left = without(nodes, taken)

    def room(job: LiveJob) -> int:
        of = Counter[str]()
        for node in left:
            if job.may_use is None or node.name in job.may_use:
                of[group_of[node.name, node.device]] += node.num_devices // job.part * job.part
        asked = kind_of.get(job.device)
        return max((n for group, n in of.items() if asked in (None, group.partition("#")[0])), default=0)

    jobs = []
    for job in kept:
        if job.is_running or job.num_devices <= (most := room(job)):
            jobs.append(job)
        else:
            together = f", {job.part} on a node," if job.part > 1 else ""
            notes.append(
                f"job {job.name} asks for {job.num_devices} devices{together} where {most} may come free: left alone"
            )
    return replace(live, jobs=tuple(jobs), notes=tuple(notes)), left


_TELLS = {
    "slurm": "a time limit, or a comment such as forerun points=1:100 batch_size=32 steps=9000, would tell",
    "kubernetes": "activeDeadlineSeconds, or annotations such as forerun/points: 1:100, would tell",
    "ray": "metadata such as forerun.points=1:100, forerun.batch_size=32 and forerun.steps=9000 would tell",
}
"""Ways in which an owner says of a job how long it takes, by system."""


def _known(
    live: LiveCluster, new: Sequence[JobEntry], found: _Devices, links: Links
) -> tuple[list[KnownJob], list[str]]:
    entries = [_entry(job, live.system) for job in live.jobs]
    known = [
        item if i < len(entries) else _on(item, found.speeds(item.job.training))
        for i, item in enumerate(known_jobs([*entries, *new], found.plain, links))
    ]
    by_limit = [job.name for job in live.jobs if not _has_speed(job)]
    for i, job in enumerate(live.jobs):
        known[i] = _as_it_runs(known[i], job, found)
    note = f"by its time limit, for it says nothing of its speed: {', '.join(by_limit)}"
    return known, [note] if by_limit else []


def _entry(job: LiveJob, system: str) -> JobEntry:
    try:
        return check_entries([_row(job)], system)[0]
    except InvalidSetupError as error:
        why = str(error).removeprefix(f"{system}, job 1 ('{job.name}'): ")
        raise InvalidSetupError(f"{system}, job {job.name}: {why}") from error


def _has_speed(job: LiveJob) -> bool:
    return bool({"model", "points", "table"} & set(job.fields))


def _row(job: LiveJob) -> dict[str, Any]:
    """A job as a row of a file of jobs."""
    fixed: dict[str, Any] = {
        "name": job.name,
        "num_devices": job.num_devices,
        "elastic": "false",
        "preemptible": job.can_restart,
    }
    if _has_speed(job):
        return fixed | dict(job.fields)
    # One sample a second on what it asks for, as many as seconds.
    fixed |= {"points": {job.num_devices: 1.0}, "batch_size": 1, "samples": max(60.0, job.limit_s)}
    return fixed | dict(job.fields)


def _on(item: KnownJob, training: DataParallelTraining) -> KnownJob:
    return replace(item, job=replace(item.job, training=training))


def _as_it_runs(item: KnownJob, job: LiveJob, found: _Devices) -> KnownJob:
    """The job on the kind of devices that it asks for, uncertain if only its limit is known."""
    # Its system starts it on the kind that was asked for, whatever would be faster elsewhere.
    only = found.catalogue_name.get(job.device)
    speeds = item.job.training.speeds
    if job.device and only not in speeds:
        raise InvalidSetupError(
            f"job {job.name} asks for {job.device}, its speed is known on {', '.join(speeds)}; add a speed"
        )
    moved = _on(item, found.speeds(item.job.training, job.may_use, only))
    moved = replace(moved, job=replace(moved.job, part=1 if moved.job.is_elastic else job.part))
    return moved if _has_speed(job) else replace(moved, work_spread=LIMIT_SPREAD)


def _standing(job: LiveJob, item: KnownJob, found: _Devices) -> Standing:
    """The share of a running job, and the work it has done by its speed since it started."""
    kind, placement = found.placement(job)
    training = item.job.training
    number = sum(share.num_workers for share in placement)
    if kind not in training.speeds:
        raise InvalidSetupError(
            f"job {job.name} runs on {kind}, its speed is known on {', '.join(training.speeds)}"
        )
    rate = training.speeds[kind](number, len(placement), training.batch_size)
    # A curve says what is left after it, so that none of it is done.
    done = 0.0 if "curve" in job.fields else rate * max(0.0, job.ran_s - item.job.restart_s * _has_speed(job))
    return Standing(
        allocation=Allocation(kind, number), placement=placement, done_samples=done, ran_s=job.ran_s
    )


def _advice(decision: Decision, job: LiveJob, found: _Devices, finish_s: Interval, script: str) -> JobAdvice:
    given = decision.allocation
    nodes = [(found.nodes[share.node].name, share.num_workers) for share in decision.placement]
    device = "" if given is None else found.live_name[given.device]
    of = [set(found.nodes[share.node].partitions) for share in decision.placement]
    if script and of and (shared := sorted(set.intersection(*of))):
        job = replace(job, details={**job.details, "partition": shared[0]})
    action = action_of(job, device, nodes, script)
    return JobAdvice(
        job=job.name,
        title=job.title,
        has=job.nodes,
        action=action,
        finish_s=finish_s if isfinite(finish_s.value) else Interval(value=inf, low=inf, high=inf),
        reason=decision.reason,
    )


def apply_commands(advice: LiveSchedule) -> list[str]:
    """Runs the commands one after another and returns what they said.

    Raises:
        FailureError: One failed; those after it were not run.
    """
    said = []
    for number, line in enumerate(advice.commands, start=1):
        command = ["/bin/sh", "-c", line]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired as error:
            raise FailureError(
                f"'{line}' was not done within {_PATIENCE_S:.0f} s; look how the cluster is"
            ) from error
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            left = len(advice.commands) - number
            raise FailureError(f"'{line}' failed: {why}; {left} command(s) after it were not run")
        said += [text for text in (done.stdout.strip(), done.stderr.strip()) if text]
    return said
