"""The step of replicas: devices that have the whole model and its states each, and average its gradients.

One micro-step of one device is taken apart into passes and gradient buckets; DDP reduces the buckets beside the
backward pass, and a mirrored strategy dispatches all from one host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.base.kept import Kept
from forerun.cost.communication.collectives import AllReduce, all_reduce_of
from forerun.cost.communication.constants import (
    ScalingConstants,
    ScalingTable,
    load_scaling_table,
)
from forerun.cost.communication.data_parallel import (
    Bucket,
    DataParallelStep,
    Gradient,
    HostAndDevice,
    Pass,
    data_parallel_step,
    device_part_s,
    gradient_buckets,
    mirrored_step_s,
)
from forerun.cost.time.step_times import smooth_maximum
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import AllocationKind, Bools, Floats, Graph, MemoryEvent, OpClass, StepPart
from forerun.prediction.division import DividedStep
from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.prediction.step import PreparedModel, StepPrediction, predict_steps, widened
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import LinkKind
from forerun.question.run import Run
from forerun.question.sharing import DEFAULT_BUCKET_BYTES, Sharing, Strategy

_ONE_STEPS: Kept[list[OneStep]] = Kept(512)
STRAGGLER_PART = "waiting for other devices"
_SHARED_PARTS = (
    ("exposed_s", "gradient synchronisation"),
    ("contention_s", "slowed by communication"),
    ("straggler_s", STRAGGLER_PART),
    ("overhead_s", "work of several devices"),
)
_UPDATE_PART = "optimizer"


def _row_times_s(model: PreparedModel, step: StepPrediction) -> Floats:
    """Time of every row of the graph, scaled so that all add up to the step without its loop, (rows,) [s]."""
    per_launch = step.kernel_s / model.ops.count
    # A distinct kernel stands for many rows of the graph, which share its time by their launches.
    rows: Floats = per_launch[model.ops.group_of_row] * model.graph.ops.count
    total = float(rows.sum())
    return rows * ((step.step_s.value - step.loop_s - step.transfer_s) / total) if total > 0 else rows


def pass_of(model: PreparedModel, step: StepPrediction, *, first_writes: bool = False) -> Pass:
    """Forward, backward and optimizer of a predicted step.

    Without its update a step has the kernels T and the launches H of the passes alone: (T^6 + H^6)^(1/6) and what its
    loop adds; the update is the rest. Where ``first_writes``, the first backward pass has no sums of gradients: it
    writes those that ``zero_grad(set_to_none=True)`` has freed. Waiting for the host is spread over the passes in
    proportion to their time. The cost of the training loop of the software stack counts to the forward pass, in which
    no gradients are sent.
    """
    times, part = _row_times_s(model, step), model.graph.ops.step_part
    backward = _runs_in_backward(model.graph)
    forward_s = float(times[(part == StepPart.FORWARD) & ~backward].sum())
    backward_s = float(times[backward].sum())
    is_pass = (model.ops.step_part != StepPart.OPTIMIZER).astype(float)
    is_first = is_pass * (1.0 - _sums_of_gradients(model) if first_writes else 1.0)
    added_s = step.overhead_s - step.loop_s - step.transfer_s
    idle_s = step.host_s - float(step.launch_s.sum())
    whole_s, passes_s, first_s = (
        float(smooth_maximum((step.kernel_s * share).sum(), idle_s + (step.launch_s * share).sum())) + added_s
        for share in (np.ones_like(is_pass), is_pass, is_first)
    )
    total_s = step.step_s.value - step.loop_s - step.transfer_s
    scale = total_s * passes_s / (whole_s * max(forward_s + backward_s, 1e-30))
    return Pass(
        forward_s=forward_s * scale + step.loop_s,
        backward_s=backward_s * scale,
        optimizer_s=total_s * (1.0 - passes_s / whole_s) + step.transfer_s,
        sums_s=total_s * (passes_s - first_s) / whole_s,
    )


def _sums_of_gradients(model: PreparedModel) -> Floats:
    """Share of each distinct kernel's launches that adds a gradient to the one before, (kernels,)."""
    ops, sizes = model.graph.ops, _gradient_sizes_bytes(model.graph)
    adds = (ops.op_class == OpClass.ADD) & (ops.step_part == StepPart.BACKWARD) & (ops.in_place > 0)
    launches = np.where(
        adds & np.isin(ops.write_bytes[:, 0], sizes) & (ops.write_bytes[:, 1] == 0), ops.count, 0.0
    )
    # A weight that is used twice has one more of them in every pass.
    launches *= min(1.0, float(sizes.sum()) / max(float(launches @ ops.write_bytes[:, 0]), 1e-30))
    share: Floats = np.bincount(model.ops.group_of_row, launches, len(model.ops.count)) / model.ops.count
    return share


