"""Laws of kernels: closed forms of the time of classes of operations, and bounds that no kernel leaves.

A law is one registered function of some classes. Its docstring has the equation, what it was read off, and the source.

=========  =================================================================================
``WORK``   time of a kernel's arithmetic, in place of what the network says
``LEAST``  time that a kernel takes at least
``MOST``   time that a kernel takes at most
=========  =================================================================================

Another package adds a law with an entry point of the group ``forerun.laws`` that names a ``KernelLaw``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.extras import plugin, plugin_names
from forerun.cost.time.features import (
    GROUP_KERNEL_WIDTHS,
    WINOGRAD,
    PointArrays,
    at_batches,
    flops_of,
    group_inputs,
    is_winograd,
    moved_of,
    resident_share,
    roofline_terms_s,
)
from forerun.cost.time.law import (
    CAP_LATENCY_S,
    CONVOLUTIONS,
    ELEMENT_WISE,
    LARGE_STREAM_BYTES,
    LARGE_UPDATE_BYTES,
    LARGEST_SHARE_OF_PEAK,
    LAW_CLASSES,
    LEAST_CONVOLVED_SHARE,
    STREAM_LATENCY_S,
    KernelTerms,
    holds_under_autocast,
    least_stream_share,
)
from forerun.cost.time.rows import DistinctOps, in_double
from forerun.graph.graph import OpClass, StepPart

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


_GROUP = "forerun.laws"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The n distinct kernels of a step at p points, as laws see them.

    Attributes:
        ops: The kernels.
        points: The points.
        flops: Work of one kernel, (p, n) [FLOP].
        moved: Traffic of one kernel, (p, n) [bytes].
        work_s: Time of the work at the sustained peak, (p, n) [s].
        traffic_s: Time of the traffic at full bandwidth, (p, n) [s].
    """

    ops: DistinctOps
    points: PointArrays
    flops: Floats
    moved: Floats
    work_s: Floats
    traffic_s: Floats

    @classmethod
    def at(cls, ops: DistinctOps, points: PointArrays) -> Kernels:
        """The kernels of a step at some points."""
        work_s, traffic_s = roofline_terms_s(ops, points)
        flops, moved = flops_of(ops, points), moved_of(ops, points)
        return cls(ops=ops, points=points, flops=flops, moved=moved, work_s=work_s, traffic_s=traffic_s)


_Times = Callable[[Kernels, Ints], Floats]


class Gives(StrEnum):
    """Meaning of the time of a law."""

    WORK = "work"
    LEAST = "least"
    MOST = "most"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaw:
    """A law of some classes of kernels.

    Attributes:
        name: Its name.
        gives: Meaning of its time.
        op_classes: Classes of kernels it is asked about.
        time_s: Function of the kernels of a step and the rows of these classes (r,) that gives times (p, r) [s]; where
            the law does not hold nan of work, 0 of a least and infinity of a longest time.
    """

    name: str
    gives: Gives
    op_classes: tuple[OpClass, ...]
    time_s: _Times


_LAWS: dict[str, KernelLaw] = {}


def kernel_law(gives: Gives, *op_classes: OpClass) -> Callable[[_Times], _Times]:
    """Registers a law under the name of its function; names are never registered twice."""

    def register(time_s: _Times) -> _Times:
        name = time_s.__name__
        assert name not in _LAWS, f"the law {name} is registered already"
        _LAWS[name] = KernelLaw(name=name, gives=gives, op_classes=op_classes, time_s=time_s)
        return time_s

    return register


@cache
def kernel_laws() -> tuple[KernelLaw, ...]:
    """All laws: those of this module, then those of other packages."""
    return (*_LAWS.values(), *(plugin(_GROUP, name) for name in plugin_names(_GROUP)))


@cache
def _laws_that(gives: Gives) -> tuple[tuple[KernelLaw, npt.NDArray[np.bool_]], ...]:
    """Laws of a kind, each with a table of the classes it is asked about, (number of classes,)."""
    chosen = [law for law in kernel_laws() if law.gives is gives]
    return tuple((law, np.isin(np.arange(len(OpClass)), law.op_classes)) for law in chosen)


