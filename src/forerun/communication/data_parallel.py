"""The step of synchronous data parallel training: buckets that are reduced while the backward pass goes on.

    end_i = max(end_(i-1), ready_i) + all_reduce(bucket_i)
    step  = straggler * ((k-1) * (forward + backward) + forward + max(backward + slow-down, end_n)) + optimizer +
    overhead

The all-reduce of the last bucket is always exposed, because its gradients are the last that the backward pass makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from forerun.communication.buckets import Bucket
from forerun.communication.stragglers import straggler_factor
from forerun.errors import InvalidSetupError

__all__ = [
    "BucketSchedule",
    "DataParallelStep",
    "Pass",
    "bucket_schedule",
    "data_parallel_step",
    "split_step",
]

FORWARD_SHARE = 1 / 3
"""Of forward and backward, where it is not known: the backward pass has two products for each one of the forward
pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Times of one device's micro-step [s]."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "optimizer_s"):
            if not getattr(self, name) >= 0:
                raise InvalidSetupError(f"{name} must be zero or more seconds, got {getattr(self, name)}")

    @property
    def total_s(self) -> float:
        """The whole step of one device [s]."""
        return self.forward_s + self.backward_s + self.optimizer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketSchedule:
    """Ends of the all-reduces of one backward pass.

    Attributes:
        end_s: End of the last all-reduce after the begin of the backward pass [s].
        busy_s: Sum of all collectives [s].
        exposed_s: Time of collectives after the end of the backward pass [s].
    """

    end_s: float
    busy_s: float
    exposed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelStep:
    """Parts of one data parallel step; they add up to ``step_s``.

    Attributes:
        compute_s: Forward, backward and optimizer of one device [s].
        exposed_s: Communication that no computation hides [s].
        contention_s: Time that hidden communication adds to the backward pass [s].
        straggler_s: Waiting for the slowest device [s].
        overhead_s: Further work of each step [s].
        communication_s: Sum of all collectives, hidden or not; not a part of ``step_s`` [s].
    """

    compute_s: float
    exposed_s: float
    contention_s: float
    straggler_s: float
    overhead_s: float
    communication_s: float

    @property
    def step_s(self) -> float:
        """The whole step [s]."""
        return self.compute_s + self.exposed_s + self.contention_s + self.straggler_s + self.overhead_s


def split_step(step_s: float, forward_share: float = FORWARD_SHARE, optimizer_share: float = 0.03) -> Pass:
    """Forward, backward and optimizer of a step of which only the whole is known.

    Args:
        step_s: The step [s].
        forward_share: Forward over forward plus backward.
        optimizer_share: Optimizer over the step.

    Raises:
        InvalidSetupError: The time is negative.
    """
    if not step_s >= 0:
        raise InvalidSetupError(f"a step must take zero or more seconds, got {step_s}")
    work_s = step_s * (1 - optimizer_share)
    return Pass(
        forward_s=work_s * forward_share,
        backward_s=work_s * (1 - forward_share),
        optimizer_s=step_s * optimizer_share,
    )


def bucket_schedule(
    buckets: Sequence[Bucket], backward_s: float, all_reduce_s: Callable[[float], float]
) -> BucketSchedule:
    """Ends of the all-reduces of a backward pass; they run one after the other.

    end_i = max(end_(i-1), ready_i) + all_reduce(size_i).

    Args:
        buckets: Buckets in the order in which they are sent.
        backward_s: Length of the backward pass [s].
        all_reduce_s: Function from a number of bytes to the time of their all-reduce [s].
    """
    end_s = busy_s = 0.0
    for bucket in buckets:
        time_s = all_reduce_s(bucket.size_bytes)
        end_s = max(end_s, bucket.ready_share * backward_s) + time_s
        busy_s += time_s
    return BucketSchedule(end_s=end_s, busy_s=busy_s, exposed_s=max(0.0, end_s - backward_s))


def data_parallel_step(
    one: Pass,
    buckets: Sequence[Bucket],
    all_reduce_s: Callable[[float], float],
    num_devices: int,
    *,
    num_accumulation_steps: int = 1,
    overlap: bool = True,
    slowdown: float = 0.0,
    coefficient_of_variation: float = 0.0,
    overhead_s: float = 0.0,
    num_batch_norms: int = 0,
    batch_norm_bytes: float = 0.0,
) -> DataParallelStep:
    """The step of n devices that average their gradients; one device pays nothing but its own pass.

    With k accumulation steps, gradients are reduced in the last one (``no_sync`` in the others). Synchronised batch
    norms gather the statistics of each layer in the forward pass and reduce two sums in the backward pass; nothing
    hides them.

    Args:
        one: Times of one micro-step of one device.
        buckets: Gradient buckets in the order in which they are sent.
        all_reduce_s: Function from a number of bytes to the time of their all-reduce over these devices [s].
        num_devices: Devices, n.
        num_accumulation_steps: Micro-steps of a step, k.
        overlap: Whether collectives run beside the backward pass.
        slowdown: Time that a second of hidden communication costs the backward pass, from 0 to 1.
        coefficient_of_variation: Scatter of the step time between devices.
        overhead_s: Further work of each step of several devices [s].
        num_batch_norms: Layers whose statistics are synchronised.
        batch_norm_bytes: Statistics of such a layer, mean over the layers [bytes].

    Raises:
        InvalidSetupError: A number is impossible.
    """
    if num_devices < 1 or num_accumulation_steps < 1:
        raise InvalidSetupError(
            f"devices and accumulation steps must be at least 1, got {num_devices} and {num_accumulation_steps}"
        )
    compute_s = num_accumulation_steps * (one.forward_s + one.backward_s) + one.optimizer_s
    if num_devices == 1:
        return DataParallelStep(
            compute_s=compute_s,
            exposed_s=0.0,
            contention_s=0.0,
            straggler_s=0.0,
            overhead_s=0.0,
            communication_s=0.0,
        )
    schedule = bucket_schedule(buckets, one.backward_s, all_reduce_s)
    exposed_s = schedule.exposed_s if overlap else schedule.busy_s
    batch_norm_s = (
        2 * num_accumulation_steps * num_batch_norms * all_reduce_s(batch_norm_bytes)
        if num_batch_norms
        else 0.0
    )
    waiting = straggler_factor(num_devices, coefficient_of_variation) - 1
    return DataParallelStep(
        compute_s=compute_s,
        exposed_s=exposed_s + batch_norm_s,
        contention_s=slowdown * max(0.0, schedule.busy_s - exposed_s) if overlap else 0.0,
        straggler_s=waiting * compute_s,
        overhead_s=overhead_s,
        communication_s=schedule.busy_s + batch_norm_s,
    )
