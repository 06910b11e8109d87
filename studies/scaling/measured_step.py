"""The step of several devices from the measured step of one."""

from __future__ import annotations

from forerun.cost.communication.constants import ScalingConstants
from forerun.cost.communication.data_parallel import (
    Bucket,
    DataParallelStep,
    data_parallel_step,
    gradient_buckets,
    split_step,
    uniform_gradients,
)
from forerun.cost.communication.tuner import AllReduce


def scale_measured_step(
    one_step_s: float,
    gradient_bytes: float,
    all_reduce: AllReduce,
    constants: ScalingConstants,
    *,
    num_accumulation_steps: int = 1,
    buckets: tuple[Bucket, ...] | None = None,
) -> DataParallelStep:
    """The step of many devices from the measured step of one.

    Args:
        one_step_s: Step of one device with the batch that each of the many has [s].
        gradient_bytes: Gradients of the model as they are sent [bytes].
        all_reduce: The devices and links; ``share`` is applied here.
        constants: Effect of training on the link.
        num_accumulation_steps: Micro-steps of a step; ``one_step_s`` is that of all of them.
        buckets: Gradient buckets; equal gradients at equal distances if None.
    """
    if buckets is None:
        buckets = gradient_buckets(uniform_gradients(gradient_bytes))
    one = split_step(one_step_s / num_accumulation_steps)
    return data_parallel_step(
        one,
        buckets,
        lambda size: all_reduce.time_s(size / constants.share),
        all_reduce.num_devices,
        num_accumulation_steps=num_accumulation_steps,
        slowdown=constants.slowdown_on(all_reduce),
        coefficient_of_variation=constants.drag,
        overhead_s=constants.overhead_s,
    )
