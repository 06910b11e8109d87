"""Features of a kernel, a device and a configuration, the inputs of the op-level model.

Three groups, so that a sweep over many batch sizes and devices computes each only as often as it must:

- static, per kernel: class, part of the step, window, stride, element size;
- point, per (device, configuration): device ratios, precision, layout, software;
- dynamic, per kernel and point: sizes at the batch, tiles per multiprocessor, fill of the last wave,
  alignment, arithmetic intensity against the ridge.

Device figures enter as per-multiprocessor ratios and as times, so that a network fitted on some
GPUs can predict others (Lee, Phanishayee and Mahajan, ASPLOS 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.base.kept import Kept
from forerun.cost.time.law import CONVOLUTIONS, LAW_CLASSES, attention_cost, largest_product_share
from forerun.cost.time.rows import MATRIX_CLASSES, DistinctOps, in_double
from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices.catalogue import devices_of_architecture, outdoes, sustained_clock_share
from forerun.question.devices.device import Device, DeviceKind, NumberFormat
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup

Floats = npt.NDArray[np.float64]

NEWEST_ERA = 1.0
_NEWEST_INDEX = 28
_TILE = 128.0
_MANY_WAVES = 16.0
_PURE_HALF = (Precision.FP16, Precision.BF16)
_ONE = 1e-12

STATIC_FEATURES = (
    *(f"class_{c.name.lower()}" for c in OpClass),
    *(f"part_{p.name.lower()}" for p in StepPart),
    "in_place",
    "permuted",
    "is_strided",
    "is_pointwise",
    "is_3x3",
    "log2_kernel_area",
    "log2_groups",
    "log2_width",
    "log2_serial_steps",
    "is_half",
    "is_wide_index",
    "log2_group_inputs",
    "log2_group_outputs",
    "has_group_kernel",
)
POINT_FEATURES = (
    "log2_ridge",
    "log2_units",
    "log2_l2",
    "log2_peak_per_unit",
    "log2_bandwidth_per_unit",
    "clock",
    "has_matrix_units",
    "is_nhwc",
    "is_autocast",
    "is_pure_half",
    "is_tf32",
    "is_inference",
    "is_compiled",
    "has_layer_norm",
    "has_fused_attention",
    "software_era",
)
DEVICE_FEATURES = POINT_FEATURES[:6]
"""Features with figures of the device: the fit must not memorise a handful of GPUs from them."""


REACH: Mapping[str, tuple[OpClass, ...]] = {
    "has_fused_attention": (OpClass.ATTENTION,),
    # Releases came with the systems that measured them. On one system, 1.10 to 1.12 become 8 % faster (timm_history).
    "software_era": (),
}
"""Classes whose time an input of a point can change; one that is not named here reaches all."""
DYNAMIC_FEATURES = (
    "log2_flops",
    "log2_bytes",
    "log2_intensity",
    "log2_m",
    "log2_n",
    "log2_k",
    "log2_gemm_groups",
    "m_by_8",
    "n_by_8",
    "k_by_8",
    "n_by_64",
    "k_by_64",
    "log2_bytes_over_l2",
    "log2_tiles",
    "log2_tiles_per_unit",
    "wave_fill",
    "tile_use",
    "log2_tile",
    "log2_compute_over_memory",
    "log2_elements_per_unit",
    "log2_roofline_us",
    "resident_share",
)

_L2_BYTES_PER_CYCLE = 64.0
_RESIDENT_SHARE_OF_L2 = 0.6
_FP32_MATRIX_UNITS = ("cdna1", "cdna2")
"""AMD Instinct MI100 and MI200 multiply fp32 on matrix units, at a quarter of fp16 (AMD CDNA 2 white paper, 2021)."""
_FP64_MATRIX_UNITS = ("ampere", "hopper", "cdna2", "cdna3")
"""Architectures whose data-centre dies multiply fp64 on matrix units at twice the vector rate: 19.5 and 9.7 TFLOP/s on
A100 (NVIDIA A100 whitepaper, 2020), 67 and 34 on H100 SXM (H100 whitepaper, 2023), 47.9 and 23.9 on a die of MI250X,
163.4 and 81.7 on MI300X (AMD CDNA 2 and 3 white papers, 2021 and 2023)."""
GROUP_KERNEL_WIDTHS = (4, 8, 16, 32)
"""Channels per group that cuDNN has kernels for matrix units of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One device and configuration at which a step is evaluated.

    Attributes:
        device: The device.
        setup: Batch size, precision, layout and the other settings of training.
        uses_layer_norm: True if the model has layer norms.
        era: Software era, 0 for PyTorch 0.4 to 1 for the newest (``software_era``).
        known_as: Precision of the larger part of the work; None for that of the setup.
    """

    device: Device
    setup: TrainingSetup
    uses_layer_norm: bool = False
    era: float = NEWEST_ERA
    known_as: Precision | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointArrays:
    """Figures of p points as columns (p, 1), ready to broadcast against n kernels.

    Peaks are sustained ones: the datasheet's, scaled by ``clock_share`` to the clock that the power limit allows.
    """

    batch_size: Floats
    peak_half: Floats
    peak_full: Floats
    peak_convolution: Floats
    peak_vector: Floats
    peak_double: Floats
    peak_double_vector: Floats
    bandwidth: Floats
    num_units: Floats
    l2_bytes: Floats
    l2_bandwidth: Floats
    clock_share: Floats
    product_share: Floats
    attention_cost: Floats
    is_gpu: Floats
    half_has_matrix_units: Floats
    full_has_matrix_units: Floats
    convolution_has_matrix_units: Floats
    is_compiled: Floats
    has_direct_groups: Floats
    is_pure_half: Floats
    is_autocast: Floats
    is_inference: Floats
    features: Floats

    def __len__(self) -> int:
        return len(self.batch_size)


def software_era(torch_version: str) -> float:
    """Position of a PyTorch version between 0.4 (0) and 2.9 (1), by minor releases.

    1.x counts from 5 (1.0) to 18 (1.13), 2.x on from 19; newer versions stay at 1.
    """
    major, minor = (
        int("".join(ch for ch in part if ch.isdigit()) or 0) for part in (*torch_version.split("."), "0")[:2]
    )
    # 1.13 was the last of 1.x: a larger number must not pass for a release of 2.x.
    index = {0: minor, 1: 5 + min(minor, 13), 2: 19 + minor}.get(major, _NEWEST_INDEX)
    return float(np.clip((index - 4) / (_NEWEST_INDEX - 4), 0.0, 1.0))


def peak_rates(device: Device, precision: Precision) -> tuple[float, float, float]:
    """Peak of 2-byte products, of 4-byte products, and of vector work [FLOP/s].

    A format the device lacks falls back to the next slower one: bf16 to fp32, tf32 to fp32. Frameworks add products of
    half precision up in fp32, which doubles no rate without matrix units: DeepBench's P100 multiplies at 9.1 TFLOP/s
    in both formats, where its datasheet has 9.3 and 18.7.
    """
    peaks = device.peak_flops_per_s
    vector = peaks[NumberFormat.FP32]
    half = peaks.get(half_format(precision), vector)
    if device.vendor == "nvidia" and not device.has_matrix_units:
        half = min(half, vector)
    return half, _full_rate(device, precision), vector


_SUSTAINED: Kept[float] = Kept(1_024)


def sustained_share(device: Device, precision: Precision) -> float:
    """Share of the boost clock that products in a precision sustain (``sustained_clock_share``).

    A device reaches what any board of its architecture does that it outdoes, whose units some of its own could be: the
    power of a FLOP in fp32 says too little where a datasheet halves the rate of matrix units, as that of L40 does.
    """

    def share() -> float:
        boards = [board for board in devices_of_architecture(device.architecture) if outdoes(device, board)]
        own = product_rate(device, precision)
        rates = [product_rate(board, precision) / own * sustained_clock_share(board) for board in boards]
        return min(max(rates, default=0.0), 1.0)

    own = sustained_clock_share(device)
    return own if own == 1.0 else max(own, _SUSTAINED.get((device,), (precision,), share))


def product_rate(device: Device, precision: Precision) -> float:
    """Peak of products in a precision [FLOP/s]."""
    half, full, _ = peak_rates(device, precision)
    return half if precision.is_half else full


def half_format(precision: Precision) -> NumberFormat:
    """Format of two-byte operands."""
    return NumberFormat.BF16 if precision in (Precision.BF16, Precision.AMP_BF16) else NumberFormat.FP16


def _full_rate(device: Device, precision: Precision) -> float:
    """Peak of 4-byte products in fp32 or TF32 [FLOP/s]."""
    peaks = device.peak_flops_per_s
    if precision is Precision.TF32:
        return peaks.get(NumberFormat.TF32, peaks[NumberFormat.FP32])
    if device.architecture in _FP32_MATRIX_UNITS:
        return peaks[NumberFormat.FP16] / 4
    return peaks[NumberFormat.FP32]


def double_rates(device: Device) -> tuple[float, float] | None:
    """Peak of products and of other work in fp64 [FLOP/s]; None where the catalogue has no such rate."""
    vector = device.peak_flops_per_s.get(NumberFormat.FP64)
    if vector is None:
        return None
    has_units = device.architecture in _FP64_MATRIX_UNITS
    # Boards for games and graphics of the same architectures have a small part of the units, and none for matrices.
    is_whole = 2 * vector >= 0.99 * device.peak_flops_per_s[NumberFormat.FP32]
    return (2 * vector if has_units and is_whole else vector), vector


def point_arrays(points: Sequence[Point]) -> PointArrays:
    """Columns of device figures and flags for many points."""
    found = [_figures(point.device, point.setup) for point in points]
    columns = np.asarray([list(each.values()) for each in found], dtype=np.float64).T[:, :, None]
    return PointArrays(
        **dict(zip(found[0], columns, strict=True)),
        features=np.asarray([_point_row(point) for point in points]),
    )


def _figures(device: Device, setup: TrainingSetup) -> dict[str, float]:
    """Figures and flags of a point, by their names in ``PointArrays``."""
    precision, convolutions = setup.precision, setup.of_convolutions
    half, full, vector = peak_rates(device, precision)
    # A device without a known rate is answered at that of fp32, and the answer says so.
    double, double_vector = double_rates(device) or (vector, vector)
    sustained, bandwidth = sustained_share(device, precision), device.memory_bandwidth_bytes_per_s
    on_units = multiplies_half(device, precision)
    l2_bandwidth = _L2_BYTES_PER_CYCLE * device.num_compute_units * device.boost_clock_hz
    return {
        "batch_size": setup.batch_size_per_device,
        "peak_half": half * sustained,
        "peak_full": full * sustained,
        "peak_convolution": _full_rate(device, convolutions) * sustained_share(device, convolutions),
        "peak_vector": vector * sustained,
        "peak_double": double * sustained,
        "peak_double_vector": double_vector * sustained,
        "bandwidth": bandwidth,
        "num_units": device.num_compute_units,
        "l2_bytes": device.l2_cache_bytes,
        # No cache is slower than the memory behind it, whatever the rule of bytes a cycle says of small parts.
        "l2_bandwidth": max(l2_bandwidth, bandwidth),
        "clock_share": sustained,
        "product_share": largest_product_share(device),
        "attention_cost": attention_cost(device),
        "is_gpu": device.kind is DeviceKind.GPU,
        "half_has_matrix_units": on_units,
        "full_has_matrix_units": not precision.is_half and _uses_matrix_units(device, precision),
        "convolution_has_matrix_units": _uses_matrix_units(device, convolutions),
        "is_compiled": setup.compile,
        "has_direct_groups": setup.layout is Layout.NHWC and on_units and setup.phase is Phase.TRAIN,
        "is_pure_half": precision in _PURE_HALF,
        "is_autocast": precision.is_autocast,
        "is_inference": setup.phase is not Phase.TRAIN,
    }


def reach_table() -> npt.NDArray[np.float32]:
    """One where an input of a point reaches a class, else zero, (number of classes, number of ``POINT_FEATURES``)."""
    columns = [np.isin(np.arange(len(OpClass)), REACH.get(name, tuple(OpClass))) for name in POINT_FEATURES]
    return np.column_stack(columns).astype(np.float32)


def _point_row(point: Point) -> list[float]:
    device, setup = point.device, point.setup
    precision = point.known_as or setup.precision
    peak = product_rate(device, precision)
    units = device.num_compute_units
    return [
        np.log2(peak / device.memory_bandwidth_bytes_per_s),
        np.log2(units),
        np.log2(device.l2_cache_bytes),
        np.log2(peak / units / 1e9),
        np.log2(device.memory_bandwidth_bytes_per_s / units / 1e9),
        device.boost_clock_hz / 1e9,
        float(_uses_matrix_units(device, precision)),
        float(setup.layout is Layout.NHWC),
        float(setup.precision.is_autocast),
        float(setup.precision in _PURE_HALF),
        float(precision is Precision.TF32),
        float(setup.phase is not Phase.TRAIN),
        float(setup.compile),
        float(point.uses_layer_norm),
        float(setup.fused_attention),
        point.era,
    ]


def multiplies_half(device: Device, precision: Precision) -> bool:
    """True if matrix units multiply the two-byte operands of a precision; those of Volta and Turing know no bf16."""
    return device.has_matrix_units and half_format(precision) in device.peak_flops_per_s


def _uses_matrix_units(device: Device, precision: Precision) -> bool:
    if precision.is_half:
        return multiplies_half(device, precision)
    return precision is Precision.TF32 and NumberFormat.TF32 in device.peak_flops_per_s


def static_features(ops: DistinctOps) -> Floats:
    """Features of the kernels alone, (n, number of ``STATIC_FEATURES``)."""
    area, stride, groups, width, serial, in_place, permuted, element_bytes = ops.attributes.T
    classes = np.eye(len(OpClass))[ops.op_class]
    parts = np.eye(len(StepPart))[ops.step_part]
    columns = [
        in_place,
        permuted,
        stride > 1,
        # Kernels of 1 x 1 and 3 x 3 have algorithms of their own: plain products, and Winograd.
        area == 1,
        area == 9,
        np.log2(np.maximum(area, 1)),
        np.log2(np.maximum(groups, 1)),
        np.log2(1 + width),
        np.log2(np.maximum(serial, 1)),
        element_bytes == 2,
        (element_bytes == 8) & ~in_double(ops),
        *_group_widths(ops),
    ]
    return np.column_stack([classes, parts, *columns]).astype(np.float64)


def group_inputs(ops: DistinctOps) -> Floats:
    """Input channels per group of convolutions, (n,)."""
    sizes = np.maximum(ops.gemm[..., 0], ops.gemm[..., 1])
    is_weight = ops.step_part == StepPart.WEIGHT_GRADIENT
    found: Floats = np.where(is_weight, sizes[:, 2], sizes[:, 3]) / np.maximum(ops.attributes[:, 0], 1)
    return found


def _group_widths(ops: DistinctOps) -> list[Floats]:
    """Log2 of a grouped convolution's channels per group, in and out, and whether the library has a kernel for them."""
    groups = ops.attributes[:, 2]
    sizes = np.maximum(ops.gemm[..., 0], ops.gemm[..., 1])
    is_weight = ops.step_part == StepPart.WEIGHT_GRADIENT
    is_grouped = groups > 1
    inputs = group_inputs(ops)
    outputs = np.where(is_weight, sizes[:, 1], sizes[:, 2])
    has_kernel = np.isin(np.rint(inputs), GROUP_KERNEL_WIDTHS) & is_grouped
    return [
        np.where(is_grouped, np.log2(np.maximum(inputs, 1.0)), 0.0),
        np.where(is_grouped, np.log2(np.maximum(outputs, 1.0)), 0.0),
        has_kernel,
    ]


