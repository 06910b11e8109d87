"""The table of runners: the function for each kind of job, in the child process.

A runner takes ``(job, device_index, protocol)`` and returns a ``RunResult``. It may raise any exception; only full
memory has its own, ``OutOfMemory``, because frameworks have many errors for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator

from forerun.base.errors import MeasurementError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.timing import time_repetitions
from forerun.evidence.measurement.runners.torch_device import open_device, synchroniser
from forerun.evidence.records.measurement import JobKind

Runner = Callable[[MeasurementJob, str, Protocol], RunResult]

RUNNERS: dict[JobKind, Runner] = {}

_RUNNER_MODULES = ("data_parallel_runner", "step_runner", "training_runner")
"""Modules imported for their registrations when the first job runs."""

_MEMORY_PHRASES = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "std::bad_alloc",
    "status_alloc_failed",
)


class OutOfMemory(MeasurementError):  # noqa: N818 - named after the outcome that the session writes
    """The job needs more memory than the device or the host has."""


def runner(kind: JobKind) -> Callable[[Runner], Runner]:
    """Registers the decorated function for a kind of job; a kind cannot be taken twice."""

    def register(run: Runner) -> Runner:
        if kind in RUNNERS:
            raise ValueError(f"the job kind {kind.value!r} has two runners")
        RUNNERS[kind] = run
        return run

    return register


def run_job(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Runs a job in this process.

    Args:
        job: Job to run.
        device_index: Device of the job: ``cpu``, ``cuda`` or ``cuda:N``.
        protocol: Settings of the measurement.

    Raises:
        OutOfMemory: The job does not fit.
        Exception: The job raised another exception.
    """
    for name in _RUNNER_MODULES:
        importlib.import_module(f"forerun.evidence.measurement.runners.{name}")
    try:
        return RUNNERS[job.kind](job, device_index, protocol)
    except Exception as error:
        for cause in causes(error):
            if _says_full(cause):
                raise OutOfMemory(_first_line(cause)) from error
        raise


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes, because libraries wrap the errors of their constructors."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _says_full(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in text for phrase in _MEMORY_PHRASES)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else "the host has no memory left"


@runner(JobKind.NULL)
def run_null(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times two synchronisations and one call, the overhead in every repetition of other jobs."""
    device = open_device(device_index)
    if device.type == "cuda":
        import torch

        torch.zeros(1, device=device)  # make a context, so that there is something to synchronise with
    return time_repetitions(lambda: None, synchroniser(device), protocol)
