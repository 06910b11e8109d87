"""Time of a training step from the fitted op-level model, on NumPy alone.

The equations are those of ``evidence.fitting.op_time_fit``; this module evaluates them for many (device, configuration)
points of one model at once. The members of an ensemble are averaged in log space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.base.errors import CostModelError
from forerun.base.kept import Kept
from forerun.cost.time.features import (
    Point,
    counts,
    dynamic_features,
    format_classes,
    multiplies_half,
    peak_rates,
    point_arrays,
    static_features,
)
from forerun.cost.time.kernel_laws import Kernels, is_replayed, longest_times_s, terms_in_step
from forerun.cost.time.law import (
    CONVOLUTIONS,
    LAW_CLASSES,
    LEAST_LAUNCH_S,
    MAX_LATENCY_S,
    NUM_LATENTS,
    NUM_PAIRS,
    SMOOTH_STEP,
    KernelTerms,
    busy_times,
    shortness,
)
from forerun.cost.time.rows import DistinctOps, on_four_bytes
from forerun.cost.time.weights import NUM_CIRCUMSTANCES, CostModel, NetworkWeights, circumstance_flags
from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices.device import NumberFormat
from forerun.question.setup import Phase, Precision, TrainingSetup

Floats = npt.NDArray[np.float64]
Floats32 = npt.NDArray[np.float32]

_Columns = TypeVar("_Columns", bound=Any)

# Thirty million years: a longer step comes from a damaged file.
_LONGEST_S = 1e15
_SMALL_LAUNCH_S = 60e-6
_SMALL_HALF_LAUNCH_S = 4 * _SMALL_LAUNCH_S
"""The same for kernels in half precision, which the network may predict several times too slow where they are small."""
_LEAST_OF_SINGLE = (0.89, 0.79)
"""Least time of a step in half precision without matrix units over that in fp32, in training and in inference: 15
networks on a GTX 1080 Ti have 0.89 to 1.38 and 0.79 to 0.92 (``gpu_benchmarks``)."""
_GROWTH_TO_STOP = 1.3
_LARGEST_LOOKED_AT = 2**16
_POINTS_PER_CHUNK = 16
"""Number of points in a chunk: few enough that the chunk's activations stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of p points of one model.

    Attributes:
        step_s: Predicted step time, geometric mean over the ensemble, (p,) [s].
        device_s: Sum of the kernels' times, (p,) [s].
        host_s: Time the host needs to launch the kernels, (p,) [s].
        loop_s: Time that the loop adds to the slower of the two, such as input copies, (p,) [s].
        memory_bound_s: Part of the kernels' time in kernels bound by memory traffic, (p,) [s].
        spread: Standard deviation of the log step over the ensemble, (p,).
        kernel_s: Time of all launches of each distinct kernel, (p, n) [s]; None without ``with_kernels``.
        launch_s: Time the host needs for all launches of each distinct kernel, (p, n) [s]; None without
            ``with_kernels``.
        compute_share: d log(kernel time) / d log(compute time) of each kernel, (p, n); None without ``with_kernels``.
        memory_share: d log(kernel time) / d log(traffic time) of each kernel, (p, n); None without ``with_kernels``.
    """

    step_s: Floats
    device_s: Floats
    host_s: Floats
    loop_s: Floats
    memory_bound_s: Floats
    spread: Floats
    kernel_s: Floats | None = None
    launch_s: Floats | None = None
    compute_share: Floats | None = None
    memory_share: Floats | None = None


def step_times(
    ops: DistinctOps,
    points: Sequence[Point],
    weights: CostModel,
    offsets: Floats,
    *,
    with_kernels: bool = False,
) -> StepTimes:
    """Predicted times of one model at many points.

    A batch never takes longer than a larger one, because it could be padded to that, and kernels in TF32 or on two-byte
    operands no longer than the same ones in single precision. The network knows no such law: kernels far smaller than
    any in its fit may be predicted slower than larger ones. Where launches take less than 60 us on average, larger
    batches (powers of two) are evaluated as well, in half precision below 240 us and in TF32 that gains always single
    precision, and the point takes the times of the quickest.

    Args:
        ops: Distinct kernels of the model's step.
        points: The p devices and configurations.
        weights: The fitted model.
        offsets: Log offsets of each member's compute, memory, host and loop time at each point, (members, p, 4) or
            (members, 1, 4); see ``CostModel.offsets_of_point``.
        with_kernels: True returns the time of each kernel as well.

    Raises:
        CostModelError: The weights, which may come from anybody's file, give no time that a step could take.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        found = _monotonic_times(ops, points, weights, offsets, with_kernels)
    if not np.all((found.step_s > 0) & (found.step_s < _LONGEST_S)):
        raise CostModelError(
            "the fitted cost model gives no time that a step could take; make its file again with: forerun calibrate"
        )
    return found