def _times_s(gives: Gives, kernels: Kernels) -> list[tuple[Ints, Floats]]:
    """Rows and times of each law of a kind that holds for a kernel of the step."""
    found = []
    for law, is_asked in _laws_that(gives):
        rows = np.flatnonzero(is_asked[kernels.ops.op_class])
        if rows.size:
            found.append((rows, law.time_s(kernels, rows)))
    return found


def kernel_terms(kernels: Kernels) -> KernelTerms:
    """Physical terms of each kernel at each point, arrays (p, n) [s]; see ``cost.time.law``."""
    ops, points = kernels.ops, kernels.points
    # What was just written may still lie in the L2, where the next kernel finds it faster.
    # From one token to the next all weights and the cache pass by: none of them is left in L2.
    is_cold = (ops.law_size > 1) & np.isin(ops.op_class, LAW_CLASSES)
    resident = np.where(is_cold, 0.0, resident_share(kernels.moved, points))
    memory_s = kernels.traffic_s * (1.0 - resident) + kernels.moved * resident / points.l2_bandwidth
    uses_winograd = is_winograd(ops, points)
    over_peak = np.where(np.isin(ops.op_class, LAW_CLASSES), 1.0, _OVER_BOOST) * np.where(
        uses_winograd, WINOGRAD, 1.0
    )
    least_s = kernels.work_s * points.clock_share / (LARGEST_SHARE_OF_PEAK * over_peak)
    for rows, time_s in _times_s(Gives.LEAST, kernels):
        least_s[:, rows] = np.maximum(least_s[:, rows], time_s)
    gain = _winograd_gain(ops)
    compute_s = np.where(uses_winograd & (points.is_gpu > 0), kernels.work_s / gain, kernels.work_s)
    is_law = np.zeros(compute_s.shape, dtype=np.float32)
    for rows, time_s in _times_s(Gives.WORK, kernels):
        # A law says where it does not hold; the network's own time stays there.
        holds = ~np.isnan(time_s)
        compute_s[:, rows] = np.where(holds, time_s, compute_s[:, rows])
        is_law[:, rows] = np.maximum(is_law[:, rows], holds)
    return KernelTerms(compute=compute_s, least_compute=least_s, memory=memory_s, is_law=is_law)


def terms_in_step(kernels: Kernels) -> KernelTerms:
    """Terms of kernels of a step, whose attention is PyTorch's; offsets of devices are those of ``llm/attention``."""
    terms = kernel_terms(kernels)
    # No library has a FlashAttention in single precision.
    is_flash = (kernels.ops.op_class == OpClass.ATTENTION) & (kernels.ops.attributes[:, 7] == 2)
    slowness = np.where(is_flash, kernels.points.attention_cost, 1.0)
    return replace(terms, compute=terms.compute * slowness)


def longest_times_s(kernels: Kernels) -> Floats:
    """Time that each kernel takes at most, (p, n) [s]; infinite without a law."""
    found = np.full(kernels.work_s.shape, np.inf)
    for rows, time_s in _times_s(Gives.MOST, kernels):
        found[:, rows] = np.minimum(found[:, rows], time_s)
    return found


# Winograd needs fewer operations than a direct convolution: it changes the work that all laws start from.

_OVER_BOOST = 1.08
"""Consumer boards run above the boost clock of their datasheets: DeepBench's GTX 1080 Ti reaches 1.07 of its peak."""
_WINOGRAD_GAIN, _WINOGRAD_CHANNELS = 2.6, 80.0
"""Its gain over the direct peak is 2.6 c / (c + 80), at least 1, with c the harmonic mean of the channels: DeepBench
in fp32 has 1.1 at 64 channels, 1.3 at 64 and 128, 2.0 at 128 and 256, 2.3 at 256 and 512 (P100; V100 1.3 and 2.3)."""