def counts(ops: DistinctOps, arrays: PointArrays) -> Floats:
    """Launches of each distinct kernel at each point, (p, n), or (1, n) where nothing is compiled."""
    if not arrays.is_compiled.any():
        return ops.count[None]
    found: Floats = np.where(arrays.is_compiled > 0, ops.joined_count, ops.count)
    return found


def flops_of(ops: DistinctOps, arrays: PointArrays) -> Floats:
    """Work of one kernel at each point, (p, n) [FLOP]."""
    return _either(ops.flops, ops.joined_flops, arrays)


def moved_of(ops: DistinctOps, arrays: PointArrays) -> Floats:
    """Traffic of one kernel at each point, (p, n) [bytes]."""
    return _either(ops.moved_bytes, ops.joined_bytes, arrays)


def _either(eager: Floats, joined: Floats, arrays: PointArrays) -> Floats:
    if not arrays.is_compiled.any():
        return at_batches(eager, arrays)
    return np.where(arrays.is_compiled > 0, at_batches(joined, arrays), at_batches(eager, arrays))


def peaks_of(ops: DistinctOps, arrays: PointArrays) -> Floats:
    """Sustained peak of each kernel's arithmetic at each point, (p, n) [FLOP/s]."""
    is_matrix = np.isin(ops.op_class, MATRIX_CLASSES) & (ops.op_class != OpClass.DEPTHWISE_CONV)
    is_half = ops.attributes[:, 7] == 2
    is_convolution = np.isin(ops.op_class, CONVOLUTIONS)
    full = np.where(is_convolution, arrays.peak_convolution, arrays.peak_full)
    peaks: Floats = np.where(is_matrix, np.where(is_half, arrays.peak_half, full), arrays.peak_vector)
    is_product = is_matrix & ~is_convolution
    double = np.where(is_product, arrays.peak_double, arrays.peak_double_vector)
    return np.where(in_double(ops), double, peaks)


