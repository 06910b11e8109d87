"""Runs many jobs on one device, one after the other, and writes each measurement as it comes.

Any end of a session (Ctrl-C, kill -9, a full disk) loses at most the running job: a second session with
the same occasion skips finished jobs and runs the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol as Interface

from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import DEFAULT_RUN, NULL_JOB, key_of, measure_job
from forerun.evidence.records.measurement import ANCHOR_FAMILY, Circumstances, JobKind, Measurement, Outcome
from forerun.question.devices.local import lock_device

ANCHOR_JOB = MeasurementJob(
    kind=JobKind.STEP,
    subject="cnn:depth=2,base_filters=32",
    family=ANCHOR_FAMILY,
    parameters={"batch_size": 32, "image_size": 32, "precision": "fp32", "optimizer": "adam"},
)
"""A fixed small step, measured again and again to detect changes of the machine itself."""


class MeasurementSink(Interface):
    """Target of measurements; the record store is one."""

    def add(self, measurement: Measurement, /) -> bool:
        """Writes one measurement durably; False if its key was done already."""
        ...

    def done_keys(self, keys: Iterable[str], /) -> set[str]:
        """The keys among these whose jobs are done."""
        ...

    def mark_unstable(self, keys: Iterable[str], reason: str, /) -> object:
        """Adds a reason to the summaries of these measurements and marks them unstable."""
        ...


def run_jobs(
    jobs: Iterable[MeasurementJob],
    store: MeasurementSink,
    *,
    device_index: str = "cpu",
    protocol: Protocol | None = None,
    occasion: str = "",
    circumstances: Circumstances | None = None,
    on_event: Callable[[Event], None] | None = None,
    expected_s: Callable[[MeasurementJob], float] | None = None,
    anchor: MeasurementJob | None = ANCHOR_JOB,
    run: str = DEFAULT_RUN,
) -> SessionReport:
    """Measures the jobs that the store does not have yet.

    The device is locked for the whole session. First the null step is measured, which is the overhead in every
    repetition; before the first job, after every ``anchor_every`` jobs and at the end comes the anchor (A-B-A). If
    two neighbouring anchors differ by more than ``anchor_tolerance``, the jobs between are marked unstable.

    Args:
        jobs: Jobs to measure; equal jobs count once.
        store: Store of the measurements.
        device_index: Device of the jobs, ``cpu`` or ``cuda:N``.
        protocol: Settings of the measurements; None for the defaults.
        occasion: Label of the session; the same label resumes it.
        circumstances: Machine and software; None looks them up. The arguments for occasion and device win over it.
        on_event: Called with each event, in the caller's thread.
        expected_s: Time a job is expected to take, for the remaining time [s].
        anchor: Fixed job that is measured again and again; None for no anchors.
        run: Function that runs a job, as ``module:function``.

    Raises:
        DeviceBusyError: Another process measures on the device.
        KeyboardInterrupt: The user ended the session; ``SessionFinished`` was sent, and the finished measurements are
            in the store.
    """
    protocol = protocol or Protocol()
    circumstances = circumstances or describe_circumstances(device_index, protocol=protocol)
    circumstances = replace(circumstances, device_index=device_index, occasion=occasion)
    tell = on_event or (lambda _: None)
    session = _Session(
        store=store,
        protocol=protocol,
        circumstances=circumstances,
        tell=tell,
        expected_s=expected_s,
        anchor=anchor if protocol.anchor_every else None,
        runner=run,
        tally=Tally(tell),
    )
    # Two measurements at once on one device would each report the other's time as its own.
    with lock_device(device_index):
        return session.run(jobs)


@dataclass(slots=True, kw_only=True)
class _Session:
    """A session on one device, and how far it is."""

    store: MeasurementSink
    protocol: Protocol
    circumstances: Circumstances
    tell: Callable[[Event], None]
    expected_s: Callable[[MeasurementJob], float] | None
    anchor: MeasurementJob | None
    runner: str
    tally: Tally
    anchor_s: float | None = None
    since_anchor: list[str] = field(default_factory=list)

    def run(self, jobs: Iterable[MeasurementJob]) -> SessionReport:
        wanted = {key_of(job, self.circumstances): job for job in jobs}
        done = self.store.done_keys(list(wanted))
        left = [job for key, job in wanted.items() if key not in done]
        return self.tally.session(
            lambda: self._measure_all(left), num_jobs=len(left), num_skipped=len(wanted) - len(left)
        )

    def _measure_all(self, jobs: Sequence[MeasurementJob]) -> None:
        if not jobs:
            return
        # The overhead of a repetition comes first: every record of the session names it.
        self._measure_null_step()
        self._measure_anchor()
        # Without expected times all jobs count equally: each remaining one takes the mean time of the jobs so far.
        expected_s = [1.0 if self.expected_s is None else self.expected_s(job) for job in jobs]
        finished: list[tuple[float, float]] = []
        for index, job in enumerate(jobs):
            left_s = self._remaining_s(finished, expected_s[index:])
            self.tell(JobStarted(job=job, index=index, num_jobs=len(jobs), remaining_time_s=left_s))
            began_s = time.monotonic()
            measurement = self._measure_and_add(job)
            self.tally.count(measurement)
            self.since_anchor.append(measurement.key)
            if len(self.since_anchor) == self.protocol.anchor_every:
                self._measure_anchor()
            finished.append((expected_s[index], time.monotonic() - began_s))
            left_s = self._remaining_s(finished, expected_s[index + 1 :])
            self.tell(
                JobFinished(
                    job=job, index=index, num_jobs=len(jobs), measurement=measurement, remaining_time_s=left_s
                )
            )
        if self.since_anchor:
            self._measure_anchor()

    def _remaining_s(
        self, finished: Sequence[tuple[float, float]], expected_left_s: Sequence[float]
    ) -> float | None:
        if not finished and self.expected_s is None:
            return None
        return remaining_time_s(finished, expected_left_s)

    def _measured(
        self, job: MeasurementJob, on_progress: Callable[[float], None] | None = None
    ) -> Measurement:
        return measure_job(
            job,
            protocol=self.protocol,
            circumstances=self.circumstances,
            null_step_s=self.tally.null_step_s,
            on_progress=on_progress,
            run=self.runner,
        )

    def _measure_and_add(self, job: MeasurementJob) -> Measurement:
        measurement = self._measured(
            job, lambda fraction: self.tell(JobProgressed(job=job, fraction=fraction))
        )
        self.store.add(measurement)
        return measurement

    def _measure_null_step(self) -> None:
        measurement = self._measure_and_add(NULL_JOB)
        if measurement.summary is not None:
            self.tally.null_step_s = measurement.summary.median_s

    def _measure_anchor(self) -> None:
        """Measures the anchor, and marks the jobs since the last anchor if the two differ."""
        if self.anchor is None:
            return
        since, self.since_anchor = self.since_anchor, []
        before_s = self.anchor_s
        measurement = self._anchor_measurement(before_s)
        self.anchor_s = median(measurement.repetitions_s) if measurement.repetitions_s else None
        drift = measurement.results.get("anchor_drift")
        assert drift is None or isinstance(drift, float)
        if drift is not None and since and abs(drift) > self.protocol.anchor_tolerance:
            self.store.mark_unstable(since, f"the anchor changed by {drift:+.1%} meanwhile")
            self.tally.unstable.update(since)
        self.tell(AnchorMeasured(measurement=measurement, drift=drift))

    def _anchor_measurement(self, before_s: float | None) -> Measurement:
        """Measures the anchor now and writes it with its change since ``before_s``."""
        assert self.anchor is not None
        # The time is a parameter, so that each measurement of the anchor has its own key.
        asked = {**self.anchor.parameters, "anchor_at_s": time.time()}
        measurement = self._measured(self.anchor)
        own_key = key_of(replace(self.anchor, parameters=asked), self.circumstances)
        results = dict(measurement.results)
        if before_s and measurement.repetitions_s:
            results["anchor_drift"] = median(measurement.repetitions_s) / before_s - 1
        measurement = replace(measurement, key=own_key, parameters=asked, results=results)
        self.store.add(measurement)
        return measurement


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
class _JobEvent:
    """Beginning or end of a job.

    Attributes:
        job: The job.
        index: Place of the job among the jobs to run, from 0.
        num_jobs: Number of jobs to run.
        remaining_time_s: Time from now to the end of the session; None if not known yet [s].
    """

    job: MeasurementJob
    index: int
    num_jobs: int
    remaining_time_s: float | None


class JobStarted(_JobEvent):
    """A job begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished(_JobEvent):
    """A job has ended and is in the store.

    Attributes:
        measurement: Measurement in the store.
    """

    measurement: Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgressed:
    """A running job has done this fraction of its work, 0 to 1."""

    job: MeasurementJob
    fraction: float


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
