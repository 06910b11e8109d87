"""The step of synchronous data parallel training: buckets that are reduced while the backward pass goes on.

    end_i = max(end_(i-1), ready_i) + all_reduce(bucket_i)
    step  = straggler * ((k-1) * (forward + backward) - sums + forward + max(backward + slow-down, end_n)) + optimizer +
    overhead

The all-reduce of the last bucket is always exposed, because its gradients are the last that the backward pass makes.
Beside it: the buckets of DDP, and the wait for the slowest device.

TensorFlow's MirroredStrategy is one process that dispatches every replica and then reduces all gradients. The step of
one device is bound either by its host, which needs H seconds to launch it however small the batch, or by the device,
which needs D(b). With n replicas the same host launches n times, and the device additionally waits for the all-reduce
of all gradients, which are sent together when the last of them is there:

    t_1 = max(H, D(b))        t_n = max(n H + (n-1) C, D(b) + R),        R = all-reduce of the gradients

where the maxima are soft: max_k(x, y) = (x^k + y^k)^(1/k). H and D come from steps of one device at several batch
sizes alone: D(b) = D_0 + s b, and H from the flat part. C is what moving a batch to another replica costs the host; it
is contained in H for one device and therefore left out (C = 0). Nothing of this is fitted to steps of several devices.
Where a prediction knows the loop of ``fit`` apart from the launches, that runs once and is added to t_n.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import erf, exp, pi, sqrt

from forerun.question.sharing import DEFAULT_BUCKET_BYTES

FIRST_BUCKET_BYTES = 1024**2
"""PyTorch, torch/csrc/distributed/c10d/reducer.hpp: kDefaultFirstBucketBytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The gradient of one parameter.

    Attributes:
        size_bytes: Size of the gradient as it is sent [bytes].
        ready_share: Share of the backward pass after which the gradient is ready, in [0, 1].
    """

    size_bytes: float
    ready_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        size_bytes: Sum of their sizes [bytes].
        ready_share: Share of the backward pass after which the last of them is ready.
    """

    size_bytes: float
    ready_share: float