def roofline_terms_s(ops: DistinctOps, arrays: PointArrays) -> tuple[Floats, Floats]:
    """Time of the work at the sustained peak and of the traffic at full bandwidth, each (p, n) [s]."""
    return flops_of(ops, arrays) / peaks_of(ops, arrays), moved_of(ops, arrays) / arrays.bandwidth


WINOGRAD = 2.5
"""F(4 x 4, 3 x 3) needs 36 products for 144; DeepBench's V100 reaches 2.35 times its direct peak in fp32."""


def is_winograd(ops: DistinctOps, arrays: PointArrays) -> npt.NDArray[np.bool_]:
    """True for 3 x 3 convolutions of stride 1 that no matrix unit computes, (p, n)."""
    area, stride, element_bytes = ops.attributes[:, 0], ops.attributes[:, 1], ops.attributes[:, 7]
    on_units = np.where(element_bytes == 2, arrays.half_has_matrix_units, arrays.convolution_has_matrix_units)
    found: npt.NDArray[np.bool_] = (
        (ops.op_class == OpClass.CONV) & (area == 9) & (stride == 1) & (on_units == 0) & (element_bytes <= 4)
    )
    return found


def least_times_s(ops: DistinctOps, points: Sequence[Point]) -> Floats:
    """Time that the products, attention and convolutions of a step need at the dense peak of their formats, (p,) [s].

    No step is shorter, whatever the kernels. Convolutions that may be Winograd's count 1 / 2.5 of their work.
    """
    arrays = point_arrays(points)
    chosen = np.flatnonzero(np.isin(ops.op_class, (*LAW_CLASSES, *CONVOLUTIONS)))
    products = ops.take(chosen)
    work_s = flops_of(products, arrays) / peaks_of(products, arrays)  # at the clock that is sustained
    work_s = np.where(is_winograd(products, arrays), work_s / WINOGRAD, work_s)
    found: Floats = (counts(products, arrays) * work_s * arrays.clock_share).sum(axis=1)
    return found


