"""A predicted step: its parts, what bounds it, its interval and what it rests on."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

import forerun
from forerun.cost.time.step_times import smooth_maximum
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.graph.graph import AllocationKind, OpClass
from forerun.prediction.estimate import Provenance
from forerun.prediction.estimate_run import WINOGRAD_NOTE, peak_of_precision
from forerun.prediction.step import (
    format_note,
    is_order_of_magnitude,
    layer_times,
    predict_steps,
    prepare,
    provenance_of,
    tier_of,
    timed_steps,
)
from forerun.question.devices import find_device, load_catalog
from forerun.question.devices.device import NumberFormat
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace
from op_models import MODELS, graph_named, ops_named, random_weights

WEIGHTS = random_weights()
DEVICES = ("a100-sxm4-40gb", "rtx-3090", "t4", "gtx-1080-ti", "h100-sxm", "cpu")


def setups(*sizes, precision="fp32", **options):
    return [
        TrainingSetup(batch_size_per_device=size, precision=Precision(precision), **options) for size in sizes
    ]


def predictions(name="cnn", device="t4", sizes=(1, 32, 512), weights=WEIGHTS):
    return predict_steps(prepare(graph_named(name)), find_device(device), setups(*sizes), weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_to_the_step(name, device):
    for step in predictions(name, device):
        assert sum(part.time_s for part in step.breakdown) == pytest.approx(step.step_s.value, rel=1e-9)
        assert all(part.time_s > 0 for part in step.breakdown)
        times = [part.time_s for part in step.breakdown]
        assert times == sorted(times, reverse=True)


def test_every_class_of_operations_has_a_part():
    names = {part.name for name in MODELS for step in predictions(name) for part in step.breakdown}
    assert {"convolution", "linear", "normalisation", "optimizer", "element-wise and reductions"} <= names


def test_a_step_that_waits_for_the_host_says_so():
    slow_host = [replace(n, host_constant=n.host_constant + 12) for n in WEIGHTS.networks]
    waiting = predictions(weights=replace(WEIGHTS, networks=tuple(slow_host)))[0]
    assert waiting.bound_by == "host"
    assert waiting.breakdown[0].name == "waiting for the host"
    fast_host = [replace(n, host_constant=n.host_constant - 30, host=n.host - 30) for n in WEIGHTS.networks]
    busy = predictions(weights=replace(WEIGHTS, networks=tuple(fast_host)))[-1]
    assert busy.bound_by in ("compute", "memory bandwidth")


def test_the_interval_holds_the_value_and_is_even_in_log():
    for step in predictions():
        interval = step.step_s
        assert interval.low < interval.value < interval.high
        assert interval.value / interval.low == pytest.approx(interval.high / interval.value)


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("a100-sxm4-80gb", {}),
        ("m3-max", {"precision": "fp32"}),
        ("8xh100-sxm", {}),
        ("8xh100-sxm", {"parallel": "tp=2,dp=4"}),
    ],
)
def test_no_interval_reaches_above_the_peak_of_the_device(device, options):
    settings = {"precision": "fp16", "compile": True, "sequence_length": 256} | options
    model = "gpt:depth=2,width=4096,vocabulary=512"
    found = forerun.predict(model, device=device, batch_size=64, **settings)
    assert found.hfu.low < found.hfu.value <= found.hfu.high <= 1 + 1e-9
    assert WINOGRAD_NOTE not in found.notes
    if "x" not in device[:2]:
        precisions = [settings.pop("precision")]
        swept = forerun.sweep(model, devices=[device], batch_sizes=[64], precisions=precisions, **settings)
        assert swept.step_time_low_s.ravel() == pytest.approx([found.step_time_s.low])


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.FP16, Precision.AMP_BF16])
@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_no_device_of_the_catalogue_is_faster_than_its_datasheet(name, precision):
    model, shipped = prepare(graph_named(name, precision)), load_weights(shipped_weights_path())
    in_tf32 = precision is Precision.FP32 and name == "resnet18"  # PyTorch's convolutions
    known = [
        (device, rate)
        for device in load_catalog().values()
        if (rate := in_tf32 and device.peak_flops_per_s.get(NumberFormat.TF32))
        or (rate := peak_of_precision(device, precision))
    ]
    devices, rates = zip(*known, strict=True)
    asked = [TrainingSetup(batch_size_per_device=256, precision=precision)] * len(devices)
    _, low_s, _ = timed_steps(model, devices, asked, shipped).ends_s()
    constant, slope = model.graph.model_flops
    use = (constant + slope * 256) / (low_s * rates)
    on_units = [
        device.has_matrix_units if precision.is_half else NumberFormat.TF32 in device.peak_flops_per_s
        for device in devices
    ]
    may_be_winograd = name == "resnet18" and ~np.asarray(on_units)
    assert (use <= np.where(may_be_winograd, 2.5, 1) * (1 + 1e-6)).all()


@pytest.mark.parametrize("parallel", ["tp=2,dp=4", "pp=2,dp=4", "tp=8", "cp=2,dp=4"])
def test_utilisation_is_the_work_of_all_models_over_the_peak_of_all_devices(parallel):
    model = "gpt:depth=2,width=4096,vocabulary=512"
    settings = {"precision": "fp16", "sequence_length": 256, "batch_size": 64}
    alone = forerun.predict(model, device="h100-sxm", **settings)
    work = (
        alone.mfu.value / alone.throughput_samples_per_s.value
    )  # of a sample, in seconds of the peak of a device
    found = forerun.predict(model, device="8xh100-sxm", parallel=parallel, **settings)
    assert found.mfu.value == pytest.approx(work * found.throughput_samples_per_s.value / 8)


def test_use_above_the_peak_is_explained():
    found = forerun.predict("torchvision:vgg16", device="v100-sxm2-16gb", batch_size=64)
    assert (found.mfu.value > 1) == (WINOGRAD_NOTE in found.notes)
    assert found.hfu.high <= 2.5
    assert forerun.predict("torchvision:vgg16", device="mi210", batch_size=64).hfu.value < 1.1


def test_many_points_at_once_equal_one_by_one():
    model = prepare(graph_named("resnet18"))
    sizes = (1, 7, 64, 300)
    devices = [find_device(name) for name in DEVICES for _ in sizes]
    chosen = setups(*sizes) * len(DEVICES)
    value, low, high = timed_steps(model, devices, chosen, WEIGHTS).ends_s()
    for index, (device, setup) in enumerate(zip(devices, chosen, strict=True)):
        alone = predict_steps(model, device, [setup], WEIGHTS)[0].step_s
        assert (value[index], low[index], high[index]) == pytest.approx(
            (alone.value, alone.low, alone.high), rel=1e-6
        )


@pytest.mark.parametrize(
    ("device", "precision", "network", "expected"),
    [
        ("rtx-3090", "amp", "cnn", Provenance.INTERPOLATED),
        ("rtx-3090", "amp", "vit", Provenance.INTERPOLATED),
        ("rtx-3090", "fp32", "cnn", Provenance.DATASHEET_ONLY),
        ("a100-sxm4-40gb", "tf32", "cnn", Provenance.INTERPOLATED),
        ("a100-sxm4-40gb", "amp", "vit", Provenance.DATASHEET_ONLY),
        ("h100-sxm", "amp", "vit", Provenance.DATASHEET_ONLY),
        ("rtx-4090", "amp", "cnn", Provenance.DATASHEET_ONLY),
        ("cpu", "fp32", "cnn", Provenance.DATASHEET_ONLY),
    ],
)
def test_provenance_is_by_device_format_phase_and_mix_of_operations(device, precision, network, expected):
    ops, setup = ops_named(network, precision), setups(1, precision=precision)[0]
    assert provenance_of(find_device(device), setup, WEIGHTS, ops) is expected


def width(device, weights=WEIGHTS, samples=32, **options):
    step = predict_steps(prepare(graph_named("cnn")), device, setups(samples, **options), weights)[0]
    return np.log(step.step_s.high / step.step_s.value)


def test_no_less_known_device_has_a_narrower_interval():
    known = find_device("rtx-3090")
    widths = [
        width(device, no_spread(), precision="amp", samples=512)
        for device in (
            known,
            replace(known, name="rtx-3091"),
            replace(known, name="rtx-3091", architecture="cdna1", vendor="amd"),
        )
    ]
    assert widths[0] <= min(widths[1:])


def no_spread():
    """One member, which agrees with itself."""
    return replace(WEIGHTS, networks=WEIGHTS.networks[:1])


@pytest.mark.parametrize("name", ["apple-m2", "tpu-v4", "rx-7900-xtx", "cpu"])
def test_an_architecture_that_nobody_measured_is_known_to_an_order_of_magnitude(name):
    device = find_device(name)
    assert is_order_of_magnitude(device, WEIGHTS)
    assert width(device) >= np.log(10) / 2 - 1e-9
    assert width(find_device("t4")) < np.log(10) / 2


@pytest.mark.parametrize("name", MODELS)
def test_layers_share_the_device_time(name):
    model = prepare(graph_named(name))
    step = predict_steps(model, find_device("t4"), setups(64), WEIGHTS)[0]
    everything = layer_times(model, step, step.step_s.value, num_micro_steps=1, limit=10_000)
    assert everything[:3] == layer_times(model, step, step.step_s.value, num_micro_steps=1)
    in_four = layer_times(model, step, 4 * step.step_s.value, num_micro_steps=4)
    assert [layer.share for layer in in_four] == pytest.approx([layer.share for layer in everything[:3]])
    assert all(layer.module for layer in everything)
    assert sum(layer.share for layer in everything) <= 1 + 1e-9
    assert all(layer.share == pytest.approx(layer.time_s / step.step_s.value) for layer in everything)
    # The rest runs outside of any module: loss, optimizer, sums.
    assert sum(layer.time_s for layer in everything) < step.step_s.value


def test_the_kernels_of_a_step_are_scaled_to_it():
    model = prepare(graph_named("resnet18"))
    step = predict_steps(model, find_device("t4"), setups(64), WEIGHTS)[0]
    waiting = sum(part.time_s for part in step.breakdown if part.name == "waiting for the host")
    assert step.kernel_s.sum() + waiting == pytest.approx(step.step_s.value)
    convolution = next(part.time_s for part in step.breakdown if part.name == "convolution")
    is_convolution = np.isin(model.ops.op_class, (OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV))
    assert step.kernel_s[is_convolution].sum() == pytest.approx(convolution)


def _computed(model, device, setup):
    return predict_steps(model, device, [setup], WEIGHTS)[0].setup


@pytest.mark.parametrize(
    ("device", "precision", "message"),
    [
        ("t4", "tf32", "no TF32; the step runs in fp32 instead"),
        ("t4", "bf16", "no bf16 arithmetic"),
        ("gtx-1080-ti", "amp-bf16", "fp16 (amp) would be faster"),
    ],
)
def test_a_missing_format_is_told_with_what_happens_instead(device, precision, message):
    setup = TrainingSetup(batch_size_per_device=1, precision=Precision(precision))
    model, device = prepare(graph_named("resnet18")), find_device(device)
    assert message in format_note(model, device, setup, _computed(model, device, setup))


@pytest.mark.parametrize("device", ["a40", "h200-sxm", "rtx-5090"])
def test_fewer_bits_never_take_longer_where_launches_are_short(device):
    model = prepare(graph_named("resnet18"))
    for batch in (1, 16):
        asked = [
            TrainingSetup(batch_size_per_device=batch, precision=p, convolution_precision=own)
            for p, own in (("fp32", "fp32"), ("tf32", None), ("bf16", None), ("fp16", None))
        ]
        full, *others = (
            step.step_s.value for step in predict_steps(model, find_device(device), asked, WEIGHTS)
        )
        assert max(others) <= full * (1 + 1e-9)


def test_tf32_takes_as_long_as_fp32_where_there_is_none():
    model = prepare(graph_named("resnet18"))
    wanted = (
        {"precision": Precision.TF32},
        {"precision": Precision.FP32, "convolution_precision": Precision.TF32},
    )
    for device in map(find_device, ("t4", "v100-sxm2-16gb")):
        asked = [TrainingSetup(batch_size_per_device=16, **words) for words in ({}, *wanted)]
        full, *others = predict_steps(model, device, asked, WEIGHTS)
        assert all(other.step_s == full.step_s for other in others)


@pytest.mark.parametrize(
    ("device", "precision"),
    [("t4", "fp32"), ("t4", "amp"), ("a100-sxm4-40gb", "tf32"), ("a100-sxm4-40gb", "amp"), ("cpu", "bf16")],
)
def test_nothing_is_said_of_formats_that_are_there(device, precision):
    setup = TrainingSetup(batch_size_per_device=1, precision=Precision(precision))
    model, device = prepare(graph_named("resnet18")), find_device(device)
    assert format_note(model, device, setup, _computed(model, device, setup)) is None


def test_convolutions_in_fp32_are_in_tf32_unless_said_otherwise():
    model, setup = prepare(graph_named("resnet18")), TrainingSetup(batch_size_per_device=64)
    own, told = (replace(setup, convolution_precision=word) for word in ("tf32", "fp32"))
    device = find_device("a100-sxm4-40gb")
    shipped = load_weights(shipped_weights_path())
    times = [predict_steps(model, device, [each], shipped)[0].step_s for each in (setup, own, told)]
    assert times[0] == times[1]
    assert times[0].value < 0.9 * times[2].value
    assert tier_of(model, device, setup, WEIGHTS) is tier_of(model, device, own, WEIGHTS)
    assert "--convolution-precision fp32" in format_note(model, device, setup, own)
    assert format_note(model, device, own, own) == "convolutions are computed in tf32, products in fp32"
    assert _computed(model, device, setup) == own
    assert _computed(model, find_device("t4"), own) == setup  # no TF32


DOUBLE = """
import torch
from torch import nn

