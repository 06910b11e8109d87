"""From a step to an epoch and a job."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError
from forerun.prediction.estimate import Interval
from forerun.run.job import Job

__all__ = ["JobTimes", "epoch_time_s", "job_times"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_Times = TypeVar("_Times", float, Floats)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Times of an epoch and of the job, and the steps of an epoch."""

    num_steps_per_epoch: int
    epoch_time_s: Interval
    job_time_s: Interval | None


def epoch_time_s(
    job: Job,
    batch_size_global: int | Ints,
    step_s: _Times,
    last_step_s: _Times,
    validation_step_s: _Times,
    *,
    validation_batch_size: int | Ints | None = None,
) -> _Times:
    """Time of an epoch [s], of one run or of arrays of runs whose last axis is that of the batch sizes.

    epoch = full steps * step + last partial step + validation steps * forward + checkpoint

    Args:
        job: The job.
        batch_size_global: Samples of one step of all devices.
        step_s: Time of a full step [s].
        last_step_s: Time of the step with the samples that are left over [s].
        validation_step_s: Forward time of a validation batch, 0 without validation [s].
        validation_batch_size: Samples of a validation batch of all devices, where it is another.
    """
    num_full = job.num_samples // batch_size_global
    has_last = (job.num_samples % batch_size_global > 0) * (not job.drop_last)
    validated = batch_size_global if validation_batch_size is None else validation_batch_size
    num_validation = np.ceil(job.num_validation_samples / validated)
    steps_s: Any = num_full * step_s + has_last * last_step_s
    total: _Times = steps_s + num_validation * validation_step_s + job.checkpoint_s
    return total


def job_times(
    job: Job,
    batch_size_global: int,
    step_s: Interval,
    last_step_s: Interval,
    validation_step_s: Interval | None,
    *,
    validation_batch_size: int | None = None,
) -> JobTimes:
    """Epoch and job from the times of single steps, with intervals; arguments as of ``epoch_time_s``.

    job = start-up + epochs * epoch

    The interval of a step is one unknown factor, the same in every step, so it scales with the sum.

    Raises:
        InvalidSetupError: An epoch has no step.
    """
    num_full, rest = divmod(job.num_samples, batch_size_global)
    has_last = rest > 0 and not job.drop_last
    if not num_full and not has_last:
        raise InvalidSetupError(
            f"an epoch has no step: {job.num_samples} samples at a global batch of {batch_size_global} "
            "with the last partial batch dropped; choose a smaller batch"
        )

    def total(end: str) -> float:
        forward = 0.0 if validation_step_s is None else getattr(validation_step_s, end)
        return float(
            epoch_time_s(
                job,
                batch_size_global,
                getattr(step_s, end),
                getattr(last_step_s, end),
                forward,
                validation_batch_size=validation_batch_size,
            )
        )

    epoch = Interval(total("value"), total("low"), total("high"))
    whole = epoch.scaled(job.num_epochs).shifted(job.startup_s) if job.num_epochs is not None else None
    return JobTimes(num_steps_per_epoch=num_full + has_last, epoch_time_s=epoch, job_time_s=whole)