def _winograd_gain(ops: DistinctOps) -> Floats:
    """Direct over Winograd time of convolutions with enough tiles, (n,)."""
    # A size of a convolution is constant or grows with the batch: one of its two terms is zero.
    sizes = np.maximum(ops.gemm[..., 0], ops.gemm[..., 1])
    is_weight = ops.step_part == StepPart.WEIGHT_GRADIENT
    area = np.maximum(ops.attributes[:, 0], 1)
    one = np.maximum(np.where(is_weight, sizes[:, 1], sizes[:, 2]), 1.0)
    other = np.maximum(np.where(is_weight, sizes[:, 2], sizes[:, 3]) / area, 1.0)
    channels = 2.0 / (1.0 / one + 1.0 / other)
    gain: Floats = np.maximum(1.0, _WINOGRAD_GAIN * channels / (channels + _WINOGRAD_CHANNELS))
    return gain


TILES = ((256, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32))
"""Tiles, the larger edge first; those of two edges are tried both ways."""

_MOST_PARTS = 16
_HALF_SPEED_QUERIES = 420.0
_ATTENTION_TILE = 128.0


_VECTOR_SHARE = 0.3
"""Share of the vector peak that a product reaches as a streaming kernel."""


@dataclass(frozen=True, slots=True)
class ProductLaw:
    """Fitted constants, for (matrix units, vector units) each.

    Attributes:
        tile_efficiency: Share of the sustained peak that each of ``TILES`` reaches, (2, 6).
        start_columns: Columns of k that the start and end of a tile are worth, (2,).
    """

    tile_efficiency: Any
    start_columns: Any


FITTED_PRODUCT_LAW = ProductLaw(
    tile_efficiency=np.array([[0.86, 0.85, 0.80, 0.70, 0.50, 0.30], [0.94, 0.93, 0.87, 0.60, 0.34, 0.14]]),
    start_columns=np.array([100.0, 13.0]),
)


@kernel_law(Gives.WORK, OpClass.LINEAR, OpClass.BMM)
def products(kernels: Kernels, rows: Ints) -> Floats:
    """Time of matrix products by tiles and waves, in closed form [s].

    A product (m, k) x (k, n), g of them, in tiles of tm x tn, k in s parts, on U multiprocessors that sustain a peak of
    p each:

        t = min over tiles and s of  ceil(g ceil(m / tm) ceil(n / tn) s / U)  2 tm tn (k / s + k0) / (p e_tile)
                                     + [s > 1] 4 (s + 1) g m n / B

    with nine tiles (large ones are efficient, small ones fit), s = 1 or the power of two that fills the device. The
    second line is what the partial sums move. e_tile and k0, the columns of k that a tile's start and end are worth,
    are fitted on products timed alone. Products of a few columns fill no tile: libraries run them as streaming kernels
    on the vector units.

    Evidence: public kernels of docs/methods/op-time.md; products of 4 to 8 columns of CaiT's talking heads.
    Source: NVIDIA 2023, "Matrix Multiplication Background User's Guide" (tiles and waves).
    """
    points = kernels.points
    is_half = kernels.ops.attributes[rows, 7] == 2
    is_double = in_double(kernels.ops)[rows]
    has_matrix_units = np.where(is_half, points.half_has_matrix_units, points.full_has_matrix_units) > 0
    full, vector = (
        np.where(is_double, double, other)
        for double, other in (
            (points.peak_double, points.peak_full),
            (points.peak_double_vector, points.peak_vector),
        )
    )
    peak = np.where(is_half, points.peak_half, full)
    unit = np.where(has_matrix_units & ~is_double, 0, 1)
    times = product_times_s(np, _sizes(kernels, rows), unit, peak, points.num_units, points.bandwidth)
    found: Floats = np.minimum(times, kernels.work_s[:, rows] * peak / (_VECTOR_SHARE * vector))
    return found


def _sizes(kernels: Kernels, rows: Ints) -> tuple[Floats, Floats, Floats, Floats]:
    """(g, m, n, k) of products at the batch sizes of the points, at least one each, (p, r)."""
    sizes = kernels.ops.gemm[rows]
    groups, m, n, k = (np.maximum(at_batches(sizes[:, axis], kernels.points), 1.0) for axis in range(4))
    return groups, m, n, k