def network(dtype):
    layers = nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.GELU(), nn.Flatten(), nn.Linear(28800, 512)
    return nn.Sequential(*layers).to(dtype), torch.empty(2, 3, 32, 32, dtype=dtype)

def single():
    return network(torch.float32)

def double():
    return network(torch.float64)
"""


def test_double_precision_is_never_faster_and_its_weights_take_twice_the_bytes(tmp_path):
    path = tmp_path / "network.py"
    path.write_text(DOUBLE, encoding="utf-8")
    single, double = (
        prepare(trace(ModelRequest(model=f"{path}:{name}"), TrainingSetup())) for name in ("single", "double")
    )
    sums = [
        sum(
            event[0]
            for event, kind in zip(stream.size_bytes, stream.kind, strict=True)
            if kind == AllocationKind.WEIGHT
        )
        for stream in (single.graph.memory, double.graph.memory)
    ]
    assert sums[1] == 2 * sums[0]
    shipped = load_weights(shipped_weights_path())
    devices = list(load_catalog().values())[::6]
    for batch, phase in ((4, Phase.TRAIN), (256, Phase.INFERENCE)):
        asked = [TrainingSetup(batch_size_per_device=batch, phase=phase)] * len(devices)
        short, long = (timed_steps(model, devices, asked, shipped).ends_s() for model in (single, double))
        assert (long[0] >= 0.99 * short[0]).all()
        assert (long[2] / long[0] >= 10**0.5 * (1 - 1e-9)).all()  # nobody measured fp64
    asked = trace(ModelRequest(model=f"{path}:single"), TrainingSetup(precision="fp64"))
    for column in fields(asked.ops):
        np.testing.assert_array_equal(*(getattr(ops, column.name) for ops in (asked.ops, double.graph.ops)))
    fp64 = TrainingSetup(batch_size_per_device=4, precision="fp64")
    own, said = (
        timed_steps(double, devices, [replace(fp64, precision=precision)] * len(devices), shipped).step_s
        for precision in ("fp32", "fp64")
    )
    np.testing.assert_array_equal(own, said)
    setup, device = setups(4)[0], find_device("a100-sxm4-40gb")
    assert "computes in fp64" in format_note(double, device, setup, setup)
    assert "no known rate" in format_note(double, find_device("m3-max"), setup, setup)
    assert tier_of(double, device, setup, shipped) is Provenance.DATASHEET_ONLY


@pytest.mark.parametrize("name", ["resnet18", "vit"])
def test_half_precision_is_slower_only_by_the_launches_of_its_casts(name):
    found = (find_device(device) for device in (*DEVICES, "mi300x", "l40s"))
    devices = [device for device in found if device.has_matrix_units]
    shipped = load_weights(shipped_weights_path())
    for batch in (1, 32):
        full, half, cast = (
            timed_steps(
                prepare(graph_named(name, word)),
                devices,
                setups(batch, precision=word) * len(devices),
                shipped,
                with_kernels=True,
            ).times
            for word in ("fp32", "fp16", "amp")
        )
        assert (half.device_s <= 1.04 * full.device_s).all()
        is_cast = ops_named(name, "amp").op_class == OpClass.CAST
        device_s = cast.kernel_s[:, ~is_cast].sum(axis=1)
        assert (device_s <= 1.04 * full.device_s).all()
        without_casts_s = smooth_maximum(device_s, cast.host_s - cast.launch_s[:, is_cast].sum(axis=1))
        assert (without_casts_s + cast.loop_s <= 1.04 * full.step_s).all()


def test_micro_steps_wait_for_the_host_whatever_their_update_takes():
    steps = [
        forerun.predict("mlp", device=name, batch_size=4, compile=True, optimizer="adam", accumulation=4)
        for name in ("t4", "l40s", "rtx-6000-ada", "mi300x")
    ]
    values = [step.step_time_s.value for step in steps]
    assert values[0] == max(values)


def test_the_first_micro_step_writes_gradients_and_the_others_add_theirs():
    steps = [forerun.predict("mnist-cnn", device="t4", batch_size=8, accumulation=k) for k in (1, 2, 3)]
    first, second, third = (step.step_time_s.value for step in steps)
    assert second - first == pytest.approx(third - second, rel=1e-3)
