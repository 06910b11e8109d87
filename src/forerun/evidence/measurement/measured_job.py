"""One job from its description to its measurement: child, sensors, summary, circumstances."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from forerun.evidence.measurement.child import DEFAULT_RUN, ChildReport, run_in_child
from forerun.evidence.measurement.circumstances import at_job_start
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult, job_key
from forerun.evidence.measurement.summary import summarise
from forerun.evidence.measurement.telemetry import record_telemetry
from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Scalar

__all__ = ["NULL_JOB", "as_measurement", "job_of", "key_of", "measure_job", "timed_training"]

NULL_JOB = MeasurementJob(kind=JobKind.NULL, subject="null", family="null")
"""A step that does nothing; its time is the overhead in every repetition of another step."""


def job_of(measurement: Measurement) -> MeasurementJob:
    """The job of a measurement."""
    return MeasurementJob(
        kind=measurement.kind,
        subject=measurement.subject,
        family=measurement.family,
        parameters=measurement.parameters,
    )


def key_of(job: MeasurementJob, circumstances: Circumstances) -> str:
    """Identity of a job under these circumstances.

    Every processor is called ``cpu``; name, cores and threads distinguish processors. The host is not part of
    the key: equal machines may share the jobs of one occasion.
    """
    device = circumstances.device
    if device == "cpu":
        device = (
            f"cpu {circumstances.device_title}, {circumstances.num_cores} cores, "
            f"{circumstances.num_threads} threads"
        )
    return job_key(
        job,
        device=device,
        framework_version=circumstances.framework_version,
        occasion=circumstances.occasion,
    )


def measure_job(
    job: MeasurementJob,
    *,
    protocol: Protocol,
    circumstances: Circumstances,
    null_step_s: float | None = None,
    on_progress: Callable[[float], None] | None = None,
    run: str = DEFAULT_RUN,
) -> Measurement:
    """Runs a job in a child process on ``circumstances.device_index`` and returns its measurement, good or bad.

    Args:
        job: Job to run.
        protocol: Settings of the measurement.
        circumstances: Circumstances of the whole session.
        null_step_s: Time of a step that does nothing, written into the results; None if not known [s].
        on_progress: Called with the done fraction of the job.
        run: Function that runs the job, as ``module:function``.
    """
    # The key and the record must hold the number of threads the child really has.
    protocol = replace(protocol, num_threads=circumstances.num_threads)
    began = at_job_start(circumstances)
    with record_telemetry(circumstances.device_index, protocol.telemetry_every_s) as recorder:
        report = run_in_child(job, circumstances.device_index, protocol, on_progress, run=run)
    measurement = as_measurement(job, report, protocol, replace(began, telemetry=recorder.figures))
    if null_step_s is None:
        return measurement
    return replace(measurement, results={**measurement.results, "null_step_s": null_step_s})


def as_measurement(
    job: MeasurementJob, report: ChildReport, protocol: Protocol, circumstances: Circumstances
) -> Measurement:
    """The measurement from a child's report."""
    result = report.result
    return Measurement(
        key=key_of(job, circumstances),
        kind=job.kind,
        subject=job.subject,
        family=job.family,
        parameters=job.parameters,
        outcome=report.outcome,
        reason=report.reason,
        circumstances=circumstances,
        repetitions_s=result.repetitions_s if result else (),
        warm_up_s=result.warm_up_s if result else (),
        summary=summarise(result, protocol) if result else None,
        results=dict(result.results) if result else {},
    )


def timed_training(
    step_times_s: Sequence[float],
    warm_up_s: Sequence[float],
    *,
    subject: str,
    family: str | None,
    parameters: Mapping[str, Scalar],
    results: Mapping[str, Scalar],
    around: Circumstances,
) -> Measurement:
    """A measurement of a finished training.

    Args:
        step_times_s: Times of its steady steps [s].
        warm_up_s: Times of first steps, which are kept apart [s].
        subject: Model as ``forerun.predict`` names it.
        family: Group that must not be split between fit and test; None for the subject.
        parameters: Settings of the training.
        results: Its figures.
        around: Machine and software; without an occasion, the start of the training is one.
    """
    result = RunResult(repetitions_s=tuple(step_times_s), warm_up_s=tuple(warm_up_s), results=dict(results))
    job = MeasurementJob(
        kind=JobKind.TRAINING, subject=subject, family=family or subject, parameters=dict(parameters)
    )
    begun = hashlib.sha256(around.started_at.encode()).hexdigest()[:8]
    around = replace(around, occasion=around.occasion or f"fit {begun}")
    return Measurement(
        key=key_of(job, around),
        kind=job.kind,
        subject=job.subject,
        family=job.family,
        parameters=job.parameters,
        outcome=Outcome.DONE,
        circumstances=around,
        repetitions_s=result.repetitions_s,
        warm_up_s=result.warm_up_s,
        summary=summarise(result, Protocol()),
        results=result.results,
    )