def _monotonic_times(
    ops: DistinctOps, points: Sequence[Point], weights: CostModel, offsets: Floats, with_kernels: bool
) -> StepTimes:
    offsets = np.broadcast_to(offsets, (len(weights.networks), len(points), NUM_LATENTS))
    found = _times_of_formats(ops, points, weights, offsets, with_kernels)
    num_launches = max(1.0, float(ops.count.sum()))
    # Only where launches are short is the network asked outside of what it was fitted on.
    rows = np.flatnonzero(found.device_s < _SMALL_LAUNCH_S * num_launches)
    sizes = np.asarray([points[int(row)].setup.batch_size_per_device for row in rows], dtype=np.int64)
    last_s = found.step_s[rows]
    while rows.size:
        sizes = 2 ** (np.floor(np.log2(sizes)).astype(np.int64) + 1)
        larger = [
            replace(known, setup=replace(known.setup, batch_size_per_device=int(size)))
            for known, size in zip((points[int(row)] for row in rows), sizes, strict=True)
        ]
        tried = _times_of_formats(ops, larger, weights, offsets[:, rows], with_kernels)
        found = with_rows(found, rows, tried, tried.step_s < found.step_s[rows])
        # A graph that holds for one batch only does not grow at all.
        goes_on = (tried.step_s < _GROWTH_TO_STOP * found.step_s[rows]) & (tried.step_s != last_s)
        goes_on &= sizes < _LARGEST_LOOKED_AT
        rows, sizes, last_s = rows[goes_on], sizes[goes_on], tried.step_s[goes_on]
    return found


def with_rows(times: _Columns, rows: npt.NDArray[np.int64], other: _Columns, chosen: Any) -> _Columns:
    """Columns of a dataclass in which some rows are replaced by rows of another one's."""
    if not chosen.any():
        return times
    values = {}
    for field in fields(times):
        value, theirs = getattr(times, field.name), getattr(other, field.name)
        if is_dataclass(value):
            value = with_rows(value, rows, theirs, chosen)
        elif isinstance(value, tuple):
            replaced = {int(row): theirs[at] for at, row in enumerate(rows) if chosen[at]}
            value = tuple((dict(enumerate(value)) | replaced).values())
        elif value is not None:
            value = value.copy()
            value[rows[chosen]] = theirs[chosen]
        values[field.name] = value
    found: _Columns = replace(times, **values)
    return found


def scaled(times: StepTimes, factor: Floats) -> StepTimes:
    """Times of p points with those of device and host multiplied by a factor of each point, (p,)."""
    return replace(
        times,
        step_s=factor * times.step_s,
        device_s=factor * times.device_s,
        host_s=factor * times.host_s,
        memory_bound_s=factor * times.memory_bound_s,
        kernel_s=None if times.kernel_s is None else factor[:, None] * times.kernel_s,
        launch_s=None if times.launch_s is None else factor[:, None] * times.launch_s,
    )


