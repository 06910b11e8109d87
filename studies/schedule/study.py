"""Studies of scheduling: policies, forecast errors, Optimus' own setting, placement, large scale."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.base.kept import cache_folder
from forerun.jobs.scheduling.job import DataParallelTraining, ScheduledJob, parse_cluster
from forerun.jobs.scheduling.placement import pack
from forerun.jobs.scheduling.policy import JobView, find_policy
from forerun.jobs.scheduling.simulation import simulate
from forerun.jobs.scheduling.speed import DataParallelSpeed, offered_sizes, rate_curve
from forerun.jobs.scheduling.trace import RIGID_POLICIES, RigidJob, simulate_rigid
from forerun.surface.report.figure import drawn, look_of
from studies.markdown import markdown_table
from studies.schedule.applications import read_applications
from studies.schedule.comparison import (
    EVEN_CLUSTER,
    MEASURED,
    OURS,
    SCORED_SEEDS,
    Row,
    compare,
    comparison_section,
)
from studies.schedule.optimus_study import (
    PlacementResult,
    ServerStudyRow,
    placement_study,
    ratios,
    server_study,
)
from studies.schedule.workloads import ForecastError, Workload, draw_workload, read_philly

ERROR_SPREADS = (0.0, 0.1, 0.2, 0.4, 0.7)

_ERRED = ("optimus", "srtf", "pollux", "foresight")
Progress = Callable[[str], None]


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
        compared: Schedules of every policy on five workloads, see ``comparison``.
        errors: Average completion [s] on workloads 0 to 3 by policy, by kind of error ("speed", "work") and by spread.
        servers: Optimus in its own setting, by number of servers (machines).
        placement: Placement by the theorem and by first fit, and parameters on servers.
        scale: Times of large decisions.
    """

    compared: tuple[Row, ...]
    errors: Mapping[str, Mapping[str, Mapping[float, float]]]
    servers: Mapping[int, tuple[ServerStudyRow, ...]]
    placement: PlacementResult
    scale: tuple[ScaleRow, ...]


def schedule_study(folder: Path, say: Progress, quick: bool = False) -> ScheduleResults:
    """Runs all studies; the comparison of policies takes hours on one core, and goes on where it stopped.

    Args:
        folder: Folder of the public tables.
        say: Told what is being done.
        quick: One draw of each workload instead of eight, and of the errors instead of four; two policies.

    Raises:
        RecordError: A table is missing or lacks a column.
    """
    kept = cache_folder() / f"compared-schedules{'-quick' if quick else ''}.jsonl"
    seeds, policies = (SCORED_SEEDS[:1], (OURS, "fifo")) if quick else (SCORED_SEEDS, ())
    compared = compare(folder, kept, say, seeds=seeds, policies=policies)
    say("schedule: forecast errors")
    philly, applications = read_philly(folder), read_applications(folder, {"t4": MEASURED["t4"]})
    drawn = [
        draw_workload(philly, applications, seed, kind="t4", devices_per_node=4)
        for seed in range(1 if quick else 4)
    ]
    errors = {name: _errors(drawn, name) for name in _ERRED}
    say("schedule: parameter servers, placement, large scale")
    servers = {number: tuple(server_study(folder, number, 2 if quick else 8)) for number in (13, 20, 30, 45)}
    return ScheduleResults(
        compared=tuple(compared),
        errors=errors,
        servers=servers,
        placement=placement_study(),
        scale=(*allocation_time(), *trace_time(folder)),
    )


def _errors(workloads: Sequence[Workload], policy: str) -> dict[str, dict[float, float]]:
    """Mean average completion by kind and spread of the error."""
    cluster = parse_cluster(EVEN_CLUSTER)

    def mean(error: ForecastError) -> float:
        found = []
        for load in workloads:
            told = error.told(list(load.actual.values()), load.seed)
            found.append(simulate(told, cluster, find_policy(policy), actual=load.actual).metrics)
        return float(np.mean([one.average_completion_s for one in found]))

    none = {0.0: mean(ForecastError())}
    return {
        "speed": none | {spread: mean(ForecastError(speed=spread)) for spread in ERROR_SPREADS if spread},
        "work": none | {spread: mean(ForecastError(work=spread)) for spread in ERROR_SPREADS if spread},
    }


def allocation_time(num_jobs: int = 4000, num_nodes: int = 25_000) -> list[ScaleRow]:
    """Allocation and placement of all devices of a cluster at the size of Optimus' own test: 100,000 tasks."""
    cluster = parse_cluster(f"{num_nodes}x4xt4")
    # Each would take a seventh more than its share: nothing is left over.
    views = _large_views(num_jobs, cluster.num_devices / num_jobs * 8 / 7)
    rows = []
    for name in ("optimus", "normalised"):
        begin = time.process_time()
        given = find_policy(name).allocate(views, cluster, 0.0)
        middle = time.process_time()
        placed = pack(cluster, {view.job.name: view.job for view in views}, given, {})
        parts = (("allocation", given, middle - begin), ("placement", placed, time.process_time() - middle))
        devices = sum(allocation.num_workers for allocation in given.values())
        rows += [
            ScaleRow(what=f"{name}: {part}", num_jobs=len(found), num_tasks=devices, processor_s=spent_s)
            for part, found, spent_s in parts
        ]
    return rows


