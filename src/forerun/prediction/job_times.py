"""From a step to an epoch and a job."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from forerun.errors import InvalidSetupError
from forerun.prediction.estimate import Interval
from forerun.run.job import Job

__all__ = ["JobTimes", "job_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTimes:
    """Times of an epoch and of the job, and the steps of an epoch."""

    num_steps_per_epoch: int
    epoch_time_s: Interval
    job_time_s: Interval | None


def job_times(
    job: Job,
    global_batch_size: int,
    step_s: Interval,
    last_step_s: Interval,
    validation_step_s: Interval | None,
) -> JobTimes:
    """Epoch and job from the times of single steps.

    epoch = full steps * step + last partial step + validation steps * forward + checkpoint
    job = start-up + epochs * epoch

    The interval of a step is one unknown factor, the same in every step, so it scales with the sum.

    Args:
        job: The job.
        global_batch_size: Samples of one step over all devices.
        step_s: Time of a full step.
        last_step_s: Time of the step with the samples that are left over.
        validation_step_s: Forward time of a validation batch of the same size, None without validation.
    """
    num_full, rest = divmod(job.num_samples, global_batch_size)
    has_last = rest > 0 and not job.drop_last
    if not num_full and not has_last:
        raise InvalidSetupError(
            f"an epoch has no step: {job.num_samples} samples at a global batch of {global_batch_size} "
            "with the last partial batch dropped; choose a smaller batch"
        )
    num_validation = ceil(job.num_validation_samples / global_batch_size) if validation_step_s else 0

    def total(name: str) -> float:
        value: float = num_full * getattr(step_s, name) + (getattr(last_step_s, name) if has_last else 0.0)
        if validation_step_s is not None:
            value += num_validation * getattr(validation_step_s, name)
        return value + job.checkpoint_s

    epoch = Interval(total("value"), total("low"), total("high"))
    whole = epoch.scaled(job.num_epochs).shifted(job.startup_s) if job.num_epochs is not None else None
    return JobTimes(num_steps_per_epoch=num_full + has_last, epoch_time_s=epoch, job_time_s=whole)