def resident_share(moved: Floats, arrays: PointArrays) -> Floats:
    """Share of a kernel's traffic that stays in L2: a half where it is 0.6 of the cache, (p, n)."""
    ratio = _RESIDENT_SHARE_OF_L2 * arrays.l2_bytes / np.maximum(moved, 1.0)
    squares = ratio ** (2.0 / np.log(2.0))
    share: Floats = squares / (1.0 + squares)  # sigmoid(2 log2(ratio))
    return share


def format_classes(ops: DistinctOps, arrays: PointArrays) -> npt.NDArray[np.int64]:
    """Index of (format, class) of each kernel at each point in the tables of offsets, (p, n): format * classes + class.

    Formats are those of ``op_law.NUM_FORMATS``: two-byte operands, TF32, anything else.
    """
    element_bytes = ops.attributes[:, 7]
    is_matrix = np.isin(ops.op_class, MATRIX_CLASSES)
    is_convolution = np.isin(ops.op_class, CONVOLUTIONS)
    on_units = np.where(is_convolution, arrays.convolution_has_matrix_units, arrays.full_has_matrix_units)
    is_tf32 = is_matrix & (element_bytes == 4) & (on_units > 0)
    kind = np.where(element_bytes == 2, 0, np.where(is_tf32, 1, 2))
    found: npt.NDArray[np.int64] = kind * len(OpClass) + ops.op_class
    return found


