"""Features of kernels and points: finite, in range, and equal where device and kernel scale together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.cost.time.features import (
    DYNAMIC_FEATURES,
    POINT_FEATURES,
    STATIC_FEATURES,
    Point,
    dynamic_features,
    peak_rates,
    point_arrays,
    roofline_terms_s,
    software_era,
    static_features,
)
from forerun.cost.time.law import CONVOLUTIONS
from forerun.cost.time.rows import distinct_ops
from forerun.graph.graph import OpClass, at_batch
from forerun.question.devices import find_device, load_catalog
from forerun.question.devices.device import NumberFormat
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from op_models import MODELS, ops_named


def point(device="a100-sxm4-40gb", batch_size=32, precision="fp32", **options):
    setup = TrainingSetup(batch_size_per_device=batch_size, precision=Precision(precision), **options)
    chosen = find_device(device) if isinstance(device, str) else device
    return Point(device=chosen, setup=setup)


def dynamic(ops, points):
    arrays = point_arrays(points)
    features = dynamic_features(ops, arrays, *roofline_terms_s(ops, arrays))
    return {name: features[..., i] for i, name in enumerate(DYNAMIC_FEATURES)}


@pytest.mark.parametrize("names", [STATIC_FEATURES, POINT_FEATURES, DYNAMIC_FEATURES])
def test_names_are_unique(names):
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("name", MODELS)
def test_features_are_finite_and_as_many_as_named(name, precision):
    ops = ops_named(name, precision)
    points = [point(batch_size=size, precision=precision) for size in (1, 32, 100_000)]
    static, shared = static_features(ops), point_arrays(points).features
    values = dynamic(ops, points)
    assert static.shape == (len(ops), len(STATIC_FEATURES))
    assert shared.shape == (3, len(POINT_FEATURES))
    for array in (static, shared, *values.values()):
        assert np.isfinite(array).all()
    for bounded in ("wave_fill", "tile_use", "m_by_8", "n_by_64"):
        assert values[bounded].min() >= 0
        assert values[bounded].max() <= 1 + 1e-6


def test_every_device_of_the_catalogue_has_finite_features():
    points = [point(device) for device in load_catalog()]
    assert np.isfinite(point_arrays(points).features).all()


def test_each_kernel_is_of_one_class_and_one_part():
    static = static_features(ops_named("vit"))
    classes = [i for i, name in enumerate(STATIC_FEATURES) if name.startswith("class_")]
    parts = [i for i, name in enumerate(STATIC_FEATURES) if name.startswith("part_")]
    assert len(classes) == len(OpClass)
    np.testing.assert_array_equal(static[:, classes].sum(axis=1), 1)
    np.testing.assert_array_equal(static[:, parts].sum(axis=1), 1)


def test_points_are_independent_of_each_other():
    ops = ops_named("cnn")
    points = [point(), point("t4", 7), point("h100-sxm", 500)]
    together = dynamic(ops, points)
    for index, one in enumerate(points):
        alone = dynamic(ops, [one])
        for name in DYNAMIC_FEATURES:
            np.testing.assert_allclose(together[name][index], alone[name][0], rtol=1e-6, err_msg=name)


def test_roofline_times_by_hand():
    ops = ops_named("cnn")
    device = find_device("a100-sxm4-40gb")
    compute_s, memory_s = roofline_terms_s(ops, point_arrays([point()]))
    np.testing.assert_allclose(
        memory_s[0], at_batch(ops.moved_bytes, 32) / device.memory_bandwidth_bytes_per_s
    )
    np.testing.assert_allclose(
        compute_s[0], at_batch(ops.flops, 32) / device.peak_flops_per_s[NumberFormat.FP32]
    )


def test_half_precision_products_use_the_matrix_rate():
    ops = ops_named("resnet18", "amp")
    peaks = find_device("a100-sxm4-40gb").peak_flops_per_s
    compute_s, _ = roofline_terms_s(ops, point_arrays([point(precision="amp")]))
    flops = at_batch(ops.flops, 32)
    half = (ops.op_class == OpClass.CONV) & (ops.attributes[:, 7] == 2)
    np.testing.assert_allclose(compute_s[0, half], flops[half] / peaks[NumberFormat.FP16])
    streams = ops.op_class == OpClass.BATCH_NORM
    np.testing.assert_allclose(compute_s[0, streams], flops[streams] / peaks[NumberFormat.FP32])


@pytest.mark.parametrize(
    ("device", "precision", "half", "full"),
    [
        ("a100-sxm4-40gb", "fp32", NumberFormat.FP16, NumberFormat.FP32),
        ("a100-sxm4-40gb", "tf32", NumberFormat.FP16, NumberFormat.TF32),
        ("a100-sxm4-40gb", "bf16", NumberFormat.BF16, NumberFormat.FP32),
        ("t4", "tf32", NumberFormat.FP16, NumberFormat.FP32),
        ("t4", "amp-bf16", NumberFormat.FP32, NumberFormat.FP32),
        ("p100-pcie-16gb", "amp", NumberFormat.FP32, NumberFormat.FP32),  # sums are in fp32 there
    ],
)
def test_a_format_the_device_lacks_falls_back(device, precision, half, full):
    found = find_device(device)
    rates = peak_rates(found, Precision(precision))
    peaks = found.peak_flops_per_s
    assert rates == (peaks[half], peaks[full], peaks[NumberFormat.FP32])


@pytest.mark.parametrize(("precision", "convolutions"), [("fp32", "tf32"), ("tf32", "fp32"), ("amp", "tf32")])
def test_convolutions_in_fp32_have_a_precision_of_their_own(precision, convolutions):
    """Kernels of convolutions are those of a step in their precision, all others those of a step in its own."""
    ops = ops_named("cnn")
    is_convolution = np.isin(ops.op_class, CONVOLUTIONS) & (ops.attributes[:, 7] == 4)
    mixed, plain, other = (
        roofline_terms_s(ops, point_arrays([point(**settings)]))[0][0]
        for settings in (
            {"precision": precision, "convolution_precision": convolutions},
            {"precision": precision},
            {"precision": convolutions},
        )
    )
    np.testing.assert_allclose(mixed, np.where(is_convolution, other, plain))


def test_twice_the_device_with_twice_the_batch_looks_the_same_per_unit():
    small = find_device("a100-sxm4-40gb")
    large = replace(
        small,
        num_compute_units=2 * small.num_compute_units,
        l2_cache_bytes=2 * small.l2_cache_bytes,
        memory_bandwidth_bytes_per_s=2 * small.memory_bandwidth_bytes_per_s,
        peak_flops_per_s={name: 2 * rate for name, rate in small.peak_flops_per_s.items()},
    )
    ops = ops_named("cnn")
    values = dynamic(ops, [point(small, 64), point(large, 128)])
    grows = (ops.op_class == OpClass.CONV) & (ops.gemm[:, 1, 0] == 0) & (ops.gemm[:, 1, 1] > 0)
    assert grows.any()
    for name in ("log2_tiles_per_unit", "log2_k", "wave_fill"):
        np.testing.assert_allclose(values[name][0, grows], values[name][1, grows], atol=1e-4, err_msg=name)


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"layout": Layout.NHWC}, "is_nhwc"),
        ({"precision": "amp"}, "is_autocast"),
        ({"precision": "fp16"}, "is_pure_half"),
        ({"precision": "tf32"}, "is_tf32"),
        ({"phase": Phase.FORWARD}, "is_inference"),
        ({"phase": Phase.INFERENCE}, "is_inference"),
        ({"compile": True}, "is_compiled"),
    ],
)
def test_flags_of_a_configuration(options, flag):
    index = POINT_FEATURES.index(flag)
    plain, chosen = point_arrays([point(), point(**options)]).features[:, index]
    assert (plain, chosen) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("version", "era"),
    [
        ("0.4", 0.0),
        ("0.4.1", 0.0),
        ("1.0", 1 / 24),
        ("1.13.1", 14 / 24),
        ("2.0", 15 / 24),
        ("2.9.0+cu128", 1.0),
    ],
)
def test_eras_by_minor_release(version, era):
    assert software_era(version) == pytest.approx(era)


def test_newer_software_is_never_older():
    versions = ["0.4", "1.0", "1.5", "1.12", "1.13", "2.0", "2.1", "2.8", "2.9", "2.15", "3.0"]
    eras = [software_era(version) for version in versions]
    assert eras == sorted(eras)


def test_an_empty_graph_has_no_features():
    ops = distinct_ops(_no_rows())
    assert static_features(ops).shape == (0, len(STATIC_FEATURES))


def _no_rows():
    from dataclasses import fields

    from op_models import graph_named

    rows = graph_named("cnn").ops
    arrays = [f.name for f in fields(rows) if isinstance(getattr(rows, f.name), np.ndarray)]
    return replace(rows, **{name: getattr(rows, name)[:0] for name in arrays})
