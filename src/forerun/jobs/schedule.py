"""``schedule``: the devices of each job now, the time when each is done, and a comparison of policies."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.jobs.schedule_jobs import BY_DURATION, KnownJob, Links, Say, known_jobs
from forerun.jobs.scheduling.job import ScheduledJob, SharedCluster, parse_cluster
from forerun.jobs.scheduling.jobs_file import JobEntry, check_entries, read_jobs
from forerun.jobs.scheduling.live import configured_cluster
from forerun.jobs.scheduling.marginal_gain import foresight_within
from forerun.jobs.scheduling.outcome import ScheduleMetrics, SimulatedSchedule, Stretch
from forerun.jobs.scheduling.placement import Placement
from forerun.jobs.scheduling.policy import Policy, find_policy
from forerun.jobs.scheduling.running_job import Standing
from forerun.jobs.scheduling.simulation import Progress, simulate
from forerun.jobs.scheduling.speed import ScaledSpeed, SpeedModel
from forerun.jobs.scheduling.trace import RIGID_POLICIES, read_trace, simulate_rigid
from forerun.prediction.estimate import Interval

NUM_DRAWS = 20
"""Schedules simulated with other speeds and works for the intervals of the ends."""

MOST_JOBS_WITH_INTERVALS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """Devices of one job now.

    Attributes:
        job: Its name.
        device: Kind of its devices; empty while it waits.
        num_devices: Number of devices.
        nodes: The devices on each node.
        batch_size: Global batch to train with.
        reason: Reason for this allocation.
        commands: The torchrun line of each node.
    """

    job: str
    device: str
    num_devices: int
    nodes: tuple[NodeDevices, ...]
    batch_size: int | None
    reason: str
    commands: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishTime:
    """Time at which one job is done.

    Attributes:
        job: Its name.
        arrival_s, start_s: Times at which it comes and starts [s].
        finish_s: Time at which it is done [s]; 90 % interval over errors of speed and work.
        deadline_s: Its deadline [s], infinite without one.
        deadline_share: Share of the draws that meet it; NaN without one.
    """

    job: str
    arrival_s: float
    start_s: float
    finish_s: Interval
    deadline_s: float
    deadline_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutcome:
    """One policy's answer.

    Attributes:
        policy, title: Its name and what it does.
        metrics: Figures of its schedule.
        now: Devices of each job now.
        finish_times: Time at which each job is done.
        stretches: Devices of each job over time, for the picture.
    """

    policy: str
    title: str
    metrics: ScheduleMetrics
    now: tuple[JobPlan, ...] = ()
    finish_times: tuple[FinishTime, ...] = ()
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Answer):
    """The answer of ``schedule``.

    Attributes:
        cluster: The cluster as text.
        devices_by_node: Devices of each node.
        outcomes: By policy, in the order asked for.
        notes: Sources of the answer.
    """

    cluster: str
    devices_by_node: tuple[int, ...]
    outcomes: tuple[PolicyOutcome, ...]
    notes: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return sum(self.devices_by_node)

    def json_fields(self) -> dict[str, Any]:
        """The cluster, and of each policy its figures, what each job gets now, and when each is done."""
        return {
            "cluster": self.cluster,
            "num_devices": self.num_devices,
            "policies": [
                {
                    "policy": outcome.policy,
                    "title": outcome.title,
                    "metrics": outcome.metrics,
                    "allocation": [
                        {**fields_of(plan), "device": plan.device or None} for plan in outcome.now
                    ],
                    "jobs": outcome.finish_times,
                }
                for outcome in self.outcomes
            ],
            "notes": self.notes,
        }


def schedule(
    jobs: str | Path | Sequence[Mapping[str, Any]],
    *,
    cluster: str | Path | SharedCluster,
    policies: Sequence[str] = ("foresight", "srtf", "fifo"),
    round_s: float = 60.0,
    seed: int = 0,
    intra: str | None = None,
    inter: str | None = None,
    fair: float | None = None,
    say: Say | None = None,
) -> Schedule:
    """Devices of each job now, the time when it is done, and a comparison of policies.

    Args:
        jobs: A CSV or YAML file, or mappings with the same names; see docs/files.md.
        cluster: Nodes x devices a node x kind, such as ``"2x4xt4"``; groups joined by '+'. Or the path of a
            ``slurm.conf``, or of the YAML of a Ray cluster.
        policies: Names of policies, the preferred one first.
        round_s: Time between two decisions [s].
        seed: Of the draws behind the intervals.
        intra: Link inside a node for jobs whose speed is predicted, where the form of the board does not say it.
        inter: Link between nodes for these jobs, such as ``"ethernet-25g"``.
        fair: Finish-time fairness that ``foresight`` keeps every job within: its completion over that with an own
            1/n of the cluster; 10 if None, infinite for no bound.
        say: Told what is being done, a few words at a time.

    Raises:
        UsageError: The question must be changed.
        FailureError: A model cannot be predicted, or a policy cannot serve a job.
    """
    found = _cluster(cluster)
    chosen = _policies(policies, fair)
    known = known_jobs(entries_of(jobs), found, Links(intra=intra, inter=inter), say)
    outcomes, notes = [], schedule_notes(known, with_intervals=has_intervals(known))
    for policy in chosen:
        simulated = partial(simulate, [item.job for item in known], found, round_s=round_s)
        main = simulated(policy, say=simulation_progress(policy.name, say))
        if policy.worst_fairness < inf:
            policy, main, note = _within_bound(policy, main, simulated)
            notes.append(note)
        draws = draws_of(known, found, policy, round_s, seed)
        outcomes.append(
            PolicyOutcome(
                policy=policy.name,
                title=policy.title,
                metrics=main.metrics,
                now=_plans(main, known),
                finish_times=finish_times(main, draws),
                stretches=main.stretches,
            )
        )
    return _answer(found, outcomes, notes)


def _within_bound(
    policy: Policy, main: SimulatedSchedule, simulated: Callable[[Policy], SimulatedSchedule]
) -> tuple[Policy, SimulatedSchedule, str]:
    """Our policy with its bound, its schedule, and the bound's cost beside the same without it.

    Jobs are served long before they would exceed the bound, for forecasts err: where the schedule without it stays
    within it by itself and is sooner done, that one counts. Under a load that allows no such bound, serving whoever
    waited longest makes all of them late: then the laxer bound counts whose worst job fares best.
    """
    bound, kept = policy.worst_fairness, ""
    free = simulated(foresight_within(inf))
    tried = [(policy, main), (foresight_within(inf), free)]
    if main.metrics.worst_fairness > bound:
        kept, laxer = ", which this load does not allow", 2 * bound
        while laxer < free.metrics.worst_fairness:
            tried.append((foresight_within(laxer), simulated(foresight_within(laxer))))
            laxer *= 2
        policy, main = min(
            tried, key=lambda one: (one[1].metrics.worst_fairness, one[1].metrics.average_completion_s)
        )
    elif free.metrics.worst_fairness <= bound:
        policy, main = min(tried, key=lambda one: one[1].metrics.average_completion_s)
    change = main.metrics.average_completion_s / free.metrics.average_completion_s - 1
    note = (
        f"foresight keeps finish-time fairness within {bound:g}{kept}: worst {main.metrics.worst_fairness:.1f}, "
        f"{free.metrics.worst_fairness:.1f} without the bound; average completion {change:+.1%} (--fair)"
    )
    return policy, main, note


def _cluster(cluster: str | Path | SharedCluster) -> SharedCluster:
    # Text may come from a stranger over HTTP, a path only from this machine.
    if isinstance(cluster, Path):
        return configured_cluster(cluster)
    return parse_cluster(cluster) if isinstance(cluster, str) else cluster


def schedule_trace(
    trace: str | Path,
    *,
    cluster: str | Path | SharedCluster,
    policies: Sequence[str] = ("fifo", "srtf", "las"),
) -> Schedule:
    """Comparison of policies on a trace of jobs with known devices and durations.

    Args:
        trace: A Philly-like CSV or Parquet file; see docs/files.md.
        cluster: As in ``schedule``; only the number of its devices counts.
        policies: Among fifo, srtf and las.

    Raises:
        UsageError: A policy needs more than a trace says, or a job is larger than the cluster.
        RecordError: The trace has holes.
    """
    found = _cluster(cluster)
    chosen = _policies(policies)
    if more := [policy.name for policy in chosen if policy.name not in RIGID_POLICIES]:
        raise UsageError(
            f"policy '{more[0]}' gives other numbers of devices than were asked for, and a trace does not say how fast "
            f"a job is with them; of a trace choose among {', '.join(RIGID_POLICIES)}"
        )
    notes = ["devices are counted, not placed; a job runs for its recorded time on the devices it asked for"]
    jobs = read_trace(trace, notes)
    outcomes = []
    for policy in chosen:
        _, metrics = simulate_rigid(jobs, found.num_devices, policy.name)
        outcomes.append(PolicyOutcome(policy=policy.name, title=policy.title, metrics=metrics))
    return _answer(found, outcomes, notes)


def _answer(cluster: SharedCluster, outcomes: Sequence[PolicyOutcome], notes: Sequence[str]) -> Schedule:
    sizes = tuple(size for group in cluster.groups for size in group.node_sizes)
    return Schedule(cluster=str(cluster), devices_by_node=sizes, outcomes=tuple(outcomes), notes=tuple(notes))


def _policies(names: Sequence[str], fair: float | None = None) -> list[Policy]:
    if not names:
        raise UsageError("expected at least one policy, got none")
    found = [find_policy(name) for name in names]
    if fair is not None:
        if "foresight" not in {policy.name for policy in found}:
            raise UsageError(
                f"--fair bounds the fairness of foresight, and the policies are {', '.join(names)}; add foresight"
            )
        found = [foresight_within(fair) if policy.name == "foresight" else policy for policy in found]
    twice = next((policy.name for i, policy in enumerate(found) if policy.name in names[:i]), None)
    if twice is not None:
        raise UsageError(f"policy '{twice}' was asked for twice; name it once")
    return found


def has_intervals(known: Sequence[KnownJob]) -> bool:
    """True if there are few enough jobs for the schedules behind the intervals."""
    return len(known) <= MOST_JOBS_WITH_INTERVALS


def entries_of(jobs: str | Path | Sequence[Mapping[str, Any]]) -> list[JobEntry]:
    """Checked jobs of a file, or of mappings."""
    return read_jobs(jobs) if isinstance(jobs, (str, Path)) else check_entries(jobs)


def simulation_progress(policy: str, say: Say | None) -> Progress | None:
    """Words for the progress of one simulation."""
    return None if say is None else lambda done, total: say(f"{policy}: {done:,} of {total:,} jobs done")


def draws_of(
    known: Sequence[KnownJob],
    cluster: SharedCluster,
    policy: Policy,
    round_s: float,
    seed: int,
    standing: Mapping[str, Standing] | None = None,
) -> npt.NDArray[np.float64] | None:
    """Ends of the jobs with speeds and works drawn around what is believed, (draws, jobs); None for too many jobs."""
    if seed < 0:
        raise InvalidSetupError(f"the seed must be a whole number from 0, got {seed}")
    if not has_intervals(known):
        return None
    # Each policy draws anew from the seed, so that all are compared on the same speeds and works.
    chance = np.random.default_rng(seed)
    ends = []
    for _ in range(NUM_DRAWS):
        actual = {item.job.name: _drawn(item, *np.exp(chance.standard_normal(2))) for item in known}
        jobs = [item.job for item in known]
        outcome = simulate(jobs, cluster, policy, round_s, actual, standing)
        ends.append([found.end_s for found in outcome.outcomes])
    return np.asarray(ends)


def _drawn(item: KnownJob, speed: float, work: float) -> ScheduledJob:
    """The job as it may turn out: factors are those of a unit spread."""
    factor = speed**item.speed_spread
    # One factor for all kinds: a model that is slower than believed on one device is so on the others.
    speeds: dict[str, SpeedModel] = {
        kind: ScaledSpeed(model, (factor,)) for kind, model in item.job.training.speeds.items()
    }
    training = replace(item.job.training, speeds=speeds)
    work_samples = item.job.work_samples * work**item.work_spread
    return replace(item.job, training=training, work_samples=work_samples)


def _plans(main: SimulatedSchedule, known: Sequence[KnownJob]) -> tuple[JobPlan, ...]:
    by_name = {item.job.name: item for item in known}
    numbers = device_numbers({d.job: d.placement for d in main.first_decisions})
    plans = []
    for port, decision in enumerate(main.first_decisions, start=FIRST_PORT):
        parts = numbers[decision.job]
        given, batch, item = decision.allocation, decision.batch_size, by_name[decision.job]
        lines = torchrun_lines(parts, item.script, port) if parts else []
        plans.append(
            JobPlan(
                job=decision.job,
                device="" if given is None else given.device,
                num_devices=0 if given is None else given.num_workers,
                nodes=parts,
                batch_size=None if batch is None or item.source == BY_DURATION else round(batch),
                reason=decision.reason,
                commands=tuple(lines),
            )
        )
    return tuple(plans)


def finish_times(main: SimulatedSchedule, draws: npt.NDArray[np.float64] | None) -> tuple[FinishTime, ...]:
    """Ends of the jobs with their intervals."""
    found = []
    for i, outcome in enumerate(main.outcomes):
        ends = np.asarray([outcome.end_s]) if draws is None else np.append(draws[:, i], outcome.end_s)
        low, high = np.quantile(ends, [0.05, 0.95])
        has_deadline = outcome.deadline_s < inf
        found.append(
            FinishTime(
                job=outcome.job,
                arrival_s=outcome.arrival_s,
                start_s=outcome.start_s,
                finish_s=Interval(
                    outcome.end_s, min(float(low), outcome.end_s), max(float(high), outcome.end_s)
                ),
                deadline_s=outcome.deadline_s,
                deadline_share=float((ends <= outcome.deadline_s).mean()) if has_deadline else float("nan"),
            )
        )
    return tuple(found)


def schedule_notes(known: Sequence[KnownJob], *, with_intervals: bool) -> list[str]:
    """Sources of the speeds, and the way in which intervals are made."""
    sources: dict[str, list[str]] = {}
    for item in known:
        sources.setdefault(item.source, []).append(item.job.name)
    notes = [f"speed {source}: {', '.join(names)}" for source, names in sources.items()]
    if with_intervals:
        notes.append(f"intervals: {NUM_DRAWS} schedules with speeds and works drawn within their own errors")
    else:
        notes.append(f"no intervals for more than {MOST_JOBS_WITH_INTERVALS} jobs")
    return notes


FIRST_PORT = 29500
"""PyTorch's usual rendezvous port; each job of a plan gets the next."""


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """Devices of one node that a job has.

    Attributes:
        node: Number of the node.
        devices: Numbers of the devices on it.
    """

    node: int
    devices: tuple[int, ...]