def at_batches(affine: Floats, arrays: PointArrays) -> Floats:
    """Sizes that are affine in the batch at the batch of each point, never below zero, (p, n)."""
    values: Floats = np.maximum(affine[..., 0] + affine[..., 1] * arrays.batch_size, 0.0)
    return values


def _log2(values: Floats) -> Floats:
    """log2 by way of the natural logarithm in single precision, which NumPy computes several at a time."""
    logs: Floats = np.log(np.maximum(values, _ONE).astype(np.float32)) * np.float32(1 / np.log(2))
    return logs


def _tile_size(log2_size: Floats) -> Floats:
    """Edge of the output tile of a product: 128, or the power of two from 16 that covers a smaller side."""
    # Single precision must not lift log2(2^n) over n.
    edges: Floats = np.exp2(np.clip(np.ceil(log2_size - 1e-4), 4.0, 7.0))
    return edges


def dynamic_features(
    ops: DistinctOps, arrays: PointArrays, compute_s: Floats, memory_s: Floats
) -> npt.NDArray[np.float32]:
    """Features that depend on kernel and point, (p, n, number of ``DYNAMIC_FEATURES``)."""
    flops, moved = flops_of(ops, arrays), moved_of(ops, arrays)
    groups, m, n, k = (at_batches(ops.gemm[:, i], arrays) for i in range(4))
    is_matrix = k > 0
    groups, m, n, k = (np.where(is_matrix, np.maximum(size, 1), 1.0) for size in (groups, m, n, k))
    log_m, log_n = _log2(m), _log2(n)
    tile_m, tile_n = _tile_size(log_m), _tile_size(log_n)
    tiles = groups * np.ceil(m / tile_m) * np.ceil(n / tile_n)
    waves = tiles / arrays.num_units
    fill = np.where(waves < _MANY_WAVES, waves / np.ceil(waves), 1.0)
    log_flops, log_moved, log_tiles = _log2(1 + flops), _log2(1 + moved), _log2(tiles)
    log_compute, log_memory = _log2(compute_s + 1e-10), _log2(memory_s + 1e-10)

    def divides(axis: int, size: Floats, by: int) -> Floats:
        # The axis that holds the batch is never the contiguous one of an operand, so its alignment decides nothing.
        grows = ops.gemm[:, axis, 1] > 0
        return np.where(is_matrix & ~grows, np.rint(size) % by == 0, 1.0)

    columns = [
        log_flops,
        log_moved,
        log_flops - log_moved,
        log_m,
        log_n,
        _log2(k),
        _log2(groups),
        divides(1, m, 8),
        divides(2, n, 8),
        divides(3, k, 8),
        divides(2, n, 64),
        divides(3, k, 64),
        log_moved - _log2(arrays.l2_bytes),
        log_tiles,
        log_tiles - _log2(arrays.num_units),
        np.where(is_matrix, fill, 1.0),
        np.where(is_matrix, groups * m * n / (tiles * tile_m * tile_n), 1.0),
        np.where(is_matrix, _log2(tile_m * tile_n / _TILE**2), 0.0),
        log_compute - log_memory,
        _log2(1 + at_batches(ops.elements, arrays)) - _log2(arrays.num_units),
        _log2(np.maximum(compute_s, memory_s) * 1e6 + 1e-3),
        resident_share(moved, arrays),
    ]
    features = np.empty((*flops.shape, len(columns)), dtype=np.float32)
    for index, column in enumerate(columns):
        features[..., index] = column
    return features