def gradient_buckets(
    gradients: Sequence[Gradient], bucket_bytes: float = DEFAULT_BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Buckets in the order in which they are sent.

    A bucket is closed as soon as it holds its capacity, so it may exceed it by its last gradient, as in DDP.

    Args:
        gradients: Gradients in the order in which the backward pass makes them.
        bucket_bytes: Capacity of all buckets but the first, ``bucket_cap_mb`` [bytes].
    """
    buckets: list[Bucket] = []
    size, ready = 0.0, 0.0
    for gradient in gradients:
        size, ready = size + gradient.size_bytes, max(ready, gradient.ready_share)
        # A small first bucket lets the link start early; DDP has it for that reason.
        if size >= (bucket_bytes if buckets else min(FIRST_BUCKET_BYTES, bucket_bytes)):
            buckets.append(Bucket(size_bytes=size, ready_share=ready))
            size = 0.0
    if size:
        buckets.append(Bucket(size_bytes=size, ready_share=ready))
    return tuple(buckets)


# Beyond eight standard deviations lies less than a float would keep of the sum.
_NORMAL_STEPS = 4000
_NORMAL_REACH = 8.0


@cache
def expected_normal_maximum(num_devices: int) -> float:
    """Expected maximum of n independent standard normal numbers: 0, 0.564, 0.846, 1.029 for n = 1, 2, 3, 4.

    E = integral of x n phi(x) Phi(x)^(n-1); it grows like sqrt(2 ln n).

    Source: Tippett 1925, Biometrika 17 (the table of these values).
    """
    width = 2 * _NORMAL_REACH / _NORMAL_STEPS
    total = 0.0
    # Summed by hand: to import SciPy takes about as long as the rest of a prediction from kept files.
    for i in range(_NORMAL_STEPS + 1):
        x = -_NORMAL_REACH + i * width
        below = 0.5 * (1 + erf(x / sqrt(2)))
        total += x * num_devices * exp(-x * x / 2) / sqrt(2 * pi) * below ** (num_devices - 1)
    return total * width


def straggler_factor(num_devices: int, coefficient_of_variation: float) -> float:
    """Expected step time of n devices that wait for each other, relative to the mean of one.

    1 + cv * E[max of n normals]. Devices are taken as independent from step to step; one that is always slow shifts the
    mean instead.

    Args:
        num_devices: Devices that synchronise.
        coefficient_of_variation: Standard deviation over mean of the time of one device's step.
    """
    return 1 + coefficient_of_variation * expected_normal_maximum(num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Times of one device's micro-step; ``sums_s`` is the part that the first of several micro-steps has not [s]."""

    forward_s: float
    backward_s: float
    optimizer_s: float = 0.0
    sums_s: float = 0.0

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
    exposed_s: float = 0.0
    contention_s: float = 0.0
    straggler_s: float = 0.0
    overhead_s: float = 0.0
    communication_s: float = 0.0

    @property
    def step_s(self) -> float:
        """The whole step [s]."""
        return self.compute_s + self.exposed_s + self.contention_s + self.straggler_s + self.overhead_s


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
        # One communicator takes its collectives in turn: a bucket waits for its gradients and for the one before.
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
        slowdown: Time that a second of hidden communication costs the backward pass, from 0 to 1.
        coefficient_of_variation: Scatter of the step time between devices.
        overhead_s: Further work of each step of several devices [s].
        num_batch_norms: Layers whose statistics are synchronised.
        batch_norm_bytes: Statistics of such a layer, mean over the layers [bytes].
    """
    compute_s = num_accumulation_steps * (one.forward_s + one.backward_s) - one.sums_s + one.optimizer_s
    if num_devices == 1:
        return DataParallelStep(compute_s=compute_s)
    schedule = bucket_schedule(buckets, one.backward_s, all_reduce_s)
    exposed_s = schedule.exposed_s
    batch_norm_s = (
        # Statistics are needed at once: in the forward pass, and again for the gradients of the backward pass.
        2 * num_accumulation_steps * num_batch_norms * all_reduce_s(batch_norm_bytes)
        if num_batch_norms
        else 0.0
    )
    waiting = straggler_factor(num_devices, coefficient_of_variation) - 1
    return DataParallelStep(
        compute_s=compute_s,
        exposed_s=exposed_s + batch_norm_s,
        contention_s=slowdown * max(0.0, schedule.busy_s - exposed_s),
        # Devices scatter in what they compute; a collective takes as long for all of them.
        straggler_s=waiting * compute_s,
        overhead_s=overhead_s,
        communication_s=schedule.busy_s + batch_norm_s,
    )


SHARPNESS = 4.0
"""Exponent of the soft maximum: at equal times the step is 19 % longer than either."""

_LEAST_DEVICE_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAndDevice:
    """Parts of the step of one device.

    Attributes:
        host_s: Launching the step, independent of the batch, H [s].
        device_fixed_s: Device time at batch zero: optimizer, weights, D_0 [s].
        device_per_sample_s: Device time of one sample, s [s].
    """

    host_s: float
    device_fixed_s: float
    device_per_sample_s: float

    def device_s(self, batch_size_per_device: float) -> float:
        """Time of the device, D(b) [s]."""
        return self.device_fixed_s + self.device_per_sample_s * batch_size_per_device

    def step_s(self, batch_size_per_device: float) -> float:
        """Step of one device [s]."""
        return _soft_max(self.host_s, self.device_s(batch_size_per_device))


def _soft_max(x: float, y: float) -> float:
    return float((x**SHARPNESS + y**SHARPNESS) ** (1 / SHARPNESS))


def device_part_s(step_s: float, host_s: float) -> float:
    """Device time of a step that is the soft maximum of the host's time and it; at least 5 % of the step [s]."""
    # Solved for the device: t^k = H^k + D^k. A step that is all host would leave nothing of D.
    share = min(1.0, host_s / step_s)
    return step_s * float(max(1 - share**SHARPNESS, _LEAST_DEVICE_SHARE**SHARPNESS) ** (1 / SHARPNESS))


def mirrored_step_s(
    one: HostAndDevice, batch_size_per_device: float, num_devices: int, all_reduce_s: float
) -> float:
    """Step of n replicas under one host process [s].

    t_n = max(n H, D(b) + R), soft; n = 1 gives the step of one device.

    Args:
        one: Host and device of one replica.
        batch_size_per_device: Samples of one replica, b.
        num_devices: Replicas, n.
        all_reduce_s: All-reduce of all gradients, R [s].
    """
    # All gradients are sent together, when the last of them is there: nothing is left to hide behind.
    exposed_s = all_reduce_s if num_devices > 1 else 0.0
    return _soft_max(num_devices * one.host_s, one.device_s(batch_size_per_device) + exposed_s)
