"""Jobs of the real runners, small enough for tests."""

import torch

from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.table import run_job
from forerun.evidence.records.measurement import JobKind

torch.set_num_threads(1)

QUICK = Protocol(
    num_repetitions=3,
    min_warm_up=1,
    max_warm_up=3,
    window=3,
    max_seconds=0.5,
    anchor_every=0,
    num_threads=1,
    timeout_s=120.0,
)

TINY_CNN = "cnn:depth=2,base_filters=8"


def run_here(kind: JobKind, subject: str, **parameters) -> RunResult:
    """Runs a job in this process."""
    job = MeasurementJob(kind=kind, subject=subject, family="test", parameters=parameters)
    return run_job(job, "cpu", QUICK)