def product_times_s(
    xp: Any,
    sizes: tuple[Any, Any, Any, Any],
    unit: Any,
    peak: Any,
    num_units: Any,
    bandwidth: Any,
    law: ProductLaw = FITTED_PRODUCT_LAW,
) -> Any:
    """Time of the arithmetic of products [s]; arrays broadcast against each other.

    Args:
        xp: ``numpy`` or ``torch``.
        sizes: (g, m, n, k), at least one each.
        unit: 0 for matrix units, 1 for vector units, whole numbers.
        peak: Sustained peak of the device [FLOP/s].
        num_units: Multiprocessors.
        bandwidth: Memory bandwidth [bytes/s].
        law: Constants.
    """
    groups, m, n, k = sizes
    start = law.start_columns[unit]
    best = None
    for index, edges in enumerate(TILES):
        per_tile = num_units * 2.0 * edges[0] * edges[1] / (peak * law.tile_efficiency[:, index][unit])
        for tile_m, tile_n in dict.fromkeys((edges, edges[::-1])):
            tiles = groups * xp.ceil(m / tile_m) * xp.ceil(n / tile_n)
            # Tiles come in waves: the last one takes as long as a full one, however few tiles are left.
            whole = xp.ceil(tiles / num_units) * per_tile * (k + start)
            parts = 2.0 ** xp.floor(xp.log2(xp.clip(num_units / tiles, 1.0, _MOST_PARTS)))
            moved = (parts > 1.0) * 4.0 * (parts + 1.0) * groups * m * n / bandwidth
            # Splitting k fills idle multiprocessors, at the price of partial sums that are written and read once more.
            split = xp.ceil(tiles * parts / num_units) * per_tile * (k / parts + start) + moved
            found = xp.minimum(whole, split)
            best = found if best is None else xp.minimum(best, found)
    return best


@kernel_law(Gives.WORK, OpClass.ATTENTION)
def attention(kernels: Kernels, rows: Ints) -> Floats:
    """Time of the work of fused attention [s].

    Of s queries and heads of d: t = F / (P s / (s + 420) min(d / 128, 1)^0.6 fill), before the factor of its library;
    fill is the share of the multiprocessors that blocks of 128 queries keep busy in their waves.

    Evidence: ``llm/attention``, docs/methods/op-time.md.
    Source: Dao 2023, arXiv 2307.08691 (blocks of queries).
    """
    groups, queries, _, head_size = _sizes(kernels, rows)
    blocks, num_units = groups * np.ceil(queries / _ATTENTION_TILE), kernels.points.num_units
    fill = blocks / (np.ceil(blocks / num_units) * num_units)
    by_length = queries / (queries + _HALF_SPEED_QUERIES)
    share = by_length * np.minimum(head_size / 128.0, 1.0) ** 0.6 * fill
    found: Floats = kernels.work_s[:, rows] / share
    return found


_DECODING_ROWS = 16.0
"""Rows of the smallest tile of matrix units, which few queries fill in part."""


@kernel_law(Gives.WORK, OpClass.ATTENTION)
def decoding(kernels: Kernels, rows: Ints) -> Floats:
    """Time of the work of attention of one new token a sample over a cache of keys and values [s].

    t = F / P * 16 / min(q, 16), with q the queries that share a key, where ``law_size`` has the length of the cache.
    The keys are divided among all multiprocessors, so that what is read decides: F is the smaller term by far.

    Evidence: batches of 52 to 384 answers of LLaMA 7B on an A100 (``replayed``).
    Source: Dao et al. 2023, "Flash-Decoding for long-context inference"; Ye et al. 2025, arXiv 2501.01005.
    """
    queries = np.clip(_sizes(kernels, rows)[1], 1.0, _DECODING_ROWS)
    is_decoding = kernels.ops.law_size[rows] > 1
    return np.where(is_decoding, kernels.work_s[:, rows] * _DECODING_ROWS / queries, np.nan)


_LEAST_KERNEL_GROUPS = 32
"""Fewest groups for which it has them."""
_DIRECT_SHARE, _DIRECT_WIDTH = 0.107, 48.0
"""Trained, other grouped convolutions in NHWC reach 0.107 sqrt(width / 48) of the vector peak: the grouped
networks of ``timm_train`` lie within a third of it, widths of 16 (1.4 of 35.6 TFLOP/s) to 128 (5.2)."""