def device_numbers(placements: Mapping[str, Placement]) -> dict[str, tuple[NodeDevices, ...]]:
    """Numbers of devices for each job, counted up on each node in the order of the jobs."""
    used: dict[int, int] = {}
    found = {}
    for job, placement in placements.items():
        parts = []
        for share in placement:
            first = used.get(share.node, 0)
            used[share.node] = first + share.num_workers
            parts.append(NodeDevices(share.node, tuple(range(first, first + share.num_workers))))
        found[job] = tuple(parts)
    return found


def torchrun_lines(parts: Sequence[NodeDevices], script: str, port: int) -> list[str]:
    """One line for each node, to be started there; nodes are called node0, node1 ...

    >>> torchrun_lines([NodeDevices(0, (0, 1))], "train.py", 29500)
    ['CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc-per-node=2 train.py']
    """
    # The launcher starts Python itself.
    script = script.removeprefix("python3 ").removeprefix("python ")
    words = " ".join(shlex.quote(word) for word in shlex.split(script))
    if len(parts) == 1:
        return [
            f"{_visible(parts[0])} torchrun --standalone --nproc-per-node={len(parts[0].devices)} {words}"
        ]
    meeting = f"node{parts[0].node}:{port}"
    return [
        f"{_visible(part)} torchrun --nnodes={len(parts)} --nproc-per-node={len(part.devices)} --node-rank={rank} "
        f"--rdzv-backend=c10d --rdzv-id={port} --rdzv-endpoint={meeting} {words}"
        for rank, part in enumerate(parts)
    ]


def _visible(part: NodeDevices) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, part.devices))}"
