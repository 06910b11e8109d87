"""Runs many jobs on one device, one after the other, and writes each measurement as it comes.

Any end of a session (Ctrl-C, kill -9, a full disk) loses at most the running job: a second session with
the same occasion skips finished jobs and runs the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Protocol as Interface

from forerun.evidence.measurement.child import DEFAULT_RUN
from forerun.evidence.measurement.circumstances import describe_circumstances
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.measured_job import NULL_JOB, key_of, measure_job
from forerun.evidence.measurement.progress import (
    AnchorMeasured,
    Event,
    JobFinished,
    JobProgressed,
    JobStarted,
    SessionReport,
    Tally,
    remaining_time_s,
)
from forerun.evidence.records.measurement import ANCHOR_FAMILY, Circumstances, JobKind, Measurement
from forerun.question.devices.local import lock_device

__all__ = ["ANCHOR_JOB", "MeasurementSink", "run_jobs"]

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
    is_time_up: Callable[[], bool] | None = None,
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
        is_time_up: Called before each job; True ends the session and leaves the other jobs to a later one.
        run: Function that runs a job, as ``module:function``.

    Raises:
        DeviceBusyError: Another process measures on the device.
        KeyboardInterrupt: The user ended the session; ``SessionFinished`` was sent, and the finished measurements are
            in the store.
    """
    protocol = protocol or Protocol()
    circumstances = circumstances or describe_circumstances(device_index, protocol=protocol)
    circumstances = replace(circumstances, device_index=device_index, occasion=occasion)
    session = _Session(
        store, protocol, circumstances, on_event or _ignore, expected_s, anchor, is_time_up or _never, run
    )
    with lock_device(device_index):
        return session.run(jobs)


def _ignore(_: Event) -> None:
    """Ignores an event."""


def _never() -> bool:
    """False, because there is time for every job."""
    return False


class _Session:
    def __init__(
        self,
        store: MeasurementSink,
        protocol: Protocol,
        circumstances: Circumstances,
        tell: Callable[[Event], None],
        expected_s: Callable[[MeasurementJob], float] | None,
        anchor: MeasurementJob | None,
        is_time_up: Callable[[], bool],
        run: str,
    ) -> None:
        self._store = store
        self._protocol = protocol
        self._circumstances = circumstances
        self._tell = tell
        # Without expected times all jobs count equally: each remaining one takes the mean time of the jobs so far.
        self._expected_s = expected_s or (lambda _: 1.0)
        self._knows_times = expected_s is not None
        self._anchor = anchor if protocol.anchor_every else None
        self._is_time_up = is_time_up
        self._run = run
        self._anchor_s: float | None = None
        self._since_anchor: list[str] = []
        self._tally = Tally(tell)

    def run(self, jobs: Iterable[MeasurementJob]) -> SessionReport:
        wanted = {key_of(job, self._circumstances): job for job in jobs}
        done = self._store.done_keys(list(wanted))
        left = [job for key, job in wanted.items() if key not in done]
        return self._tally.session(
            lambda: self._measure_all(left), num_jobs=len(left), num_skipped=len(wanted) - len(left)
        )

    def _measure_all(self, jobs: Sequence[MeasurementJob]) -> None:
        if not jobs:
            return
        # The overhead of a repetition comes first: every record of the session names it.
        self._measure_null_step()
        self._measure_anchor()
        expected_s = [self._expected_s(job) for job in jobs]
        finished: list[tuple[float, float]] = []
        for index, job in enumerate(jobs):
            if self._is_time_up():
                break
            left_s = self._remaining_s(finished, expected_s[index:])
            self._tell(JobStarted(job=job, index=index, num_jobs=len(jobs), remaining_time_s=left_s))
            began_s = time.monotonic()
            measurement = self._measure_and_add(job)
            self._tally.count(measurement)
            self._since_anchor.append(measurement.key)
            if len(self._since_anchor) == self._protocol.anchor_every:
                self._measure_anchor()
            finished.append((expected_s[index], time.monotonic() - began_s))
            left_s = self._remaining_s(finished, expected_s[index + 1 :])
            self._tell(
                JobFinished(
                    job=job, index=index, num_jobs=len(jobs), measurement=measurement, remaining_time_s=left_s
                )
            )
        if self._since_anchor:
            self._measure_anchor()

    def _remaining_s(
        self, finished: Sequence[tuple[float, float]], expected_left_s: Sequence[float]
    ) -> float | None:
        if not finished and not self._knows_times:
            return None
        return remaining_time_s(finished, expected_left_s)

    def _measure_and_add(self, job: MeasurementJob) -> Measurement:
        measurement = measure_job(
            job,
            protocol=self._protocol,
            circumstances=self._circumstances,
            null_step_s=self._tally.null_step_s,
            on_progress=lambda fraction: self._tell(JobProgressed(job=job, fraction=fraction)),
            run=self._run,
        )
        self._store.add(measurement)
        return measurement

    def _measure_null_step(self) -> None:
        measurement = self._measure_and_add(NULL_JOB)
        if measurement.summary is not None:
            self._tally.null_step_s = measurement.summary.median_s

    def _measure_anchor(self) -> None:
        """Measures the anchor, and marks the jobs since the last anchor if the two differ."""
        if self._anchor is None:
            return
        since, self._since_anchor = self._since_anchor, []
        before_s = self._anchor_s
        measurement = self._anchor_measurement(before_s)
        self._anchor_s = median(measurement.repetitions_s) if measurement.repetitions_s else None
        drift = measurement.results.get("anchor_drift")
        assert drift is None or isinstance(drift, float)
        if drift is not None and since and abs(drift) > self._protocol.anchor_tolerance:
            self._store.mark_unstable(since, f"the anchor changed by {drift:+.1%} meanwhile")
            self._tally.unstable.update(since)
        self._tell(AnchorMeasured(measurement=measurement, drift=drift))

    def _anchor_measurement(self, before_s: float | None) -> Measurement:
        """Measures the anchor now and writes it with its change since ``before_s``."""
        assert self._anchor is not None
        # The time is a parameter, so that each measurement of the anchor has its own key.
        asked = {**self._anchor.parameters, "anchor_at_s": time.time()}
        measurement = measure_job(
            self._anchor,
            protocol=self._protocol,
            circumstances=self._circumstances,
            null_step_s=self._tally.null_step_s,
            run=self._run,
        )
        own_key = key_of(replace(self._anchor, parameters=asked), self._circumstances)
        results = dict(measurement.results)
        if before_s and measurement.repetitions_s:
            results["anchor_drift"] = median(measurement.repetitions_s) / before_s - 1
        measurement = replace(measurement, key=own_key, parameters=asked, results=results)
        self._store.add(measurement)
        return measurement