def _large_views(num_jobs: int, best: float) -> list[JobView]:
    """Jobs whose time is shortest on about so many devices."""
    chance = np.random.default_rng(0)
    views = []
    for number in range(num_jobs):
        unit = float(chance.uniform(0.5, 2.0))
        # d/dn of t / n + s n is zero at n = sqrt(t / s).
        speed = DataParallelSpeed(
            gradient_s=0.1, gradient_per_sample_s=unit / 1024, node_sync_per_device_s=unit / best**2
        )
        work = float(chance.uniform(1e5, 1e6))
        training = DataParallelTraining(speeds={"t4": speed}, batch_size=1024)
        job = ScheduledJob(name=f"job-{number}", training=training, work_samples=work)
        curve = rate_curve(speed, None, (1024, 1024), 4, offered_sizes(4, 4 * int(best)), 0.0)
        views.append(JobView(job=job, order=number, remaining_samples=work, curves={"t4": curve}))
    return views


def trace_time(folder: Path) -> list[ScaleRow]:
    """A hundred thousand jobs of the Philly trace, drawn with replacement, under FIFO, SRTF and LAS."""
    philly = read_philly(folder)
    chance = np.random.default_rng(0)
    num_jobs, num_devices = 100_000, 2048
    rows = philly.iloc[chance.integers(len(philly), size=num_jobs)].to_dict("records")
    jobs = [
        RigidJob(f"job-{i}", row["time_s"], row["n_gpus"], row["duration_s"]) for i, row in enumerate(rows)
    ]
    found = []
    for policy in RIGID_POLICIES:
        begin = time.process_time()
        simulate_rigid(jobs, num_devices, policy)
        spent_s = time.process_time() - begin
        found.append(
            ScaleRow(what=f"trace under {policy}", num_jobs=num_jobs, num_tasks=num_jobs, processor_s=spent_s)
        )
    return found


def error_plot(path: Path, errors: Mapping[str, Mapping[str, Mapping[float, float]]]) -> None:
    """Average completion against the spread of the error, speed and remaining work side by side.

    Args:
        path: File to write.
        errors: Average completion [s] by policy, kind of error and spread.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    kinds = list(next(iter(errors.values())))
    with drawn(path, width_in=4.2 * len(kinds), height_in=3.8) as figure:
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for axes, kind in zip(panels, kinds, strict=True):
            for index, (policy, by_kind) in enumerate(errors.items()):
                hours = [time_s / 3600 for time_s in by_kind[kind].values()]
                axes.plot(list(by_kind[kind]), hours, label=policy, **look_of(index))
            axes.set_xlabel(f"spread of the error on {kind} (lognormal)")
            axes.set_ylim(bottom=0)
            axes.grid(visible=True, alpha=0.3)
        panels[0].set_ylabel("average completion [h]")
        panels[-1].legend(loc="upper right", fontsize="small")
        figure.suptitle("What forecast errors cost")


_PUBLISHED_RATIOS = {"optimus": "1 / 1", "tetris": "1.33 / 1.14", "drf": "1.62 / 1.31"}


def schedule_section(found: ScheduleResults) -> str:
    """Markdown of the section."""
    return "\n".join(
        [
            "## Scheduling\n",
            comparison_section(found.compared),
            _error_table(found),
            _servers(found),
            _placement(found),
            _scale(found),
        ]
    )


def _error_table(found: ScheduleResults) -> str:
    lines = [
        (policy, kind, *(f"{by_spread[spread] / 3600:.2f}" for spread in ERROR_SPREADS))
        for policy, kinds in found.errors.items()
        for kind, by_spread in kinds.items()
    ]
    return (
        "### What forecast errors cost\n\nAverage completion in hours; the truth times lognormal factors.\n\n"
        + markdown_table(("policy", "error on", *(f"{spread:g}" for spread in ERROR_SPREADS)), lines)
        + "\n![average completion against the spread of the error](methods/schedule-errors.png)\n"
    )


def _servers(found: ScheduleResults) -> str:
    lines = []
    for number in (min(found.servers), max(found.servers)):
        rows = found.servers[number]
        relative = ratios(rows)
        lines += [
            (
                str(number),
                row.policy,
                f"{row.average_completion_s:,.0f}",
                f"{row.makespan_s:,.0f}",
                f"{relative[row.policy][0]:.2f} / {relative[row.policy][1]:.2f}",
                _PUBLISHED_RATIOS.get(row.policy, "") if number == min(found.servers) else "",
            )
            for row in rows
        ]
    return (
        "### Optimus in its own setting\n\nParameter servers, measured speeds, 60 jobs.\n\n"
        + markdown_table(
            (
                "nodes",
                "policy",
                "average s",
                "makespan s",
                "average / makespan relative to optimus",
                "published",
            ),
            lines,
        )
    )


def _placement(found: ScheduleResults) -> str:
    result = found.placement
    lines = [
        (name, f"{1e3 * seconds:.0f}", f"{result.nodes[name]:.1f}")
        for name, seconds in result.transfer_s.items()
    ]
    blocks = [
        (name, f"{b.size_gap / 1e6:.2f} M", str(b.request_gap), str(b.num_requests))
        for name, b in result.blocks.items()
    ]
    return (
        "### Placement and parameter blocks\n\n102 MB over 1 Gbit/s:\n\n"
        + markdown_table(("placement", "transfer ms", "nodes a job"), lines)
        + "\nResNet-50 on ten servers:\n\n"
        + markdown_table(("assignment", "size gap", "request gap", "requests"), blocks)
    )


def _scale(found: ScheduleResults) -> str:
    lines = [
        (row.what, f"{row.num_jobs:,}", f"{row.num_tasks:,}", f"{row.processor_s:.1f}") for row in found.scale
    ]
    return "### Large scale\n\nOne core.\n\n" + markdown_table(
        ("decision", "jobs", "tasks", "processor s"), lines
    )
