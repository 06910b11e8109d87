"""The table of runners, and what counts as full memory."""

import pytest
import torch
from real_jobs import QUICK, run_here

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.runners import table as runners
from forerun.evidence.measurement.runners.table import RUNNERS, OutOfMemory, run_job, runner
from forerun.evidence.records.measurement import JobKind


def test_every_kind_of_job_has_a_runner_and_only_one():
    run_here(JobKind.NULL, "null")
    assert set(RUNNERS) == set(JobKind)
    with pytest.raises(ValueError, match="two runners"):
        runner(JobKind.STEP)(lambda job, device_index, protocol: None)


def _wrapped(inner):
    try:
        raise InvalidSetupError("the constructor failed") from inner
    except InvalidSetupError as error:
        return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), True),
        (_wrapped(MemoryError()), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (_wrapped(ValueError("no")), False),
    ],
)
def test_which_errors_say_that_memory_is_full(monkeypatch, error, expected):
    def fails(job, device_index, protocol):
        raise error

    monkeypatch.setitem(runners.RUNNERS, JobKind.NULL, fails)
    with pytest.raises(OutOfMemory if expected else type(error)) as told:
        run_here(JobKind.NULL, "null")
    assert isinstance(told.value, OutOfMemory) is expected


def test_a_real_allocation_that_fails_is_out_of_memory():
    with pytest.raises(OutOfMemory) as told:
        run_here(JobKind.LAYER, "dense", batch_size=1, in_features=1 << 29, out_features=1 << 29)
    assert len(str(told.value).splitlines()) == 1


def test_other_errors_pass_as_they_are(monkeypatch):
    def fails(job, device_index, protocol):
        raise KeyError("weights")

    monkeypatch.setitem(runners.RUNNERS, JobKind.NULL, fails)
    with pytest.raises(KeyError, match="weights"):
        run_here(JobKind.NULL, "null")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there():
    job = MeasurementJob(kind=JobKind.NULL, subject="null", family="null")
    with pytest.raises(MeasurementError, match="cuda:7"):
        run_job(job, "cuda:7", QUICK)


def test_the_null_step_costs_next_to_nothing():
    found = run_here(JobKind.NULL, "null")
    # Not a benchmark: a null step of more than this would hide whole layers.
    assert 0 <= min(found.repetitions_s) < 1e-3
