"""What a session tells while it runs, and how long it still takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from forerun.measurement.jobs import MeasurementJob
from forerun.records.measurement import Measurement, Outcome

__all__ = [
    "AnchorMeasured",
    "Event",
    "JobFinished",
    "JobLost",
    "JobProgressed",
    "JobStarted",
    "SessionFinished",
    "SessionReport",
    "SessionStarted",
    "remaining_time_s",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """What a session did.

    Attributes:
        outcomes: How many jobs ended how.
        num_skipped: Jobs that the store already had.
        num_unstable: Jobs done whose times were not stable, or between two anchors that differ.
        num_lost: Jobs without a measurement because their node was lost again and again; only with Ray.
        null_step_s: Time of a step that does nothing; None if it could not be measured [s].
        is_interrupted: Whether the user ended the session; what was measured is in the store.
    """

    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    num_skipped: int = 0
    num_unstable: int = 0
    num_lost: int = 0
    null_step_s: float | None = None
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted:
    """The session holds its device and knows what is left to do.

    Attributes:
        num_jobs: Jobs to run.
        num_skipped: Jobs that the store already has.
    """

    num_jobs: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """A job begins.

    Attributes:
        job: Which.
        index: Its place among the jobs to run, from 0.
        num_jobs: Jobs to run.
        remaining_time_s: From now to the end of the session; None if nothing is known yet [s].
    """

    job: MeasurementJob
    index: int
    num_jobs: int
    remaining_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgressed:
    """A running job tells how far it is, 0 to 1."""

    job: MeasurementJob
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """A job has ended and is in the store.

    Attributes:
        job: Which.
        index: Its place among the jobs to run, from 0.
        num_jobs: Jobs to run.
        measurement: What was written.
        remaining_time_s: From now to the end of the session; None if nothing is known yet [s].
    """

    job: MeasurementJob
    index: int
    num_jobs: int
    measurement: Measurement
    remaining_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLost:
    """A job has no measurement because the node that ran it was lost too often."""

    job: MeasurementJob
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorMeasured:
    """The fixed small job was measured again.

    Attributes:
        measurement: What was written.
        drift: Relative change since the anchor before; None for the first, or if either failed.
    """

    measurement: Measurement
    drift: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished:
    """The session has ended, well or not."""

    report: SessionReport


Event = SessionStarted | JobStarted | JobProgressed | JobFinished | JobLost | AnchorMeasured | SessionFinished
"""What ``on_event`` of a session is called with."""


def remaining_time_s(
    finished: Iterable[tuple[float, float]], expected_left_s: Iterable[float]
) -> float | None:
    """Time that the jobs which are left will take [s].

    remaining = sum of what is expected of them * r, with r = sum of the real / sum of the expected times
    of the jobs that have finished; r = 1 before the first. With 1 expected of every job, r is the mean time of a job.

    Args:
        finished: Expected and real time of each finished job [s].
        expected_left_s: Expected time of each job that is left [s]; finite, not negative.

    Returns:
        None if nothing that was expected has finished and nothing was expected of the jobs that are left.
    """
    pairs = list(finished)
    expected_s, real_s = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    left_s = sum(expected_left_s)
    if expected_s > 0:
        return left_s * real_s / expected_s
    return left_s if left_s > 0 else None