@kernel_law(Gives.WORK, OpClass.GROUPED_CONV)
def direct_groups(kernels: Kernels, rows: Ints) -> Floats:
    """Time of grouped convolutions in NHWC that no kernel of matrix units was written for, in training [s].

    In two-byte operands: t = F / (0.107 sqrt(width / 48) P_vector), width the channels of a group. Gradients set the
    pace: forward alone the same networks are quick (RegNetX-064 on one RTX 3090: 1,551 images/s by PyTorch 1.13, 1,980
    by 2.4, but 125 in training). No row shows a release whose gradients are quicker, so all have the law.

    Evidence: the grouped networks of ``timm_train``, PyTorch 1.12, widths of 16 to 128, lie within a third of it.
    """
    own, points = kernels.ops.take(rows), kernels.points
    inputs = group_inputs(own)
    has_kernel = np.isin(np.rint(inputs), GROUP_KERNEL_WIDTHS) & (
        own.attributes[:, 2] >= _LEAST_KERNEL_GROUPS
    )
    holds = (own.attributes[:, 7] == 2) & ~has_kernel & (points.has_direct_groups > 0)
    share = _DIRECT_SHARE * np.sqrt(np.maximum(inputs, 1.0) / _DIRECT_WIDTH)
    return np.where(holds, kernels.flops[:, rows] / (share * points.peak_vector), np.nan)


_LARGE_WINDOW = 25.0
"""Places of the largest window that kernels of depthwise convolutions are written for; others are general."""
_READ_FORWARD, _READ_BACKWARD = 3.3, 12.0
"""Bytes that the multiprocessors read a FLOP of it, at 64 bytes a cycle each."""


@kernel_law(Gives.LEAST, OpClass.DEPTHWISE_CONV)
def large_windows(kernels: Kernels, rows: Ints) -> Floats:
    """Least time of depthwise convolutions of four- and eight-byte operands with windows above 5 x 5 [s].

    t = 3.3 F / (64 U f), of both gradients 12 F / (64 U f), with U multiprocessors at the clock f, twice that for eight
    bytes. No product is used twice by a general kernel, so each FLOP reads its operands.

    Evidence: ConvNeXt-T on an A100, batch 128, with windows of 7 x 7 and 3 x 3: 53.0 and 45.7 ms forward, 222.6 and
    160.4 ms in training (2,413, 2,802, 575 and 798 images/s).
    Source: sail-sg/inceptionnext 1b7d82e0, README.md.
    """
    own, points = kernels.ops.take(rows), kernels.points
    read = (
        np.where(own.step_part == StepPart.FORWARD, _READ_FORWARD, _READ_BACKWARD) * own.attributes[:, 7] / 4
    )
    holds = (own.attributes[:, 0] > _LARGE_WINDOW) & (own.attributes[:, 7] >= 4) & (points.is_gpu > 0)
    return np.where(holds, read * kernels.flops[:, rows] / points.l2_bandwidth, 0.0)


@kernel_law(Gives.LEAST, OpClass.LINEAR, OpClass.BMM)
def sustained_products(kernels: Kernels, rows: Ints) -> Floats:
    """Least time of products of two-byte operands, at the share of the peak that large ones sustain [s].

    t = F / (share P). Evidence: ``cost.time.law.sustained_products``; 0.97 of the peak where nobody measured.
    """
    points = kernels.points
    sustained_s = kernels.work_s[:, rows] * points.clock_share / points.product_share
    return np.where(kernels.ops.attributes[rows, 7] == 2, sustained_s, 0.0)


_SERIAL_POOL_S = 0.3e-6
"""Read, sum and write of one place of one channel by a thread that goes through them one by one: bilinear upsampling
takes 0.25 to 0.38 us for each sample and channel on RTX 3090, 4090, 5090 and PRO 6000 (EfficientFormerV2 in
``timm_infer``, three sizes)."""