def _times_of_formats(
    ops: DistinctOps, points: Sequence[Point], weights: CostModel, offsets: Floats, with_kernels: bool
) -> StepTimes:
    """Times at the points, in TF32 and of short launches in half precision no longer than in single precision."""
    found = _times_at(ops, points, weights, offsets, with_kernels)
    # What was measured on a device itself may be otherwise.
    if weights.calibrated_device is not None:
        return found
    has_convolutions = bool(np.isin(ops.op_class, CONVOLUTIONS).any())
    if has_convolutions:
        found = _no_quicker_than_on_vectors(found, ops, points, weights, offsets, with_kernels)
    num_launches = max(1.0, float(ops.count.sum()))
    longest_s = np.asarray([_longest_launch_s(point) for point in points])
    rows = np.flatnonzero(found.device_s < longest_s * num_launches)
    # PyTorch's own single precision bounds half precision as well: convolutions in TF32, products in fp32.
    mixed = [
        has_convolutions
        and points[int(row)].setup.precision.is_half
        and NumberFormat.TF32 in points[int(row)].device.peak_flops_per_s
        for row in rows
    ]
    for kept, convolutions in ((rows, None), (rows[np.flatnonzero(mixed)], Precision.TF32)):
        if kept.size:
            single = [_in_single_precision(points[int(row)], convolutions) for row in kept]
            tried = _times_at(_single_of(ops), single, weights, offsets[:, kept], with_kernels)
            found = with_rows(found, kept, tried, tried.step_s < found.step_s[kept])
    return found


_SINGLE: Kept[DistinctOps] = Kept(64)
_STATIC: Kept[Floats32] = Kept(64)


def _single_of(ops: DistinctOps) -> DistinctOps:
    return _SINGLE.get((ops,), (), lambda: on_four_bytes(ops))


def _static_of(ops: DistinctOps) -> Floats32:
    return _STATIC.get((ops,), (), lambda: static_features(ops).astype(np.float32))


def _no_quicker_than_on_vectors(
    found: StepTimes,
    ops: DistinctOps,
    points: Sequence[Point],
    weights: CostModel,
    offsets: Floats,
    with_kernels: bool,
) -> StepTimes:
    """Times in which half precision without matrix units saves no more on the device than was measured."""
    rows = np.asarray(
        [
            row
            for row, point in enumerate(points)
            if point.setup.precision.is_half
            and point.device.vendor == "nvidia"
            and not multiplies_half(point.device, point.setup.precision)
        ],
        dtype=np.int64,
    )
    if not rows.size:
        return found
    single = [_in_single_precision(points[int(row)], None) for row in rows]
    tried = _times_at(_single_of(ops), single, weights, offsets[:, rows], with_kernels)
    is_training = np.asarray([point.setup.phase is Phase.TRAIN for point in single])
    share = np.where(is_training, *_LEAST_OF_SINGLE)
    least = replace(scaled(tried, share), host_s=tried.host_s, launch_s=tried.launch_s)
    return with_rows(found, rows, least, least.step_s > found.step_s[rows])


def _longest_launch_s(point: Point) -> float:
    """Mean launch below which kernels of single precision, which a library could run as well, may be quicker [s]."""
    half, full, _ = peak_rates(point.device, point.setup.precision)
    in_tf32 = Precision.TF32 in (point.setup.precision, point.setup.of_convolutions)
    if in_tf32 and (peak := point.device.peak_flops_per_s.get(NumberFormat.TF32)):
        # Without a gain in TF32 Winograd in fp32 would win, but cuDNN does not take it (ResNet-18 on an RTX 3060).
        return np.inf if peak > point.device.peak_flops_per_s[NumberFormat.FP32] else _SMALL_LAUNCH_S
    # Without matrix units half precision saves traffic, but training in it was measured 1.4 times as slow.
    is_quicker = half > full or point.setup.phase is not Phase.TRAIN
    return _SMALL_HALF_LAUNCH_S if point.setup.precision.is_half and is_quicker else 0.0


