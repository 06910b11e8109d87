"""Record of a simulated schedule: events, stretches on devices, the outcome of each job, and the figures of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan

import numpy as np

from forerun.base.answers import Answer
from forerun.jobs.scheduling.job import Allocation
from forerun.jobs.scheduling.placement import Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision of a policy about one job, with its reason.

    Attributes:
        job: Name of the job.
        allocation: What it got; None: it waits.
        placement: Where.
        batch_size: Global batch chosen for it; None while it waits.
        reason: Why, in a few words.
    """

    job: str
    allocation: Allocation | None
    placement: Placement
    batch_size: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a job kept what it had.

    Attributes:
        job: Name of the job.
        start_s, end_s: From when to when [s].
        allocation: What it had.
        placement: Where.
    """

    job: str
    start_s: float
    end_s: float
    allocation: Allocation
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """Result of one job.

    Attributes:
        job: Its name.
        arrival_s, start_s, end_s: When it came, first ran and was done [s].
        device_s: Devices times time it had [s].
        num_restarts: Starts and changes of what it had, without the first start.
        fair_share_s: Completion with its own 1/n of the cluster [s]; NaN where not known.
        deadline_s: Its deadline [s], infinite without one.
    """

    job: str
    arrival_s: float
    start_s: float
    end_s: float
    device_s: float
    num_restarts: int
    fair_share_s: float = nan
    deadline_s: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSchedule:
    """The outcome of one policy on one set of jobs.

    Attributes:
        policy: Name of the policy.
        outcomes: By job, in the order of arrival.
        stretches: Who was where, by time; for a picture.
        first_decisions: What each job that was there at the first decision got, and why.
        metrics: The figures.
    """

    policy: str
    outcomes: tuple[JobOutcome, ...]
    stretches: tuple[Stretch, ...]
    first_decisions: tuple[Decision, ...]
    metrics: ScheduleMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleMetrics(Answer):
    """Figures of one schedule; completion is from arrival to end.

    Attributes:
        num_jobs: Jobs.
        average_completion_s, median_completion_s, p95_completion_s, p99_completion_s: Of the jobs' completion times
            [s].
        makespan_s: From the first arrival to the last end [s].
        device_hours: Hours of devices held, restarts included [h].
        average_fairness, worst_fairness: Finish-time fairness rho: completion over the completion with an own 1/n of
            the cluster, n the jobs there on average during its life; 1 is fair, less is better. NaN if not known.
        restarts_per_job: Times that what a running or stopped job has was changed; the first start is none.
        utilisation: Devices held over devices there are, from the first arrival to the last end.
        deadlines_met: Share of the deadlines that were met; NaN without deadlines.
        scheduler_ms: Mean processor time of a decision, curves of speed and nodes included [ms].
    """

    num_jobs: int
    average_completion_s: float
    median_completion_s: float
    p95_completion_s: float
    p99_completion_s: float
    makespan_s: float
    device_hours: float
    average_fairness: float
    worst_fairness: float
    restarts_per_job: float
    utilisation: float
    deadlines_met: float
    scheduler_ms: float


def schedule_metrics(
    outcomes: Sequence[JobOutcome], num_devices: int, decision_s: Sequence[float] = ()
) -> ScheduleMetrics:
    """The figures of jobs that have all ended.

    Args:
        outcomes: The jobs, at least one.
        num_devices: Devices of the cluster.
        decision_s: Processor time of each decision [s].
    """
    rows = [
        (o.arrival_s, o.end_s, o.device_s, o.num_restarts, o.fair_share_s, o.deadline_s) for o in outcomes
    ]
    arrival, end, device_s, restarts, fair_share, deadlines = np.asarray(rows, dtype=float).T
    completion = end - arrival
    fairness = completion / fair_share
    known = fairness[np.isfinite(fairness)]
    due = np.isfinite(deadlines)
    makespan = float(end.max() - arrival.min())
    held = float(device_s.sum())
    return ScheduleMetrics(
        num_jobs=len(outcomes),
        average_completion_s=float(completion.mean()),
        median_completion_s=float(np.median(completion)),
        p95_completion_s=float(np.quantile(completion, 0.95)),
        p99_completion_s=float(np.quantile(completion, 0.99)),
        makespan_s=makespan,
        device_hours=held / 3600.0,
        average_fairness=float(known.mean()) if known.size else nan,
        worst_fairness=float(known.max()) if known.size else nan,
        restarts_per_job=float(restarts.mean()),
        utilisation=held / (num_devices * makespan) if makespan > 0 else 0.0,
        deadlines_met=float((end[due] <= deadlines[due]).mean()) if due.any() else nan,
        scheduler_ms=1e3 * float(np.mean(decision_s)) if len(decision_s) else 0.0,
    )