@kernel_law(Gives.LEAST, OpClass.AVG_POOL)
def interpolation(kernels: Kernels, rows: Ints) -> Floats:
    """Least time of an upsampling whose threads go through samples and channels one by one [s].

    t = 0.3 us * samples * channels, with the channels as ``law_size``; pooling has none. Compilers write other kernels.

    Evidence: EfficientFormerV2 in ``timm_infer``, eager, on four GPUs: 80 to 92 % too fast without it.
    Source: PyTorch, ``native/cuda/UpSampleBilinear2d.cu``.
    """
    sizes, points = kernels.ops.law_size[rows], kernels.points
    channels = np.where(sizes > 1, sizes, 0.0)
    # The time is that of one thread's work, and positions are resized once for the whole batch.
    samples = np.where(kernels.ops.elements[rows, 1] > 0, points.batch_size, 1.0)  # positions have none
    # Compilers write a kernel that goes through all places at once.
    is_eager = (points.is_gpu > 0) & (points.is_compiled == 0)
    return np.where(is_eager, channels * samples * _SERIAL_POOL_S, 0.0)


@kernel_law(Gives.MOST, *OpClass)
def multiple_of_roofline(kernels: Kernels, rows: Ints) -> Floats:
    """Longest time of any kernel: a multiple of its roofline time and 25 us [s].

    The network knows no bound where it extrapolates: a convolution of half a microsecond's work, smaller than any
    in its fit, came out at 1.5 ms. The multiple is 8 on 4-byte operands, 30 on 2-byte ones and 100
    in grouped convolutions.

    Evidence: in the fit, kernels on 4-byte operands stay below 6 times (compute plus memory time), those on 2-byte
    operands below 30, except grouped convolutions, which cuDNN runs far slower still.
    """
    is_grouped = kernels.ops.op_class[rows] == OpClass.GROUPED_CONV
    of_half = np.where(is_grouped, 100.0, 30.0)
    multiple = np.where(kernels.ops.attributes[rows, 7] != 2, 8.0, of_half)
    return np.asarray(multiple * (kernels.work_s + kernels.traffic_s)[:, rows] + CAP_LATENCY_S)


_SMALL_SHARE, _SMALL_LATENCY_S = 0.5, 1e-6


@kernel_law(Gives.MOST, *ELEMENT_WISE, OpClass.BATCH_NORM)
def small_streams(kernels: Kernels, rows: Ints) -> Floats:
    """Longest time of small streaming kernels beside their latency, t = roofline / 0.5 + 1 us [s].

    Operators timed alone take 14 to 57 us however small they are, which is their host; the fit books part of it on
    the kernel, a batch norm of 2 us of traffic at 16 us.

    Evidence: adds in ``neusight_trace_ops`` on A100: 6.5 us of traffic take 2.5 us more than none, 18 us 17 more.
    """
    is_small = (kernels.moved[:, rows] < LARGE_STREAM_BYTES) & (kernels.points.is_gpu > 0)
    roofline_s = (kernels.work_s + kernels.traffic_s)[:, rows]
    return np.where(is_small, roofline_s / _SMALL_SHARE + _SMALL_LATENCY_S, np.inf)


_WIDE_SHARE, _WIDE_LATENCY_S = 0.55, 12e-6
"""Share of the least share of the bandwidth that streams of four bytes have, and the time on top."""
_FEW_CONVOLUTIONS = 0.05
"""Share of convolutions in the work below which fits in fp32 have seen transformers alone."""


