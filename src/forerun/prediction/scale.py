"""From the step of one device to that of many: strategies, points of a curve, where adding devices stops paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forerun.answers import Answer
from forerun.communication.buckets import Bucket
from forerun.communication.collectives import all_gather_time_s, reduce_scatter_time_s
from forerun.communication.data_parallel import DataParallelStep, Pass, data_parallel_step
from forerun.communication.mirrored import HostAndDevice, device_part_s, mirrored_step_s
from forerun.communication.scaling_constants import ScalingConstants, ScalingTable
from forerun.communication.sharding import ShardedMemory, sharded_memory
from forerun.communication.stragglers import straggler_factor
from forerun.communication.tuner import AllReduce, all_reduce_of
from forerun.hardware.cluster import Cluster
from forerun.hardware.link import LinkKind
from forerun.prediction.estimate import Interval
from forerun.prediction.step import StepPrediction, widened
from forerun.run.sharing import Sharing, Strategy

__all__ = [
    "HeldMemory",
    "OneStep",
    "ScalePoint",
    "grown_memory_bytes",
    "held_state",
    "link_class",
    "scaled_step",
    "stops_paying_at",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """One micro-step of one device at one batch size, taken apart.

    Attributes:
        alone: The prediction of it.
        parts: Forward, backward, optimizer.
        gradient_bytes: All gradients [bytes].
        weight_bytes: All weights [bytes].
        buckets: Gradients in the order they are sent.
        num_batch_norms: Batch norms of the forward pass.
        batch_norm_bytes: Statistics of one [bytes].
    """

    alone: StepPrediction
    parts: Pass
    gradient_bytes: float
    weight_bytes: float
    buckets: tuple[Bucket, ...]
    num_batch_norms: int
    batch_norm_bytes: float

    @property
    def step_s(self) -> Interval:
        """Its time with its interval [s]."""
        return self.alone.step_s

    @property
    def host_s(self) -> float:
        """Time of the host for one device: launches, and what a step adds to them, such as copies of its input [s]."""
        return self.alone.host_s + self.alone.overhead_s - self.alone.loop_s - self.alone.transfer_s


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Contents of the memory of one device alone at its peak.

    Attributes:
        weight_bytes: All weights [bytes].
        gradient_bytes: All gradients [bytes].
        held_gradient_bytes: What of the gradients is there at that moment, often little: activations fill it before
            [bytes].
        state_bytes: State of the optimizer [bytes].
    """

    weight_bytes: float
    gradient_bytes: float
    held_gradient_bytes: float
    state_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePoint(Answer):
    """One size of a scaling curve.

    Attributes:
        scaling: "weak" (the batch of a device stays) or "strong" (the global batch stays).
        num_devices, num_nodes: Devices and nodes.
        batch_size_per_device: Samples of one device and micro-step.
        batch_size_global: Samples of one step of all.
        step_time_s: One step of all devices.
        throughput_samples_per_s: Samples of all devices per second.
        speedup: Throughput over that of one device.
        efficiency: Speed-up over the number of devices.
        communication_s: All collectives of a step, hidden or not [s].
        exposed_s: What of it nothing hides [s].
        peak_memory_bytes: Memory of each device [bytes].
        fits: "yes", "no" or "close"; None where the memory of the device says nothing.
        num_steps_per_epoch: Steps of an epoch of the global batch; None without a dataset.
        epoch_time_s: One epoch; None without a dataset.
        job_time_s: All epochs; None without a number of epochs.
        cost_usd_per_epoch: Money of one epoch; None without a price.
    """

    scaling: str
    num_devices: int
    num_nodes: int
    batch_size_per_device: int
    batch_size_global: int
    step_time_s: Interval
    throughput_samples_per_s: Interval
    speedup: float
    efficiency: float
    communication_s: float
    exposed_s: float
    peak_memory_bytes: float
    fits: str | None = None
    num_steps_per_epoch: int | None = None
    num_steps: int | None = None
    epoch_time_s: Interval | None = None
    job_time_s: Interval | None = None
    cost_usd_per_epoch: float | None = None


