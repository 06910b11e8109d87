"""Compares policies on Philly-derived workloads: replay, forecast errors, unlike devices, large scale."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.adapters.classics.server_models import SynchronousServerSpeed
from forerun.jobs.scheduling.job import (
    NodeGroup,
    ScheduledJob,
    ServerTraining,
    SharedCluster,
    TaskDemand,
    parse_cluster,
)
from forerun.jobs.scheduling.outcome import ScheduleMetrics
from forerun.jobs.scheduling.placement import pack
from forerun.jobs.scheduling.policy import JobView, find_policy
from forerun.jobs.scheduling.running_job import ForecastError
from forerun.jobs.scheduling.simulation import SimulationOptions, simulate
from forerun.jobs.scheduling.trace import RigidJob, RigidPolicy, simulate_rigid
from studies.schedule.applications import read_applications
from studies.schedule.mixed import (
    GAVEL_CLUSTER,
    GAVEL_ROUND_S,
    draw_mixed_jobs,
    read_gavel_speeds,
)
from studies.schedule.placement_study import PlacementResult, placement_study
from studies.schedule.server_study import ServerStudyRow, server_study
from studies.schedule.workloads import Workload, draw_workload, read_philly

__all__ = [
    "ERROR_SPREADS",
    "PolicyRow",
    "ScaleRow",
    "ScheduleResults",
    "allocation_time",
    "schedule_study",
    "trace_time",
]

REPLAY_CLUSTER = "16x4xt4"
MIXED_CLUSTER = "6x4xt4+3x8xrtx-2080-ti+2x8xa100-sxm4-40gb"
"""64 GPUs of three kinds, the shares of Sia's heterogeneous cluster, all measured in the Sia artifact."""

_MEASURED = {"t4": "aws", "rtx-2080-ti": "rtx", "a100-sxm4-40gb": "dgx-ext"}
ERROR_SPREADS = (0.0, 0.1, 0.2, 0.4, 0.7)

_ORACLE = (
    "fifo",
    "srtf",
    "las",
    "equal",
    "drf",
    "tetris",
    "optimus",
    "normalised",
    "pollux",
    "sia",
    "foresight",
)
_FORECAST = ("srtf", "optimus", "normalised", "pollux", "sia", "foresight")
_CHECKED = ("srtf", "optimus", "normalised", "pollux", "foresight")
_ERRED = ("optimus", "srtf", "pollux", "foresight")
_MIXED = ("sia", "foresight", "pollux", "srtf", "equal")

