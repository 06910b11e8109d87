"""Laws of causes: what a setting, a release, a format or a better device can and cannot change."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest

from forerun.cost.time.features import REACH, Point, product_rate, software_era, sustained_share
from forerun.cost.time.rows import distinct_ops
from forerun.cost.time.step_times import step_times
from forerun.question.devices import find_device
from forerun.question.devices.catalogue import load_catalog, outdoes
from forerun.question.devices.device import DeviceKind, NumberFormat
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import shipped_models, trace
from op_models import no_offsets, random_weights, shipped_weights

IMAGE_NETWORKS = [name for name in shipped_models() if name.partition(":")[0] in ("timm", "torchvision")]
NETWORKS = [*IMAGE_NETWORKS, "gpt2", "cifar-resnet:20"]
DEVICES = [
    find_device(name) for name in ("gtx-1080-ti", "v100-sxm2-16gb", "rtx-3090", "h100-sxm", "rtx-5090")
]
FORMATS = (Precision.FP32, Precision.TF32, Precision.AMP, Precision.FP16)


@cache
def traced(name, precision=Precision.FP32, phase=Phase.TRAIN):
    graph = trace(ModelRequest(model=name), TrainingSetup(precision=precision, phase=phase))
    return distinct_ops(graph.ops), graph.uses_layer_norm


def points(name, batch_size=4, era=1.0, devices=None, **options):
    _, has_norm = traced(name)
    setup = TrainingSetup(batch_size_per_device=batch_size, **options)
    return [Point(device=one, setup=setup, uses_layer_norm=has_norm, era=era) for one in devices or DEVICES]


def times(ops, asked, weights):
    return step_times(ops, asked, weights, no_offsets(weights), with_kernels=True)


def test_twenty_networks_are_swept():
    assert len(NETWORKS) >= 20


def with_setup(**changes):
    return lambda point: replace(point, setup=replace(point.setup, **changes))


TOGGLES = {
    "has_fused_attention": (FORMATS, with_setup(fused_attention=False)),
    "software_era": (FORMATS, lambda p: replace(p, era=software_era("1.12"))),
}


@pytest.mark.parametrize("toggled", TOGGLES)
@pytest.mark.parametrize("make_weights", [random_weights, shipped_weights])
def test_a_setting_changes_the_classes_of_its_reach_alone(toggled, make_weights):
    weights = make_weights()
    formats, toggle = TOGGLES[toggled]
    for number, name in enumerate(NETWORKS):
        ops, _ = traced(name)
        # Launches this long are asked at no other batch and in no other format.
        asked = points(name, 2**16, precision=formats[number % len(formats)])
        before = times(ops, asked, weights).kernel_s
        after = times(ops, [toggle(point) for point in asked], weights).kernel_s
        unreached = ~np.isin(ops.op_class, REACH[toggled])
        np.testing.assert_allclose(after[:, unreached], before[:, unreached], rtol=1e-5)


def test_a_newer_release_is_never_slower():
    weights = shipped_weights()
    for name in NETWORKS[::3]:
        ops, _ = traced(name, Precision.AMP)
        steps = [
            times(ops, points(name, era=software_era(release), precision=Precision.AMP), weights).step_s
            for release in ("1.8", "1.12", "2.1", "2.9")
        ]
        assert (np.diff(np.log(steps), axis=0) < 0.02).all()


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.INFERENCE])
@pytest.mark.parametrize("batch_size", [1, 8, 64])
def test_half_precision_is_never_slower_than_single_where_the_device_gains_by_it(phase, batch_size):
    weights = shipped_weights()
    # In training the oldest, which has no matrix units, was measured slower in half precision.
    devices = DEVICES[phase is Phase.TRAIN :]
    for name in IMAGE_NETWORKS[::2]:
        single, half = (
            times(
                traced(name, precision, phase)[0],
                points(name, batch_size, precision=precision, phase=phase, devices=devices),
                weights,
            )
            for precision in (Precision.FP32, Precision.FP16)
        )
        # Graphs of two formats differ by a copy here and there.
        assert (half.step_s <= 1.05 * single.step_s).all()


def test_tf32_is_never_slower_than_fp32():
    weights = shipped_weights()
    for name in NETWORKS[::2]:
        ops, _ = traced(name)
        for batch_size in (1, 64):
            devices = [*DEVICES[2:], find_device("rtx-4090"), find_device("l40s"), find_device("a10")]
            single, tf32 = (
                times(ops, points(name, batch_size, precision=precision, devices=devices), weights).step_s
                for precision in (Precision.FP32, Precision.TF32)
            )
            gains = [
                d.peak_flops_per_s[NumberFormat.TF32] > d.peak_flops_per_s[NumberFormat.FP32] for d in devices
            ]
            assert (tf32 <= single)[gains].all()


def test_a_step_takes_at_least_its_launches_and_a_larger_batch_no_less():
    weights = shipped_weights()
    for name in NETWORKS[::3]:
        ops, _ = traced(name)
        steps = [times(ops, points(name, batch_size), weights) for batch_size in (1, 2, 3, 5, 8, 16, 64, 256)]
        assert all((one.step_s >= one.host_s).all() for one in steps)
        assert (np.diff([one.step_s for one in steps], axis=0) >= 0).all()


def test_a_device_with_more_of_everything_is_never_slower():
    weights = shipped_weights()
    for name in NETWORKS[::3]:
        ops, _ = traced(name)
        better = [larger(device, 1.25) for device in DEVICES]
        for batch_size in (1, 32):
            own = times(ops, points(name, batch_size), weights).step_s
            other = times(ops, points(name, batch_size, devices=better), weights).step_s
            assert (other <= 1.001 * own).all()


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.TF32, Precision.AMP, Precision.FP16])
@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.INFERENCE])
def test_a_board_that_outdoes_another_reaches_no_less_of_its_peaks(precision, phase):
    weights = shipped_weights()
    boards = [board for board in load_catalog().values() if board.kind is DeviceKind.GPU]
    setup = TrainingSetup(precision=precision, phase=phase)
    offsets = [
        weights.offsets_of_point(Point(device=board, setup=setup)).mean(axis=0)[:2] for board in boards
    ]
    peaks = [product_rate(board, precision) * sustained_share(board, precision) for board in boards]
    reached = (
        np.log(np.column_stack([peaks, [board.memory_bandwidth_bytes_per_s for board in boards]])) - offsets
    )
    for (one, board), (other, lesser) in permutations(enumerate(boards), 2):
        if board.architecture == lesser.architecture and outdoes(board, lesser):
            assert (reached[one] >= reached[other] - 0.01).all(), (board.name, lesser.name)


@pytest.mark.parametrize(
    ("better", "lesser", "precision"),
    [
        ("h200-sxm", "h100-nvl", Precision.AMP),
        ("h200-sxm", "h200-nvl", Precision.FP16),
        ("h100-nvl", "a100-sxm4-80gb", Precision.AMP),
        ("quadro-rtx-8000", "rtx-2080-super", Precision.BF16),
        ("titan-rtx", "gtx-1080-ti", Precision.BF16),
        ("l40", "rtx-4500-ada", Precision.AMP),
        ("rtx-3070-laptop", "rtx-a2000-12gb", Precision.TF32),
    ],
)
def test_a_board_that_outdoes_another_takes_no_longer(better, lesser, precision):
    weights = shipped_weights()
    for name in ("timm:resnet50", "torchvision:mobilenet_v2", "torchvision:swin_t"):
        ops, _ = traced(name, precision)
        asked = points(name, 64, precision=precision, devices=[find_device(better), find_device(lesser)])
        offsets = np.stack([weights.offsets_of_point(point) for point in asked], axis=1)
        own, other = step_times(ops, asked, weights, offsets).step_s
        assert own <= other


def larger(device, factor):
    """The device with more units, peak, bandwidth, cache and power."""
    return replace(
        device,
        num_compute_units=round(device.num_compute_units * factor),
        peak_flops_per_s={kind: factor * peak for kind, peak in device.peak_flops_per_s.items()},
        memory_bandwidth_bytes_per_s=factor * device.memory_bandwidth_bytes_per_s,
        l2_cache_bytes=round(factor * device.l2_cache_bytes),
        power_limit_w=factor * device.power_limit_w,
    )