def _in_single_precision(point: Point, convolutions: Precision | None) -> Point:
    """The point in fp32; ways to save memory, some of which need half precision, are in the kernels already."""
    own = point.setup
    setup = TrainingSetup(
        batch_size_per_device=own.batch_size_per_device,
        convolution_precision=convolutions,
        phase=own.phase,
        layout=own.layout,
        compile=own.compile,
        host_slowdown=own.host_slowdown,
    )
    return replace(point, setup=setup, known_as=None)


_KEPT: dict[bool, Kept[tuple[Any, ...]]] = {False: Kept(8_192), True: Kept(128)}
"""Columns of ``StepTimes`` at single points, without and with those of kernels, which are large."""


def _times_at(
    ops: DistinctOps,
    points: Sequence[Point],
    weights: CostModel,
    offsets: Floats,
    with_kernels: bool,
) -> StepTimes:
    """Times at the points as the network predicts them.

    Points are remembered: formats bound each other, and batches those below them, so half of a plan's points are asked
    for more than once.
    """
    kept = _KEPT[with_kernels]
    parts = [(ops, weights, point.device) for point in points]
    keys = [
        (point.setup, point.uses_layer_norm, point.era, point.known_as, offsets[:, index].tobytes())
        for index, point in enumerate(points)
    ]
    rows: list[Any] = [kept.find(*each) for each in zip(parts, keys, strict=True)]
    missing = [index for index, row in enumerate(rows) if row is None]
    for begin in range(0, len(missing), _POINTS_PER_CHUNK):
        chunk = missing[begin : begin + _POINTS_PER_CHUNK]
        asked = [points[index] for index in chunk]
        found = _chunk_times(ops, asked, weights, offsets[:, chunk], with_kernels)
        columns = [getattr(found, field.name) for field in fields(StepTimes)]
        for number, index in enumerate(chunk):
            # Copies: a view would keep its whole chunk.
            rows[index] = tuple(np.copy(column[number]) for column in columns if column is not None)
            kept.keep(parts[index], keys[index], rows[index])
    names = [field.name for field in fields(StepTimes)]
    # Without kernels their columns, the last ones, are missing.
    return StepTimes(**dict(zip(names, map(np.stack, zip(*rows, strict=True)), strict=False)))


