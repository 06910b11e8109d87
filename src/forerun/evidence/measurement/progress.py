"""Events and counts of a running session, and the time it still takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.records.measurement import Measurement, Outcome

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
    "Tally",
    "remaining_time_s",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReport:
    """Report on a session.

    Attributes:
        outcomes: Number of jobs by outcome.
        num_skipped: Number of jobs that the store already had.
        num_unstable: Number of done jobs with unstable times, or between two anchors that differ.
        num_lost: Number of jobs without a measurement because their node was lost again and again; only with Ray.
        null_step_s: Time of a step that does nothing; None if it could not be measured [s].
        is_interrupted: True if the user ended the session; the finished measurements are in the store.
    """

    outcomes: Mapping[Outcome, int] = field(default_factory=dict)
    num_skipped: int = 0
    num_unstable: int = 0
    num_lost: int = 0
    null_step_s: float | None = None
    is_interrupted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStarted:
    """The session holds its device and knows the jobs left to do.

    Attributes:
        num_jobs: Number of jobs to run.
        num_skipped: Number of jobs that the store already has.
    """

    num_jobs: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStarted:
    """A job begins.

    Attributes:
        job: The job that begins.
        index: Place of the job among the jobs to run, from 0.
        num_jobs: Number of jobs to run.
        remaining_time_s: Time from now to the end of the session; None if not known yet [s].
    """

    job: MeasurementJob
    index: int
    num_jobs: int
    remaining_time_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgressed:
    """A running job has done this fraction of its work, 0 to 1."""

    job: MeasurementJob
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished:
    """A job has ended and is in the store.

    Attributes:
        job: The job that has ended.
        index: Place of the job among the jobs to run, from 0.
        num_jobs: Number of jobs to run.
        measurement: Measurement in the store.
        remaining_time_s: Time from now to the end of the session; None if not known yet [s].
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
        measurement: Measurement of the anchor in the store.
        drift: Relative change since the anchor before; None for the first anchor, or if one of the two failed.
    """

    measurement: Measurement
    drift: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionFinished:
    """The session has ended, for any reason."""

    report: SessionReport


Event = SessionStarted | JobStarted | JobProgressed | JobFinished | JobLost | AnchorMeasured | SessionFinished
"""Events with which ``on_event`` of a session is called."""


@dataclass(slots=True)
class Tally:
    """Counts of a running session, on one device or on a cluster; its report repeats them.

    Attributes:
        tell: Called with each event.
        outcomes: Number of jobs by outcome.
        unstable: Keys of the jobs whose times are not stable.
        num_lost: Number of jobs without a measurement.
        null_step_s: Time of a step that does nothing; None if it is not known [s].
    """

    tell: Callable[[Event], None]
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    unstable: set[str] = field(default_factory=set)
    num_lost: int = 0
    null_step_s: float | None = None

    def count(self, measurement: Measurement) -> None:
        """Counts a job that has ended."""
        self.outcomes[measurement.outcome] += 1
        if measurement.summary is not None and not measurement.summary.is_stable:
            self.unstable.add(measurement.key)

    def session(self, work: Callable[[], None], *, num_jobs: int, num_skipped: int) -> SessionReport:
        """Does the work between the first and the last event, which comes however the work ends."""
        self.tell(SessionStarted(num_jobs=num_jobs, num_skipped=num_skipped))
        is_interrupted = False
        try:
            work()
        except KeyboardInterrupt:
            is_interrupted = True
            raise
        finally:
            report = SessionReport(
                outcomes=dict(self.outcomes),
                num_skipped=num_skipped,
                num_unstable=len(self.unstable),
                num_lost=self.num_lost,
                null_step_s=self.null_step_s,
                is_interrupted=is_interrupted,
            )
            self.tell(SessionFinished(report=report))
        return report


def remaining_time_s(
    finished: Iterable[tuple[float, float]], expected_left_s: Iterable[float]
) -> float | None:
    """Time that the remaining jobs will take [s].

    remaining = sum of their expected times * r, with r = sum of the real / sum of the expected times of the
    finished jobs; r = 1 before the first one. If every expected time is 1, r is the mean time of a job.

    Args:
        finished: Expected and real time of each finished job [s].
        expected_left_s: Expected time of each remaining job [s]; finite, not negative.

    Returns:
        The time, or None if no job with an expected time has finished and no remaining job has one.
    """
    pairs = list(finished)
    expected_s, real_s = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    left_s = sum(expected_left_s)
    if expected_s > 0:
        return left_s * real_s / expected_s
    return left_s if left_s > 0 else None