def link_class(cluster: Cluster) -> str:
    """Limit of a cluster: "network" over several nodes, else the kind of link inside, such as "nvlink" or "host"."""
    if cluster.num_nodes > 1:
        return "network"
    if cluster.intra_link is None:
        return "pcie"
    return str(cluster.intra_link.kind)


def scaled_step(
    one: OneStep, cluster: Cluster, settings: Sharing, table: ScalingTable, batch_size_per_device: int
) -> tuple[Interval, DataParallelStep]:
    """The step of all devices of a cluster, with its interval and its parts.

    The interval joins that of the step of one device with the scatter of scaling itself, as independent errors.

    Args:
        one: The step of one device, one micro-step.
        cluster: Where it runs.
        settings: How the work is shared.
        table: What training makes of links.
        batch_size_per_device: Samples of one device.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if cluster.num_devices == 1:
        parts = data_parallel_step(
            one.parts, (), lambda size: 0.0, 1, num_accumulation_steps=settings.num_accumulation_steps
        )
        return one.step_s.scaled(parts.step_s / one.parts.total_s), parts
    kind = link_class(cluster)
    constants = _constants(table, settings, kind)
    about = all_reduce_of(cluster, settings.algorithm)
    if settings.strategy is Strategy.MIRRORED:
        parts = _mirrored(one, about, batch_size_per_device)
    elif settings.strategy.stage:
        parts = _sharded(one, about, constants, settings)
    else:
        parts = _replicated(one, about, constants, settings)
    peak_s = settings.num_accumulation_steps * one.alone.least_s
    # The scatter of scaling is that of communication: it does not reach below what a device computes.
    low_s = parts.step_s * one.step_s.value / one.step_s.high
    least_s = max(min(low_s, parts.compute_s), peak_s)
    return widened(parts.step_s, one.step_s, table.spread_of(kind), least_s), parts


def _constants(table: ScalingTable, settings: Sharing, kind: str) -> ScalingConstants:
    stack = "tensorflow" if settings.strategy is Strategy.MIRRORED else "pytorch"
    # Processes on a processor hide nothing: the cores that send are those that compute. Their link is a measured one.
    found = ScalingConstants(slowdown=1.0) if kind == LinkKind.HOST else table.of(stack, kind)
    drag = settings.coefficient_of_variation
    if drag is None:
        return found
    return ScalingConstants(
        share=found.share, slowdown=found.slowdown, drag=drag, overhead_s=found.overhead_s
    )


def _replicated(
    one: OneStep, about: AllReduce, constants: ScalingConstants, settings: Sharing
) -> DataParallelStep:
    return data_parallel_step(
        one.parts,
        one.buckets,
        lambda size: about.time_s(size / constants.share),
        about.num_devices,
        num_accumulation_steps=settings.num_accumulation_steps,
        slowdown=constants.slowdown_on(about),
        coefficient_of_variation=constants.drag,
        overhead_s=constants.overhead_s,
        num_batch_norms=one.num_batch_norms if settings.sync_batch_norm else 0,
        batch_norm_bytes=one.batch_norm_bytes,
    )


def _sharded(
    one: OneStep, about: AllReduce, constants: ScalingConstants, settings: Sharing
) -> DataParallelStep:
    """ZeRO: gradients are scattered in the backward pass, weights gathered after the update (1, 2) or before use (3).

    Gathering in forward and backward overlaps with computing the layer before; the first gather and the last scatter
    do not.
    """
    devices, stage = about.num_devices, settings.strategy.stage
    rate = about.slowest_bytes_per_s * constants.share
    hop_s = about.inter_latency_s if about.num_nodes > 1 else about.intra_latency_s
    scatter_s = reduce_scatter_time_s(one.gradient_bytes, devices, hop_s, rate)
    gather_s = all_gather_time_s(one.weight_bytes, devices, hop_s, rate)
    num_units = max(1, len(one.buckets))
    accumulation = settings.num_accumulation_steps
    if stage < 3:
        exposed_s = max(scatter_s / num_units, scatter_s - one.parts.backward_s) + gather_s
        busy_s = scatter_s + gather_s
    else:
        forward_s = max(gather_s / num_units, gather_s - one.parts.forward_s)
        backward_s = max((gather_s + scatter_s) / num_units, gather_s + scatter_s - one.parts.backward_s)
        exposed_s = accumulation * (forward_s + backward_s)
        busy_s = accumulation * (2 * gather_s + scatter_s)
    compute_s = accumulation * (one.parts.forward_s + one.parts.backward_s) + one.parts.optimizer_s / devices
    return DataParallelStep(
        compute_s=compute_s,
        exposed_s=exposed_s,
        contention_s=constants.slowdown_on(about) * max(0.0, busy_s - exposed_s),
        straggler_s=(straggler_factor(devices, constants.drag) - 1) * compute_s,
        overhead_s=constants.overhead_s,
        communication_s=busy_s,
    )


def _mirrored(one: OneStep, about: AllReduce, batch_size_per_device: int) -> DataParallelStep:
    loop_s = one.alone.loop_s  # it runs once, whatever the number of replicas
    alone_s = max(one.parts.total_s - loop_s, 1e-12)
    device_s = device_part_s(alone_s, one.host_s)
    reduce_s = about.time_s(one.gradient_bytes)
    split = HostAndDevice(
        host_s=one.host_s, device_fixed_s=0.0, device_per_sample_s=device_s / batch_size_per_device
    )
    step_s = mirrored_step_s(split, batch_size_per_device, about.num_devices, reduce_s)
    exposed_s = min(reduce_s, max(0.0, step_s - alone_s))
    return DataParallelStep(
        compute_s=device_s,
        exposed_s=exposed_s,
        contention_s=0.0,
        straggler_s=0.0,
        overhead_s=max(0.0, step_s - device_s - exposed_s) + loop_s,
        communication_s=reduce_s,
    )


def held_state(one: HeldMemory, settings: Sharing, num_devices: int) -> ShardedMemory:
    """Weights, gradients and optimizer state that each of n devices holds when its memory peaks."""
    return sharded_memory(
        one.weight_bytes, one.held_gradient_bytes, one.state_bytes, num_devices, settings.strategy.stage
    )


def grown_memory_bytes(one: HeldMemory, settings: Sharing, num_devices: int) -> float:
    """Memory that each of n devices needs beyond that of one alone; below zero where sharding saves [bytes].

    Replicas hold the buckets beside the gradients; sharding divides gradients, optimizer state and weights by its
    stage.
    """
    if num_devices == 1 or settings.strategy is Strategy.MIRRORED:
        return 0.0
    stage = settings.strategy.stage
    held = held_state(one, settings, num_devices)
    whole = one.weight_bytes + one.held_gradient_bytes + one.state_bytes
    buckets = one.gradient_bytes if stage == 0 else min(2 * settings.bucket_bytes, one.gradient_bytes)
    return held.total_bytes - whole + buckets


def stops_paying_at(points: Sequence[ScalePoint], least_gain: float = 0.5) -> int | None:
    """The first number of devices whose added devices bring less than half of what the first device does each.

    gain = (throughput_k - throughput_(k-1)) / (n_k - n_(k-1)) / throughput_1; None if all pay.

    Args:
        points: One curve, by growing number of devices.
        least_gain: Gain of a device, relative to the first, below which it does not pay.
    """
    rates: Mapping[int, float] = {p.num_devices: p.throughput_samples_per_s.value for p in points}
    numbers = sorted(rates)
    if len(numbers) < 2:
        return None
    alone = next(p.throughput_samples_per_s.value / p.speedup for p in points)
    for before, now in pairwise(numbers):
        if (rates[now] - rates[before]) / (now - before) / alone < least_gain:
            return now
    return None