def _chunk_times(
    ops: DistinctOps,
    points: Sequence[Point],
    weights: CostModel,
    offsets: Floats,
    with_kernels: bool,
) -> StepTimes:
    arrays = point_arrays(points)
    known = Kernels.at(ops, arrays)
    is_law = np.isin(ops.op_class, LAW_CLASSES)
    # A law of tiles needs no bound, nor does a network that has seen the smallest kernels of its device.
    terms = terms_in_step(known)
    replayed = is_replayed(ops)
    is_free = ((terms.is_law > 0) & ~replayed) | weights.is_refined
    most_s = np.where(is_free, np.inf, np.maximum(longest_times_s(known), terms.least_compute))
    by_network = np.flatnonzero(~is_law)
    pair = ops.op_class * len(StepPart) + ops.step_part
    dynamic = dynamic_features(
        ops.take(by_network), arrays, known.work_s[:, by_network], known.traffic_s[:, by_network]
    )
    kernels = _Kernels(
        by_network=by_network,
        static=_static_of(ops)[by_network],
        shared=arrays.features.astype(np.float32),
        dynamic=dynamic,
        terms=terms,
        most_s=most_s,
        replayed=np.flatnonzero(replayed),
        counts=counts(ops, arrays) * _class_factors(ops, points, weights),
        launches=counts(ops, arrays),
        pair=pair,
        format_class=format_classes(ops, arrays),
        is_compiled=arrays.is_compiled[:, 0],
        least_launch_s=LEAST_LAUNCH_S[pair] * (arrays.is_compiled == 0) * weights.has_least_launches,
        slowdown=np.asarray([point.setup.host_slowdown for point in points]),
        # A network refined on its device has measured what the datasheet only promises.
        is_bounded=not weights.is_refined,
        short_offset=weights.short_offset,
    )
    law = weights.size_law
    size_factors = np.ones(len(points)) if law is None else np.exp(law.log_factors(log_sizes(ops, points)))
    of_devices = _known_offsets(points, weights)
    members = [
        _member_times(network, kernels, offset, of_devices[index])
        for index, (network, offset) in enumerate(zip(weights.networks, offsets, strict=True))
    ]
    nearness, own = weights.nearness_to_runs(ops, [point.setup for point in points])
    overall = np.exp(weights.overall_offset + _circumstances(points, weights) + nearness * own) * size_factors
    members = [
        replace(
            member,
            device_s=member.device_s * overall,
            host_s=member.host_s * overall,
            loop_s=member.loop_s * overall,
            kernel_s=member.kernel_s * overall[:, None],
            launch_s=member.launch_s * overall[:, None],
        )
        for member in members
    ]
    # Members are joined in the logarithm, in which their errors are alike in both directions.
    logs = np.log([smooth_maximum(member.device_s, member.host_s) + member.loop_s for member in members])

    def mean(values: list[Floats]) -> Floats:
        return np.asarray(sum(values) / len(values))

    kernel_s = [member.kernel_s for member in members]
    shares = {
        "kernel_s": mean(kernel_s),
        "launch_s": mean([member.launch_s for member in members]),
        "compute_share": mean([member.compute_share for member in members]),
        "memory_share": mean([member.memory_share for member in members]),
    }
    return StepTimes(
        step_s=np.exp(logs.mean(axis=0)),
        device_s=mean([member.device_s for member in members]),
        host_s=mean([member.host_s for member in members]),
        loop_s=mean([member.loop_s for member in members]),
        memory_bound_s=mean([(m.kernel_s * (m.memory_share > m.compute_share)).sum(axis=1) for m in members]),
        spread=logs.std(axis=0),
        **(shares if with_kernels else {}),
    )


@dataclass(frozen=True, slots=True)
class _Member:
    """Times of one member of the ensemble; names as in ``StepTimes``."""

    device_s: Floats
    host_s: Floats
    loop_s: Floats
    kernel_s: Floats
    launch_s: Floats
    compute_share: Floats
    memory_share: Floats


def log_sizes(ops: DistinctOps, points: Sequence[Point]) -> Floats:
    """Logarithms of the work [FLOP] and the traffic [bytes] of a step at each of p points, (p, 2)."""
    batches = np.asarray([point.setup.batch_size_per_device for point in points], dtype=np.float64)
    sums = [ops.count @ sizes for sizes in (ops.flops, ops.moved_bytes)]  # (constant, per sample) of each
    logs: Floats = np.log(
        np.maximum(1.0, np.stack([fixed + batches * slope for fixed, slope in sums], axis=1))
    )
    return logs


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernels:
    """Figures of the n kernels at p points that all members share.

    Attributes:
        by_network: Rows whose time a network gives; the others have a closed law, (b,).
        static: Their static features, (b, features).
        shared: Features of the points, (p, features).
        dynamic: Features of those rows at the points, (p, b, features).
        terms: What physics says, (p, n).
        most_s: What a kernel takes at most, (p, n) [s].
        replayed: Rows of which this counts the latency as well, (r,).
        counts: Launches times the factor of the class on a calibrated device, (p or 1, n).
        launches: Launches, (p or 1, n).
        pair: Class and part of the step, (n,).
        format_class: Place in the tables of offsets, (p, n).
        is_compiled: Whether a compiler joined operations, (p,).
        least_launch_s: Least time of the host to launch a kernel, (p, n) [s].
        slowdown: Times that the host is slower than usual, (p,).
        is_bounded: Whether no kernel beats the datasheet.
        short_offset: Log offset of the shortest kernels.
    """

    by_network: npt.NDArray[np.int64]
    static: Floats32
    shared: Floats32
    dynamic: Floats32
    terms: KernelTerms
    most_s: Floats
    replayed: npt.NDArray[np.int64]
    counts: Floats
    launches: Floats
    pair: npt.NDArray[np.int64]
    format_class: npt.NDArray[np.int64]
    is_compiled: Floats
    least_launch_s: Floats
    slowdown: Floats
    is_bounded: bool
    short_offset: float