@kernel_law(Gives.MOST, *OpClass)
def large_streams(kernels: Kernels, rows: Ints) -> Floats:
    """Longest time of large streaming kernels, t = roofline / least share of the bandwidth + 5 us [s].

    They are those of a step in half precision throughout, those of a training under autocast that
    ``holds_under_autocast`` names where next to no work is in convolutions, and in any precision updates of many
    weights. Of four-byte elements, with 0.55 of that share and 12 us, those in fp32 where little work is in
    convolutions, and copies into another order of axes, which move whole rows of heads or windows, also of two-byte
    elements in inference. The fit has seen both within trainings in fp32 alone, and there says two to six times as
    much.

    Evidence: ``cost.time.law.least_stream_share``; of four bytes ``neusight_trace_ops``, forward and backward on nine
    devices. Its 66 copies above 20 MB on NVIDIA reach 0.43 to 0.79 of the bandwidth, start included.
    """
    ops, points = kernels.ops, kernels.points
    op_class, part, width = ops.op_class[rows], ops.step_part[rows], ops.attributes[rows, 3]
    is_permuted, is_wide = ops.attributes[rows, 6] > 0, ops.attributes[rows, 7] >= 4
    share = np.asarray([least_stream_share(*row) for row in zip(op_class, part, width, strict=True)])
    convolved = _convolved_share(kernels)
    holds = holds_under_autocast(op_class) & (convolved < LEAST_CONVOLVED_SHARE)
    moved = kernels.moved[:, rows]
    is_update = (op_class == OpClass.OPTIMIZER) & (moved >= LARGE_UPDATE_BYTES)
    is_rearranged = (op_class == OpClass.COPY) & is_permuted
    of_training = ((points.is_pure_half > 0) | ((points.is_autocast > 0) & holds)) & (
        points.is_inference == 0
    )
    of_inference = (points.is_pure_half > 0) & (points.is_inference > 0) & (points.is_gpu > 0)
    is_half = of_training | (of_inference & ~is_rearranged)
    chosen = (share > 0) & (is_update | (is_half & (moved >= LARGE_STREAM_BYTES)))
    roofline_s = (kernels.work_s + kernels.traffic_s)[:, rows]
    least = np.where(share > 0, share, 1.0)
    in_full = (points.is_pure_half + points.is_autocast == 0) & (convolved < _FEW_CONVOLUTIONS)
    wide = ((in_full & (op_class != OpClass.DROPOUT)) | is_rearranged) & is_wide | (
        of_inference & is_rearranged
    )
    wide &= (share > 0) & (points.is_gpu > 0) & (moved >= LARGE_STREAM_BYTES)
    # Infinite where the law does not hold: it is a bound from above.
    found = np.where(chosen, roofline_s / least + STREAM_LATENCY_S, np.inf)
    wide_s = np.where(wide, roofline_s / (_WIDE_SHARE * least) + _WIDE_LATENCY_S, np.inf)
    return np.minimum(found, wide_s)


_READ_SHARE = 0.78
"""Share of the bandwidth at which attention over a cache reads it: what is left of a step of LLaMA 7B with 60 answers
of 2,048 tokens on an A100 after its products (NVIDIA/TensorRT-LLM 138f96d4, ``docs/source/performance.md``)."""
_NOT_STREAMS = (OpClass.LINEAR, OpClass.BMM, OpClass.AVG_POOL)
_REPLAYED_SHARE, _REPLAYED_LATENCY_S = 0.75, 2.5e-6
"""The same of kernels between products, and the time between two kernels that are replayed from a graph."""


@kernel_law(Gives.MOST, *(item for item in OpClass if item not in _NOT_STREAMS))
def replayed(kernels: Kernels, rows: Ints) -> Floats:
    """Longest time of the streams of an engine that generates: roofline / share of the bandwidth + 2.5 us [s].

    They are written as few kernels and replayed from a graph. They have a ``law_size`` above 1.

    Evidence: LLaMA 7B on an A100, five rows of TensorRT-LLM's table: within 15 %.
    """
    share = np.where(kernels.ops.op_class[rows] == OpClass.ATTENTION, _READ_SHARE, _REPLAYED_SHARE)
    longest_s = kernels.traffic_s[:, rows] / share + _REPLAYED_LATENCY_S
    return np.where(is_replayed(kernels.ops)[rows], longest_s, np.inf)


def is_replayed(ops: DistinctOps) -> npt.NDArray[np.bool_]:
    """True for the streams of an engine that generates, (n,); an upsampling has a ``law_size`` of its own."""
    found: npt.NDArray[np.bool_] = (ops.law_size > 1) & ~np.isin(ops.op_class, _NOT_STREAMS)
    return found


def _convolved_share(kernels: Kernels) -> Floats:
    """Share of convolutions in the work of the step at each point, (p, 1)."""
    work = kernels.flops * kernels.ops.count
    total = np.maximum(work.sum(axis=1, keepdims=True), 1e-12)
    is_convolution = np.isin(kernels.ops.op_class, CONVOLUTIONS)
    share: Floats = work[:, is_convolution].sum(axis=1, keepdims=True) / total
    return share