_GAVEL = ("sia", "foresight", "pollux", "srtf", "fifo")

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRow:
    """One policy on several workloads.

    Attributes:
        policy: Its name.
        forecast: Whether it knew forecasts only, or the truth.
        metrics: By workload.
    """

    policy: str
    forecast: bool
    metrics: tuple[ScheduleMetrics, ...]

    def mean(self, name: str) -> float:
        """Mean of a figure over the workloads."""
        return float(np.mean([getattr(m, name) for m in self.metrics]))

    def spread(self, name: str) -> float:
        """Standard deviation of a figure over the workloads."""
        return float(np.std([getattr(m, name) for m in self.metrics]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRow:
    """One decision at large scale.

    Attributes:
        what: Name of the decision.
        num_jobs, num_tasks: Numbers of jobs and tasks.
        processor_s: Time of one processor core; a busy machine does not lengthen it [s].
    """

    what: str
    num_jobs: int
    num_tasks: int
    processor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleResults:
    """All studies of scheduling.

    Attributes:
        replay: Policies on workloads 0 to 7, on which ours was developed.
        fresh: Some of them on workloads 8 to 15, looked at afterwards.
        bursts: The same policies with the arrivals of single days.
        errors: Average completion [s] on workloads 0 to 3 by policy, by kind of error ("speed", "work") and by spread.
        mixed: Policies on unlike devices, workloads 0 to 3.
        gavel: Policies on jobs of one size and unlike devices, draws 0 to 3.
        servers: Optimus in its own setting, by number of servers (machines).
        placement: Placement by the theorem and by first fit, and parameters on servers.
        scale: Times of large decisions.
    """

    replay: tuple[PolicyRow, ...]
    fresh: tuple[PolicyRow, ...]
    bursts: tuple[PolicyRow, ...]
    errors: Mapping[str, Mapping[str, Mapping[float, float]]]
    mixed: tuple[PolicyRow, ...]
    gavel: tuple[PolicyRow, ...]
    servers: Mapping[int, tuple[ServerStudyRow, ...]]
    placement: PlacementResult
    scale: tuple[ScaleRow, ...]


def schedule_study(folder: Path, say: Progress, quick: bool = False) -> ScheduleResults:
    """Runs all studies; minutes on one core.

    Args:
        folder: Folder of the public tables.
        say: Told what is being done.
        quick: Two workloads instead of eight (one instead of four for errors and unlike devices), no integer program.

    Raises:
        RecordError: A table is missing or lacks a column.
    """
    seeds = range(2) if quick else range(8)
    draw = _Draws(folder)

    def left(names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if not (quick and name == "sia"))

    say("schedule: replay")
    known = draw.workloads(seeds, "t4")
    replay = _rows(known, REPLAY_CLUSTER, left(_ORACLE), forecast=False)
    replay += _rows(known, REPLAY_CLUSTER, left(_FORECAST), forecast=True)
    say("schedule: fresh workloads, bursts")
    fresh = _rows(draw.workloads(range(8, 8 + len(seeds)), "t4"), REPLAY_CLUSTER, _CHECKED, forecast=True)
    bursts = _rows(draw.workloads(seeds, "t4", from_one_day=True), REPLAY_CLUSTER, _CHECKED, forecast=True)
    say("schedule: forecast errors")
    few = seeds[: len(seeds) // 2]
    errors = {name: _errors(known[: len(few)], name) for name in _ERRED}
    say("schedule: unlike devices")
    mixed = _rows(draw.workloads(few, "t4"), MIXED_CLUSTER, left(_MIXED), forecast=False)
    say("schedule: jobs of one size on unlike devices")
    gavel = _gavel_rows(folder, few, left(_GAVEL))
    say("schedule: parameter servers, placement, large scale")
    servers = {number: tuple(server_study(folder, number, len(seeds))) for number in (13, 20, 30, 45)}
    return ScheduleResults(
        replay=tuple(replay),
        fresh=tuple(fresh),
        bursts=tuple(bursts),
        errors=errors,
        mixed=tuple(mixed),
        gavel=tuple(gavel),
        servers=servers,
        placement=placement_study(),
        scale=(*allocation_time(), *trace_time(folder)),
    )


class _Draws:
    """The tables, read once."""

    def __init__(self, folder: Path) -> None:
        self.philly = read_philly(folder)
        self.applications = read_applications(folder, _MEASURED)

    def workloads(self, seeds: Sequence[int], kind: str, from_one_day: bool = False) -> list[Workload]:
        return [
            draw_workload(
                self.philly, self.applications, seed, kind=kind, devices_per_node=4, from_one_day=from_one_day
            )
            for seed in seeds
        ]


def _rows(
    workloads: Sequence[Workload], cluster: str, policies: Sequence[str], *, forecast: bool
) -> list[PolicyRow]:
    found = parse_cluster(cluster)
    return [
        PolicyRow(
            policy=name,
            forecast=forecast,
            metrics=tuple(_replay(workload, found, name, forecast) for workload in workloads),
        )
        for name in policies
    ]


def _replay(
    workload: Workload,
    cluster: SharedCluster,
    policy: str,
    forecast: bool,
    error: ForecastError | None = None,
) -> ScheduleMetrics:
    jobs = list((workload.forecast if forecast else workload.actual).values())
    options = SimulationOptions(seed=workload.seed, error=error or ForecastError())
    return simulate(jobs, cluster, find_policy(policy), options, workload.actual).metrics


def _gavel_rows(folder: Path, seeds: Sequence[int], policies: Sequence[str]) -> list[PolicyRow]:
    speeds, cluster = read_gavel_speeds(folder), parse_cluster(GAVEL_CLUSTER)
    options = SimulationOptions(round_s=GAVEL_ROUND_S)
    rows = []
    for name in policies:
        drawn = (draw_mixed_jobs(speeds, seed) for seed in seeds)
        found = tuple(simulate(jobs, cluster, find_policy(name), options).metrics for jobs in drawn)
        rows.append(PolicyRow(policy=name, forecast=False, metrics=found))
    return rows


def _errors(workloads: Sequence[Workload], policy: str) -> dict[str, dict[float, float]]:
    """Mean average completion by kind and spread of the error."""
    cluster = parse_cluster(REPLAY_CLUSTER)

    def mean(error: ForecastError) -> float:
        found = [_replay(workload, cluster, policy, False, error) for workload in workloads]
        return float(np.mean([m.average_completion_s for m in found]))

    none = {0.0: mean(ForecastError())}
    return {
        "speed": none | {spread: mean(ForecastError(speed=spread)) for spread in ERROR_SPREADS if spread},
        "work": none | {spread: mean(ForecastError(work=spread)) for spread in ERROR_SPREADS if spread},
    }


def allocation_time(
    num_jobs: int = 4000, num_tasks: int = 100_000, num_nodes: int = 16_000
) -> list[ScaleRow]:
    """Allocation and placement of workers and servers at the size of Optimus' own test.

    Each job's speed rises to 12 to 13 workers and as many servers, so that 4,000 jobs take 100,000 tasks.
    """
    # A seventh more than half of the tasks each: whole numbers stop a little below the optimum.
    views = _server_views(num_jobs, round(num_tasks / (2 * num_jobs) * 8 / 7))
    group = NodeGroup(device="gpu", num_nodes=num_nodes, devices_per_node=4, cpu_cores_per_node=32)
    cluster = SharedCluster(groups=(group,))
    rows = []
    for name in ("optimus", "normalised"):
        begin = time.process_time()
        given = find_policy(name).allocate(views, cluster, 0.0)
        middle = time.process_time()
        placed = pack(cluster, {view.job.name: view.job for view in views}, given, {})
        end = time.process_time()
        tasks = sum(a.num_workers + a.num_servers for a in given.values())
        rows.append(
            ScaleRow(
                what=f"{name}: allocation", num_jobs=len(given), num_tasks=tasks, processor_s=middle - begin
            )
        )
        rows.append(
            ScaleRow(
                what=f"{name}: placement", num_jobs=len(placed), num_tasks=tasks, processor_s=end - middle
            )
        )
    return rows


def _server_views(num_jobs: int, best: int) -> list[JobView]:
    """Jobs whose time is shortest at about so many workers and servers each."""
    chance = np.random.default_rng(0)
    demand = TaskDemand(devices=1, cpu_cores=2)
    server = TaskDemand(devices=0, cpu_cores=3)
    views = []
    for number in range(num_jobs):
        unit = float(chance.uniform(0.5, 2.0))
        # d/dw of t0 / w + t3 w is zero at w = sqrt(t0 / t3), and likewise for servers at w = p.
        speed = SynchronousServerSpeed((unit, 0.1, unit / best, 0.0, unit / best**2))
        training = ServerTraining(speed=speed, batch_size=32, worker=demand, server=server)
        work = float(chance.uniform(1e5, 1e6))
        job = ScheduledJob(name=f"job-{number}", training=training, work_samples=work, num_servers=1)
        views.append(JobView(job=job, order=number, remaining_samples=work))
    return views


def trace_time(folder: Path, num_jobs: int = 100_000, num_devices: int = 2048) -> list[ScaleRow]:
    """A hundred thousand jobs of the Philly trace, drawn with replacement, under FIFO, SRTF and LAS."""
    philly = read_philly(folder)
    chance = np.random.default_rng(0)
    rows = chance.integers(len(philly), size=num_jobs)
    columns = (
        philly.time_s.to_numpy()[rows],
        philly.n_gpus.to_numpy()[rows],
        philly.duration_s.to_numpy()[rows],
    )
    jobs = [
        RigidJob(f"job-{i}", float(time_s), int(number), float(duration_s))
        for i, (time_s, number, duration_s) in enumerate(zip(*columns, strict=True))
    ]
    found = []
    for policy in RigidPolicy:
        begin = time.process_time()
        simulate_rigid(jobs, num_devices, policy)
        spent_s = time.process_time() - begin
        found.append(
            ScaleRow(what=f"trace under {policy}", num_jobs=num_jobs, num_tasks=num_jobs, processor_s=spent_s)
        )
    return found