def _known_offsets(points: Sequence[Point], weights: CostModel) -> Floats:
    """Offsets of each point's device and architecture by (format, class), (members, p, formats * classes)."""
    known: dict[str, Floats] = {}
    for point in points:
        device = point.device
        if device.name not in known:
            known[device.name] = weights.offsets_of_kernels(device)
    return np.stack([known[point.device.name] for point in points], axis=1)


def _class_factors(ops: DistinctOps, points: Sequence[Point], weights: CostModel) -> Floats | float:
    """Factor of each kernel's time on a calibrated device, (p or 1, n)."""
    if not weights.class_offsets:
        return 1.0
    offsets = np.asarray(weights.class_offsets)[None, ops.op_class]
    if weights.circumstance_offsets:
        is_half = np.asarray([[circumstance_flags(point.setup)[0]] for point in points])
        offsets = (
            offsets + is_half * np.asarray(weights.circumstance_offsets[NUM_CIRCUMSTANCES:])[ops.op_class]
        )
    factors: Floats = np.exp(offsets)
    return factors


def _circumstances(points: Sequence[Point], weights: CostModel) -> Floats:
    """Log offset of a calibrated device's steps by half precision, layout and compiler, (p,)."""
    flags = np.asarray([circumstance_flags(point.setup) for point in points], dtype=np.float64)
    own = weights.circumstance_offsets[:NUM_CIRCUMSTANCES] or np.zeros(NUM_CIRCUMSTANCES)
    found: Floats = flags @ np.asarray(own)
    return found


