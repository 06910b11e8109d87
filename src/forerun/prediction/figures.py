"""Figures that follow from a step: epoch and job, tokens per second and use of the peak, energy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.cost.time.power import device_power
from forerun.graph.graph import Graph
from forerun.prediction.estimate import Interval
from forerun.question.devices.device import Device, NumberFormat
from forerun.question.job import Job
from forerun.question.run import Run
from forerun.question.setup import Precision

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


_FORMATS = {
    Precision.FP32: NumberFormat.FP32,
    Precision.TF32: NumberFormat.TF32,
    Precision.AMP: NumberFormat.FP16,
    Precision.FP16: NumberFormat.FP16,
    Precision.AMP_BF16: NumberFormat.BF16,
    Precision.BF16: NumberFormat.BF16,
    Precision.FP8: NumberFormat.FP8,
}


class TokenFigures(TypedDict):
    """Figures of a step that depend on its work and its tokens; names as in ``Estimate``."""

    tokens_per_s: Interval | None
    tokens_per_s_per_device: Interval | None
    mfu: Interval | None
    hfu: Interval | None


def peak_of_precision(device: Device, precision: Precision) -> float | None:
    """Dense datasheet peak of the format in which a precision multiplies, None if the device has none [FLOP/s]."""
    return device.peak_flops_per_s.get(_FORMATS[precision])


def tokens_and_use(graph: Graph, run: Run, step_s: Interval) -> TokenFigures:
    """Tokens per second and the use of the peak of a step.

    MFU = work of the products that training needs / (step time x devices x peak of the precision); HFU counts what is
    computed again as well. The work is that of the traced products, so adapters count what they compute, and attention
    counts in full, without halving it for a causal mask (Chowdhery et al. 2022, appendix B).

    Args:
        graph: The traced step.
        run: The run.
        step_s: Time of its step, all micro-steps together [s].
    """
    number = run.cluster.num_devices
    tokens = None
    if graph.tokens_per_sample is not None:
        tokens = step_s.inverse(graph.tokens_per_sample * run.batch_size_global)
    batch = run.setup.batch_size_per_device
    passes_per_device = run.batch_size_global / batch / number  # below one where devices share a model
    useful, again = (
        passes_per_device * (constant + slope * batch)
        for constant, slope in (graph.model_flops, graph.recomputed_flops)
    )
    peak = peak_of_precision(run.cluster.device, run.setup.precision)
    is_known = peak is not None and useful > 0
    return TokenFigures(
        tokens_per_s=tokens,
        tokens_per_s_per_device=None if tokens is None else tokens.scaled(1 / number),
        mfu=step_s.inverse(useful / peak) if is_known and peak else None,
        hfu=step_s.inverse((useful + again) / peak) if is_known and peak else None,
    )


def training_energy_j(
    device: Device, duration_s: Interval, activity: float, compute_fraction: float
) -> Interval | None:
    """Energy of the device over a duration [J]; None if the cost model has no power figures.

    energy = power * duration, with the power of ``cost.time.power`` at this activity. The two intervals are taken as
    independent: relative half-widths add in squares. Host, cooling and network are left out.

    Args:
        device: The device.
        duration_s: How long it works.
        activity: Ideal time of the step's work and traffic over the time of the step.
        compute_fraction: Share of the work in that ideal time.
    """
    power = device_power(device, np.asarray([activity]), np.asarray([compute_fraction]))
    if power is None:
        return None
    watts, low_w, high_w = (float(end[0]) for end in (power.value_w, power.low_w, power.high_w))
    value = watts * duration_s.value

    def spread(share: float, duration: float) -> float:
        return float((share**2 + duration**2) ** 0.5)

    # Power and time are predicted apart, so their relative errors add as squares.
    below = spread(1 - low_w / watts, 1 - duration_s.low / duration_s.value)
    above = spread(high_w / watts - 1, duration_s.high / duration_s.value - 1)
    return Interval(value, value * max(0.0, 1 - below), value * (1 + above))
