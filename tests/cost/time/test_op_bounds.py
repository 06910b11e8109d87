"""Laws of physics that no fitted weights can break: peaks of arithmetic and bandwidths."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from forerun.cost.time.features import Point, double_rates, peak_rates
from forerun.cost.time.law import largest_product_share, sustained_products
from forerun.cost.time.rows import DistinctOps
from forerun.cost.time.step_times import step_times
from forerun.graph.graph import OpClass, StepPart
from forerun.question.devices import find_device, load_catalog
from forerun.question.setup import Phase, Precision, TrainingSetup
from op_models import no_offsets, ops_named, random_weights, shipped_weights

FORMATS = (Precision.FP32, Precision.TF32, Precision.FP16, Precision.BF16)
SIZES = (16, 100, 1024, 8192, 16384)


def kernels(op_class, flops, moved, sizes, element_bytes):
    """One kernel of each of n sizes."""
    number = len(flops)
    ones, zeros = np.ones(number), np.zeros(number)

    def constant(values):
        return np.stack([values, np.zeros_like(values)], axis=-1)

    columns = [ones, ones, ones, zeros, ones, zeros, zeros, np.full(number, element_bytes)]
    return DistinctOps(
        group_of_row=np.arange(number),
        count=ones,
        op_class=np.full(number, int(op_class)),
        step_part=np.full(number, int(StepPart.FORWARD)),
        flops=constant(flops),
        moved_bytes=constant(moved),
        gemm=constant(np.stack(sizes, axis=1)),
        elements=constant(moved / element_bytes),
        attributes=np.stack(columns, axis=1),
        law_size=ones,
        joined_count=ones,
        joined_flops=constant(flops),
        joined_bytes=constant(moved),
    )


def products(op_class, element_bytes):
    """A grid of products, or of attention with heads of 128."""
    m, n, k = (axis.reshape(-1).astype(float) for axis in np.meshgrid(SIZES, SIZES, SIZES))
    groups = np.ones(len(m))
    if op_class is OpClass.ATTENTION:
        groups, n, k = n, m, np.full(len(m), 128.0)
        flops, moved = 4.0 * groups * m * n * k, element_bytes * 4.0 * groups * m * k
    else:
        flops, moved = 2.0 * m * n * k, element_bytes * (m * n + m * k + n * k)
    return kernels(op_class, flops, moved, (groups, m, n, k), element_bytes)


def fast_weights(seed):
    """Networks nobody fitted whose every factor makes kernels as fast as the model lets it."""
    weights = random_weights(seed=seed)
    networks = []
    for network in weights.networks:
        values = {field.name: getattr(network, field.name) for field in fields(network)}
        fast = ("law_factor", "latents", "device_offsets", "architecture_offsets")
        values |= {name: np.full_like(values[name], -3.0) for name in fast}
        networks.append(replace(network, **values))
    return replace(weights, networks=tuple(networks))


def kernel_times(ops, device, precision, weights):
    setup = TrainingSetup(batch_size_per_device=1, precision=precision, phase=Phase.INFERENCE)
    points = [Point(device=device, setup=setup)]
    times = step_times(ops, points, weights, no_offsets(weights) - 3.0, with_kernels=True)
    return times.kernel_s[0]


@pytest.mark.parametrize("make_weights", [lambda: fast_weights(0), shipped_weights])
@pytest.mark.parametrize("op_class", [OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION])
@pytest.mark.parametrize("precision", FORMATS)
def test_no_product_is_faster_than_the_dense_peak_of_its_format(op_class, precision, make_weights):
    ops, weights = products(op_class, 2.0 if precision.is_half else 4.0), make_weights()
    for device in load_catalog().values():
        half, full, _ = peak_rates(device, precision)
        rate = ops.flops[:, 0] / kernel_times(ops, device, precision, weights)
        assert rate.max() <= 0.97 * (half if precision.is_half else full), device.name


@pytest.mark.parametrize("make_weights", [lambda: fast_weights(0), shipped_weights])
@pytest.mark.parametrize("op_class", [OpClass.LINEAR, OpClass.BMM])
def test_no_product_in_double_precision_is_faster_than_the_dense_peak(op_class, make_weights):
    ops, single, weights = products(op_class, 8.0), products(op_class, 4.0), make_weights()
    for device in load_catalog().values():
        if (rates := double_rates(device)) is not None:
            times_s = kernel_times(ops, device, Precision.FP32, weights)
            assert (ops.flops[:, 0] / times_s).max() <= 0.97 * rates[0], device.name
            slower = times_s / kernel_times(single, device, Precision.FP32, weights)
            assert slower.min() >= 0.999, device.name  # datasheets round


@pytest.mark.parametrize(
    ("name", "products_tflops"),
    [("a100-sxm4-40gb", 19.5), ("h100-sxm", 67), ("mi250x", 47.9), ("mi300x", 163.4), ("rtx-3090", 0.556)],
)
def test_double_precision_multiplies_on_matrix_units_where_the_datasheet_says_so(name, products_tflops):
    rates = double_rates(find_device(name))
    assert rates is not None
    assert rates[0] == pytest.approx(products_tflops * 1e12, rel=0.01)


@pytest.mark.parametrize("make_weights", [lambda: fast_weights(1), shipped_weights])
@pytest.mark.parametrize("op_class", [OpClass.ADD, OpClass.SOFTMAX, OpClass.LAYER_NORM, OpClass.COPY])
def test_no_kernel_streams_faster_than_its_memory_and_the_cache_beside_it(op_class, make_weights):
    moved = 2.0 ** np.arange(10, 36)
    ops, weights = kernels(op_class, np.zeros(26), moved, np.zeros((4, 26)), 4.0), make_weights()
    for device in load_catalog().values():
        rate = moved / kernel_times(ops, device, Precision.FP32, weights)
        l2_rate = 64.0 * device.num_compute_units * device.boost_clock_hz
        assert rate.max() <= max(l2_rate, device.memory_bandwidth_bytes_per_s), device.name
        beyond_cache = moved > 32 * device.l2_cache_bytes
        assert rate[beyond_cache].max(initial=0.0) <= 1.01 * device.memory_bandwidth_bytes_per_s, device.name


@pytest.mark.parametrize(("name", "most"), [("a100-sxm4-80gb", 0.83), ("h200-sxm", 0.68)])
def test_large_products_take_the_rate_that_boards_sustain(name, most):
    device = find_device(name)
    ops = products(OpClass.LINEAR, 2.0)
    setup = TrainingSetup(batch_size_per_device=1, precision=Precision.BF16)
    weights = fast_weights(0)
    times = step_times(
        ops, [Point(device=device, setup=setup)], weights, no_offsets(weights), with_kernels=True
    )
    rates = ops.flops[:, 0] / times.kernel_s[0]
    peak, _, _ = peak_rates(device, Precision.BF16)
    assert rates.max() == pytest.approx(most * peak, rel=0.01)


def test_products_follow_the_power_limit_of_a_board():
    board = find_device("h100-sxm")
    shares = [
        sustained_products(replace(board, power_limit_w=watts)) for watts in (350.0, 500.0, 700.0, 4000.0)
    ]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert shares[2] / shares[1] == pytest.approx((700 / 500) ** (1 / 3))
    # A device left out of its own figure: the rates of the three that were measured.
    for name, measured in (("a100-sxm4-80gb", 0.83), ("h100-sxm", 0.68), ("b300", 0.58)):
        assert sustained_products(find_device(name)) == pytest.approx(measured, rel=0.04)
    assert sustained_products(find_device("l40s")) is None
    assert largest_product_share(find_device("l40s")) == 0.97
    # llm/matmul_peaks: the best of a search over shapes.
    for name, measured in (("mi300x", 0.51), ("mi325x", 0.60), ("mi355x", 0.62)):
        assert largest_product_share(find_device(name)) == pytest.approx(measured, rel=0.14)


def stream_shares(ops, precision, phase=Phase.TRAIN):
    """Shares of the bandwidth that kernels reach by weights nobody fitted, which take memory to be slow."""
    device = find_device("h100-sxm")
    setup = TrainingSetup(batch_size_per_device=1, precision=precision, phase=phase)
    weights = random_weights(seed=1)
    slow = np.broadcast_to(np.asarray([0.0, 3.0, 0.0, 0.0]), (len(weights.networks), 1, 4))
    times = step_times(ops, [Point(device=device, setup=setup)], weights, slow, with_kernels=True)
    return ops.moved_bytes[:, 0] / times.kernel_s[0] / device.memory_bandwidth_bytes_per_s


def streams(op_class):
    moved, ones = np.asarray([1e9, 4e9]), np.ones(2)
    return kernels(op_class, moved / 4, moved, (ones, ones, ones, ones), 2.0)


@pytest.mark.parametrize("op_class", [OpClass.ADD, OpClass.SOFTMAX, OpClass.OPTIMIZER])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.INFERENCE])
def test_large_streams_in_half_precision_reach_a_share_of_the_bandwidth(op_class, phase):
    assert stream_shares(streams(op_class), Precision.BF16, phase).min() > 0.6


def test_half_precision_rearranges_heads_no_slower_than_fp32_does():
    ops = streams(OpClass.COPY)
    ops.attributes[:, 6] = 1.0
    assert 0.35 < stream_shares(ops, Precision.FP16, Phase.INFERENCE).min() < 0.6


def test_large_element_wise_kernels_under_autocast_do_as_well_where_nothing_is_convolved():
    alone = streams(OpClass.ADD)
    beside = replace(alone, op_class=np.asarray([int(OpClass.ADD), int(OpClass.CONV)]))
    assert stream_shares(alone, Precision.AMP_BF16).min() > 0.6
    assert stream_shares(beside, Precision.AMP_BF16)[0] < 0.5
    assert stream_shares(alone, Precision.FP32).max() < 0.5


@pytest.mark.parametrize(
    ("device", "compiles", "least_s"),
    [("rtx-3090", False, 0.3), ("rtx-3090", True, 0.0), ("cpu", False, 0.0)],
)
def test_a_thread_that_goes_through_channels_takes_its_time_for_each(device, compiles, least_s):
    """A million samples and channels: 0.31 s in EfficientFormerV2 on the RTX 3090 of ``timm_infer``."""
    one = kernels(OpClass.AVG_POOL, np.ones(1), np.asarray([1e6]), np.zeros((4, 1)), 2.0)
    ops = replace(one, law_size=np.asarray([1000.0]), elements=np.asarray([[0.0, 200_000.0]]))
    setup = TrainingSetup(batch_size_per_device=1000, phase=Phase.INFERENCE, compile=compiles)
    weights = shipped_weights()
    times = step_times(
        ops, [Point(device=find_device(device), setup=setup)], weights, no_offsets(weights), with_kernels=True
    )
    assert times.kernel_s[0, 0] == pytest.approx(least_s, abs=0.01)


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("device", "moved_mb", "measured_us"),
    [
        ("a100-pcie-80gb", 33.55, 37.5),
        ("a100-pcie-80gb", 67.11, 61.4),
        ("v100-pcie-32gb", 67.11, 105.0),
        ("p100-pcie-16gb", 67.11, 177.0),
        ("t4", 67.11, 291.0),
    ],
)
def test_copies_of_heads_in_fp32_take_no_longer_than_they_were_measured_to(
    device, moved_mb, measured_us, phase
):
    # neusight_trace_ops, ``contiguous`` between heads and tokens; its times have the start of a kernel in them.
    moved = np.array([moved_mb * 1e6])
    ops = kernels(OpClass.COPY, np.zeros(1), moved, np.zeros((4, 1)), 4.0)
    ops.attributes[:, 6] = 1.0
    setup = TrainingSetup(batch_size_per_device=1, phase=phase)
    point, weights = Point(device=find_device(device), setup=setup), shipped_weights()
    times = step_times(ops, [point], weights, no_offsets(weights), with_kernels=True)
    assert 0.6 * measured_us < times.kernel_s[0, 0] * 1e6 < 2 * measured_us


def test_large_windows_of_depthwise_convolutions_cost_what_convnext_shows():
    # sail-sg/inceptionnext: a forward pass of ConvNeXt-T, batch 128, takes 7.4 ms less with 3 x 3 than with 7 x 7.
    times = []
    for area in (49.0, 9.0):
        flops, moved = np.array([26.9e9 * area / 49]), np.array([128 * 2.14e6 * 8])
        ops = kernels(OpClass.DEPTHWISE_CONV, flops, moved, np.zeros((4, 1)), 4.0)
        ops.attributes[:, 0] = area
        times.append(kernel_times(ops, find_device("a100-sxm4-80gb"), Precision.TF32, shipped_weights())[0])
    assert times[0] - times[1] == pytest.approx(7.4e-3, rel=0.15)


@pytest.mark.parametrize("phase", Phase)
def test_half_precision_without_matrix_units_saves_no_more_than_was_measured(phase):
    weights, times = shipped_weights(), []
    for precision in (Precision.FP16, Precision.FP32):
        setup = TrainingSetup(batch_size_per_device=64, precision=precision, phase=phase)
        point = Point(device=find_device("p100-pcie-16gb"), setup=setup)
        ops = ops_named("resnet18", precision, phase)
        times.append(step_times(ops, [point], weights, no_offsets(weights)).step_s[0])
    assert times[0] > (0.85 if phase is Phase.TRAIN else 0.75) * times[1]