def _runs_in_backward(graph: Graph) -> Bools:
    """True for the operations of the backward pass, those of the forward pass that it repeats among them, (rows,)."""
    found: Bools = np.isin(graph.ops.step_part, (StepPart.BACKWARD, StepPart.WEIGHT_GRADIENT)) | (
        graph.ops.recomputed > 0
    )
    return found


def gradients_of(model: PreparedModel, step: StepPrediction) -> tuple[Gradient, ...]:
    """Gradients in the order in which the backward pass allocates them, and how much of the pass is over by then.

    What is written in the backward pass and does not grow with the batch are gradients and the casts of them.
    Gradient i is ready when the written share of all such bytes reaches its own share of all gradients.
    """
    sizes = _gradient_sizes_bytes(model.graph)
    ops = model.graph.ops
    rows = np.flatnonzero(_runs_in_backward(model.graph))
    times = _row_times_s(model, step)[rows]
    # Weights written out again for a repeated forward pass are no gradients.
    written = ops.write_bytes[rows, 0] * ops.count[rows] * (1.0 - ops.recomputed[rows])
    if not len(sizes) or written.sum() <= 0 or times.sum() <= 0:
        return tuple(Gradient(size_bytes=float(size), ready_share=1.0) for size in sizes)
    clock = np.cumsum(times) / times.sum()
    share_written = np.cumsum(written) / written.sum()
    share_wanted = np.cumsum(sizes) / sizes.sum()
    # The small amount keeps rounding from moving a gradient behind the operation that made it.
    at = np.minimum(np.searchsorted(share_written, share_wanted - 1e-9), len(clock) - 1)
    ready = np.maximum.accumulate(clock[at])
    ready[-1] = 1.0  # the backward pass ends with a gradient
    return tuple(
        Gradient(size_bytes=float(size), ready_share=float(r)) for size, r in zip(sizes, ready, strict=True)
    )


def _gradient_sizes_bytes(graph: Graph) -> Floats:
    """Sizes of the gradients in the order of the backward pass, (gradients,) [bytes].

    The stream has two equal steps, and only one of them marks its gradients where they are kept in between.
    """
    stream = graph.memory
    begins = np.flatnonzero(stream.event == MemoryEvent.BACKWARD_BEGINS).tolist()
    is_gradient = (stream.kind == AllocationKind.GRADIENT) & (stream.event == MemoryEvent.ALLOCATE)
    ends = [*begins[1:], len(stream)]
    for begin, end in zip(begins, ends, strict=True):
        sizes: Floats = stream.size_bytes[begin:end][is_gradient[begin:end], 0]
        if len(sizes):
            return sizes
    return np.empty(0)


