"""One job from its description to its measurement: child, sensors, summary, circumstances.

The job runs in a fresh process, so that it can affect neither the session nor the next job.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.base.errors import ForerunError, MeasurementError
from forerun.base.extras import loaded
from forerun.base.isolation import Child, EndedError, LateError, fork_server, tell
from forerun.evidence.measurement.circumstances import at_job_start, num_threads_of, preloaded_by
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult, job_key
from forerun.evidence.measurement.runners.timing import summarise
from forerun.evidence.measurement.telemetry import record_telemetry
from forerun.evidence.records.measurement import Circumstances, JobKind, Measurement, Outcome, Scalar

DEFAULT_RUN = "forerun.evidence.measurement.runners.table:run_job"
"""Function that runs a job, ``(job, device_index, protocol) -> RunResult``, as ``module:function``."""

_PRELOADED = (
    "torch._dynamo",
    "torchvision.models",
    "forerun.evidence.measurement.runners.data_parallel_runner",
    "forerun.evidence.measurement.layer_modules",
    "forerun.evidence.measurement.runners.step_runner",
    "forerun.evidence.measurement.runners.training_runner",
    "forerun.tracing.models.sources",
    "forerun.tracing.step",
)
"""Modules that the fork server imports once, which saves seconds per job.

The first optimizer of a process loads ``torch._dynamo``, the first model of torchvision all of its models. None of them
may begin to use a GPU or start a thread: a child is forked from the process that imported them.
"""

_START_TIMEOUT_S = 300.0  # the first child waits for the server to load the framework, maybe from a slow disk
_LONGEST_REASON = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildReport:
    """Report on the end of a child.

    Attributes:
        outcome: The way the job ended.
        result: Result of the job; None unless it is done.
        reason: Reason why the job is not done; empty if it is.
    """

    outcome: Outcome
    result: RunResult | None = None
    reason: str = ""


def report_progress(fraction: float) -> None:
    """Reports the done fraction of the job, 0 to 1, to the session; does nothing outside a measured child.

    Call it between repetitions or epochs, never inside one.
    """
    tell(fraction)


def run_in_child(
    job: MeasurementJob,
    device_index: str,
    protocol: Protocol,
    on_progress: Callable[[float], None] | None = None,
    *,
    run: str = DEFAULT_RUN,
) -> ChildReport:
    """Runs a job in a new process and reports its end.

    Args:
        job: Job to run.
        device_index: Device of the job, such as ``cpu`` or ``cuda:0``.
        protocol: Settings of the measurement; ``timeout_s`` and ``num_threads`` act here.
        on_progress: Called with the fraction that the job gives to ``report_progress``.
        run: Function that runs the job, as ``module:function``.
    """
    protocol = replace(protocol, num_threads=num_threads_of(protocol))
    threads = {name: str(protocol.num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    preloaded = list(_PRELOADED) if run == DEFAULT_RUN else preloaded_by(run)
    child = Child(
        fork_server(preloaded, threads), environment={**os.environ, **threads}, name=f"forerun-{job.kind}"
    )
    try:
        # The time limit counts from the begin of the job, not of its process.
        child.ask(_prepare, protocol.num_threads, timeout_s=max(_START_TIMEOUT_S, protocol.timeout_s))
        reply = child.ask(
            _report_of_job,
            run,
            job,
            device_index,
            protocol,
            timeout_s=protocol.timeout_s,
            on_message=on_progress,
        )
    except LateError:
        return ChildReport(outcome=Outcome.TIMED_OUT, reason=f"not finished after {protocol.timeout_s:g} s")
    except EndedError as ended:
        return _report_of_death(ended)
    finally:
        child.close()
    if reply.error:  # the job's code asked to exit
        return ChildReport(outcome=Outcome.FAILED, reason=reply.text)
    report: ChildReport = reply.result
    return report


def _prepare(num_threads: int | None) -> None:
    """Gives a framework that the fork server loaded its threads; one loaded later reads the environment's variables."""
    torch = sys.modules.get("torch")
    if torch is not None and num_threads is not None:
        torch.set_num_threads(num_threads)


def _report_of_job(run: str, job: MeasurementJob, device_index: str, protocol: Protocol) -> ChildReport:
    try:
        return ChildReport(outcome=Outcome.DONE, result=_function(run)(job, device_index, protocol))
    except Exception as error:  # any exception of a job is its report
        return ChildReport(outcome=_outcome_of(error), reason=_reason_of(error))


def _function(run: str) -> Callable[[MeasurementJob, str, Protocol], RunResult]:
    try:
        function: Callable[[MeasurementJob, str, Protocol], RunResult] = loaded(run)
    except (ImportError, AttributeError) as error:
        raise MeasurementError(f"expected a function as module:function, got '{run}': {error}") from error
    return function


def _outcome_of(error: Exception) -> Outcome:
    # The runners turn a framework's many errors for full memory into one error. Another runner may not need
    # their module, and must not pay for its import.
    runners = sys.modules.get("forerun.evidence.measurement.runners.table")
    kinds = (MemoryError, runners.OutOfMemory) if runners else (MemoryError,)
    return Outcome.OUT_OF_MEMORY if isinstance(error, kinds) else Outcome.FAILED


def _reason_of(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, ForerunError):
        return text[:_LONGEST_REASON]
    name = type(error).__name__
    return (f"{name}: {text}" if text else name)[:_LONGEST_REASON]


def _report_of_death(ended: EndedError) -> ChildReport:
    name = ended.signal_name
    if ended.exit_code is None:
        return ChildReport(outcome=Outcome.FAILED, reason="the job closed its connection without a result")
    if not name:
        return ChildReport(
            outcome=Outcome.FAILED,
            reason=f"the process ended with exit status {ended.exit_code} before it had a result",
        )
    hint = "; the kernel may have run out of memory" if name == "SIGKILL" else ""
    return ChildReport(outcome=Outcome.KILLED, reason=f"the process was ended by {name}{hint}")


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
    # Two trainings of one script are two occasions, or the second would have the key of the first.
    begun = hashlib.sha256(around.started_at.encode()).hexdigest()[:8]
    around = replace(around, occasion=around.occasion or f"fit {begun}")
    return as_measurement(job, ChildReport(outcome=Outcome.DONE, result=result), Protocol(), around)
