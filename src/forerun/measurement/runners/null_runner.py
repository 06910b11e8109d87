"""The null step: the cost of a repetition without work."""

from __future__ import annotations

from forerun.measurement.jobs import MeasurementJob, RunResult
from forerun.measurement.protocol import Protocol
from forerun.measurement.runners.table import runner
from forerun.measurement.runners.timing import time_repetitions
from forerun.measurement.runners.torch_device import open_device, synchroniser
from forerun.records.measurement import JobKind

__all__ = ["run_null"]


@runner(JobKind.NULL)
def run_null(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times two synchronisations and one call, the overhead in every repetition of other jobs."""
    device = open_device(device_index)
    if device.type == "cuda":
        import torch

        torch.zeros(1, device=device)  # make a context, so that there is something to synchronise with
    timed = time_repetitions(_nothing, synchroniser(device), protocol)
    return RunResult(
        repetitions_s=timed.repetitions_s, warm_up_s=timed.warm_up_s, is_stationary=timed.is_stationary
    )


def _nothing() -> None:
    """A step without work."""