def batch_norms(graph: Graph) -> tuple[int, float]:
    """Number of batch norms of the forward pass and mean bytes of their statistics (mean, variance and count)."""
    ops = graph.ops
    rows = np.flatnonzero((ops.op_class == OpClass.BATCH_NORM) & (ops.step_part == StepPart.FORWARD))
    number = int(ops.count[rows].sum())
    if not number:
        return 0, 0.0
    # A batch norm writes the saved mean and deviation beside its output: what does not grow with the batch.
    return number, float((ops.write_bytes[rows, 0] * ops.count[rows]).sum()) / number


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """One micro-step of one device at one batch size, taken apart.

    Attributes:
        alone: The prediction of it.
        parts: Forward, backward, optimizer.
        gradient_bytes: All gradients [bytes].
        buckets: Gradients in the order they are sent.
        num_batch_norms: Batch norms of the forward pass.
        batch_norm_bytes: Statistics of one [bytes].
    """

    alone: StepPrediction
    parts: Pass
    gradient_bytes: float
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
    about = all_reduce_of(cluster, settings.all_reduce)
    if settings.strategy is Strategy.MIRRORED:
        parts = _mirrored(one, about, batch_size_per_device)
    else:
        parts = data_parallel_step(
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
    peak_s = settings.num_accumulation_steps * one.alone.least_s
    # The scatter of scaling is that of communication: it does not reach below what a device computes.
    low_s = parts.step_s * one.step_s.value / one.step_s.high
    least_s = max(min(low_s, parts.compute_s), peak_s)
    return widened(parts.step_s, one.step_s, table.spread_of(kind), least_s), parts


def drag_of(run: Run) -> float:
    """Variation of the step between devices that wait: the coefficient that was given, or that of such links."""
    return _constants(load_scaling_table(), run.sharing, link_class(run.cluster)).drag


def _constants(table: ScalingTable, settings: Sharing, kind: str) -> ScalingConstants:
    stack = "tensorflow" if settings.strategy is Strategy.MIRRORED else "pytorch"
    # Processes on a processor hide nothing: the cores that send are those that compute. Their link is a measured one.
    found = ScalingConstants(slowdown=1.0) if kind == LinkKind.HOST else table.of(stack, kind)
    drag = settings.coefficient_of_variation
    return found if drag is None else replace(found, drag=drag)


def _mirrored(one: OneStep, about: AllReduce, batch_size_per_device: int) -> DataParallelStep:
    loop_s = one.alone.loop_s  # it runs once, whatever the number of replicas
    alone_s = max(one.parts.total_s - loop_s, 1e-12)
    device_s = device_part_s(alone_s, one.host_s)
    reduce_s = about.time_s(one.gradient_bytes)
    split = HostAndDevice(
        host_s=one.host_s, device_fixed_s=0.0, device_per_sample_s=device_s / batch_size_per_device
    )
    step_s = mirrored_step_s(split, batch_size_per_device, about.num_devices, reduce_s)
    # What the step grew by is communication first; the rest is the host, which launches all replicas.
    exposed_s = min(reduce_s, max(0.0, step_s - alone_s))
    return DataParallelStep(
        compute_s=device_s,
        exposed_s=exposed_s,
        overhead_s=max(0.0, step_s - device_s - exposed_s) + loop_s,
        communication_s=reduce_s,
    )


def one_steps(
    model: PreparedModel, run: Run, batch_sizes: Sequence[int], weights: CostModel
) -> list[OneStep]:
    """Micro-steps of one device at several batch sizes, taken apart; remembered, for they are often asked again.

    Args:
        model: The traced step.
        run: Setup, device, software and buckets; its batch size is not looked at.
        batch_sizes: Samples of a micro-step.
        weights: The cost model.
    """
    # The batch sizes are a part of the key themselves.
    general = replace(run.setup, batch_size_per_device=1)
    bucket_bytes, version = run.sharing.bucket_bytes, run.software.torch_version
    return _ONE_STEPS.get(
        (model, run.cluster.device, weights),
        (general, tuple(batch_sizes), version, bucket_bytes),
        lambda: _taken_apart(model, run, batch_sizes, weights),
    )


def _taken_apart(
    model: PreparedModel, run: Run, batch_sizes: Sequence[int], weights: CostModel
) -> list[OneStep]:
    setups = [replace(run.setup, batch_size_per_device=size) for size in batch_sizes]
    steps = predict_steps(model, run.cluster.device, setups, weights, run.software.torch_version)
    first_writes = run.setup.keeps_gradients and run.setup.zero_grad_to_none
    number, statistics = batch_norms(model.graph)
    found = []
    for step in steps:
        gradients = gradients_of(model, step)
        found.append(
            OneStep(
                alone=step,
                parts=pass_of(model, step, first_writes=first_writes),
                gradient_bytes=sum(gradient.size_bytes for gradient in gradients),
                buckets=gradient_buckets(gradients, run.sharing.bucket_bytes or DEFAULT_BUCKET_BYTES),
                num_batch_norms=number,
                batch_norm_bytes=statistics,
            )
        )
    return found


def replica_step(model: PreparedModel, run: Run, one: OneStep) -> DividedStep:
    """The step of devices that have the whole model each, or of several micro-steps on one device.

    Args:
        model: The traced step.
        run: The run.
        one: One micro-step of one device at its batch size.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    table, batch_size = load_scaling_table(), run.setup.batch_size_per_device
    step_s, found = scaled_step(one, run.cluster, run.sharing, table, batch_size)
    parts = _computation(run, one.alone.breakdown, found.compute_s)
    shared = [BreakdownPart(name, getattr(found, key)) for key, name in _SHARED_PARTS]
    shared = [part for part in shared if part.time_s > 0]
    if shared:
        parts = sorted([*parts, *shared], key=lambda part: -part.time_s)
    return DividedStep(
        step_s=step_s,
        model=model,
        alone=one.alone,
        parts=tuple(parts),
        compute_s=found.compute_s,
        exposed_s=found.exposed_s,
        communication_s=found.communication_s,
        gradient_bytes=one.gradient_bytes,
    )


def _computation(run: Run, alone: Sequence[BreakdownPart], compute_s: float) -> list[BreakdownPart]:
    """Parts of what each device computes: all micro-steps, then one update."""
    alone_s = sum(part.time_s for part in alone)
    if run.sharing.strategy is Strategy.MIRRORED:  # the host's work is counted apart
        return [BreakdownPart(part.name, part.time_s * compute_s / alone_s) for part in alone]
    update_s = sum(part.time_s for part in alone if part.name == _UPDATE_PART)
    scale = max(0.0, compute_s - update_s) / max(alone_s - update_s, 1e-30)
    return [
        part if part.name == _UPDATE_PART else BreakdownPart(part.name, part.time_s * scale) for part in alone
    ]