def _member_times(network: NetworkWeights, kernels: _Kernels, offset: Floats, known: Floats) -> _Member:
    """Times by one member; ``offset`` of the systems, (p, 4), and ``known`` of the devices, (p, formats * classes)."""
    u = _network_outputs(network, kernels)
    known_f = np.take_along_axis(known, np.broadcast_to(kernels.format_class, u.shape[:2]), axis=1)
    law_index = (kernels.format_class // len(OpClass)) * NUM_PAIRS + kernels.pair
    compute, memory = busy_times(
        np,
        kernels.terms,
        (u[..., 0], u[..., 1]),
        network.law_factor[law_index],
        known_f + offset[:, :1],
        known_f + offset[:, 1:2],
        kernels.is_bounded,
    )
    # Divided by the larger one first, so that fourth powers of short times stay far from the smallest floats.
    largest = np.maximum(compute, memory) + 1e-15
    compute_power, memory_power = _fourth(compute / largest), _fourth(memory / largest)
    total_power = compute_power + memory_power
    # Square roots and products are quicker than powers, and a grid has many kernels.
    busy = np.minimum(largest * np.sqrt(np.sqrt(total_power)), kernels.most_s)
    shape = network.latency[kernels.pair] + np.clip(u[..., 2], -1.5, 1.5)
    latency = MAX_LATENCY_S * np.reciprocal(1.0 + np.exp(-shape))
    kernel = busy + latency
    if kernels.replayed.size:
        rows = kernels.replayed
        kernel[:, rows] = np.minimum(kernel[:, rows], kernels.most_s[:, rows])
    part = busy / kernel / (total_power + 1e-30)
    kernel_s = kernel * kernels.counts
    if kernels.short_offset:
        kernel_s = kernel_s * np.exp(kernels.short_offset * shortness(kernel))
    launches = kernels.launches * np.maximum(
        np.exp(network.host[kernels.pair].astype(np.float64)), kernels.least_launch_s
    )
    slowness = kernels.slowdown * np.exp(kernels.is_compiled * network.host_compiled + offset[:, 2])
    launch_s = launches * slowness[:, None]
    host_s = np.exp(network.host_constant) + launch_s.sum(axis=1)
    return _Member(
        device_s=kernel_s.sum(axis=1),
        host_s=host_s,
        loop_s=np.exp(network.loop + offset[:, 3]),
        kernel_s=kernel_s,
        launch_s=launch_s,
        compute_share=compute_power * part,
        memory_share=memory_power * part,
    )


def smooth_maximum(device_s: Floats, host_s: Floats) -> Floats:
    """(T^6 + H^6)^(1/6): the host and the device work at the same time, the slower one decides [s]."""
    # Divided by the larger one, so that the sixth power stays within what floats hold.
    top = np.maximum(device_s, host_s)
    powers = (device_s / top) ** SMOOTH_STEP + (host_s / top) ** SMOOTH_STEP
    scaled: Floats = top * powers ** (1 / SMOOTH_STEP)
    return scaled


_HOST_SPREAD = 0.42
"""Standard deviation of the log time of a host for a launch over 13 machines (``least_launches_s``)."""


def host_spread(times: StepTimes) -> Floats:
    """Standard deviation of log steps by what machines differ in their hosts, as far as these decide, (p,)."""
    found: Floats = _HOST_SPREAD / (1.0 + (times.device_s / times.host_s) ** SMOOTH_STEP)
    return found


def _hard_swish(values: Floats32) -> Floats32:
    """Hard swish, x min(max(x + 3, 0), 6) / 6, in the array's own memory as far as it can."""
    gate = values + 3.0
    np.clip(gate, 0.0, 6.0, out=gate)
    gate *= values
    gate *= 1.0 / 6.0
    return gate


def _fourth(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    # NumPy's own fourth power takes 1.6 times as long.
    square: npt.NDArray[Any] = values * values
    fourth: npt.NDArray[Any] = square * square
    return fourth


def _normal(features: Floats32, network: NetworkWeights, part: slice) -> Floats32:
    # As the fit does: the network has never seen a larger number.
    normal: Floats32 = np.clip((features - network.mean[part]) / network.scale[part], -4.0, 4.0)
    return normal


def _product(values: Floats32, weight: Floats32) -> Floats32:
    """Values times the transposed weight, (p, n, a) x (b, a) -> (p, n, b)."""
    # A product for each point: one for all rounds by the company that a point has, and points are kept.
    return np.asarray(np.matmul(values, np.ascontiguousarray(weight.T)))


def _network_outputs(network: NetworkWeights, kernels: _Kernels) -> Floats32:
    """(u_0, u_1, u_2) of each kernel at each point, zero for those with a closed law, (p, n, 3)."""
    num_static, num_shared = kernels.static.shape[1], kernels.shared.shape[1]
    of_static, of_point = slice(0, num_static), slice(num_static, num_static + num_shared)
    of_dynamic = slice(num_static + num_shared, None)
    first = network.first_weight
    hidden = _product(_normal(kernels.dynamic, network, of_dynamic), first[:, of_dynamic])
    hidden += _normal(kernels.static, network, of_static) @ first[:, of_static].T + network.first_bias
    # An input says nothing to the classes that it cannot change.
    seen = _normal(kernels.shared, network, of_point)[:, None] * network.reach
    hidden += _product(seen, first[:, of_point])[:, kernels.pair[kernels.by_network] // len(StepPart)]
    hidden = _product(_hard_swish(hidden), network.second_weight)
    hidden += network.second_bias
    found = np.zeros((len(kernels.shared), len(kernels.pair), 3), dtype=np.float32)
    found[:, kernels.by_network] = _product(_hard_swish(hidden), network.last_weight) + network.last_bias
    return found
