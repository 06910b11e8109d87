"""Laws of the op-level model: it equals the network that was fitted, and its times behave like times."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.cost.time import step_times as op_time
from forerun.cost.time.features import Point
from forerun.cost.time.law import LEAST_LAUNCH_S
from forerun.cost.time.step_times import smooth_maximum, step_times
from forerun.evidence.fitting.op_time_fit import StepSample, as_weights, encode_samples
from forerun.graph.graph import StepPart
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from op_models import MODELS, no_offsets, ops_named, random_networks, random_weights, shipped_weights
from studies.optime.fit import predict_log_times

DEVICES = ("a100-sxm4-40gb", "rtx-3090", "t4", "h100-sxm", "gtx-1080-ti", "cpu")


def point(device="rtx-3090", batch_size=32, precision="fp32", **options):
    setup = TrainingSetup(batch_size_per_device=batch_size, precision=Precision(precision), **options)
    return Point(device=find_device(device), setup=setup)


POINTS = st.builds(
    point,
    device=st.sampled_from(DEVICES),
    batch_size=st.integers(1, 4096),
    precision=st.sampled_from(("fp32", "tf32")),
    layout=st.sampled_from(tuple(Layout)),
    compile=st.booleans(),
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(tuple(MODELS)),
    points=st.lists(POINTS, min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_numpy_evaluates_the_network_that_was_fitted(name, points, seed):
    ops = ops_named(name)
    networks = random_networks(1, 1, seed)
    samples = [StepSample(ops=ops, point=p, step_time_s=1.0, system="a") for p in points]
    encoded = encode_samples(samples, names=(networks[0].devices, networks[0].architectures))
    weights = as_weights(networks, ("a",), {"calibrated_device": "T4"})  # asked in no other format
    for use_latents in (False, True):
        expected = predict_log_times(networks[0], encoded, np.arange(len(points)), use_latents)
        offsets = weights.networks[0].latents[None] if use_latents else no_offsets(weights)
        # Longest times bound what the network says of kernels unlike those of its fit, which knows no such bound.
        with mock.patch.object(op_time, "longest_times_s", return_value=np.inf):
            found = np.log(step_times(ops, points, weights, offsets).step_s)
        np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_parts_add_up_to_the_device_time(name):
    weights = random_weights()
    times = step_times(
        ops_named(name), [point(), point("t4", 7)], weights, no_offsets(weights), with_kernels=True
    )
    np.testing.assert_allclose(times.kernel_s.sum(axis=1), times.device_s)
    assert (times.memory_bound_s <= times.device_s * (1 + 1e-12)).all()
    for share in (times.compute_share, times.memory_share):
        assert (share >= 0).all()
    # The rest of a kernel's time is its latency, which neither rate changes.
    assert (times.compute_share + times.memory_share <= 1 + 1e-6).all()


def test_the_slower_of_host_and_device_decides():
    assert smooth_maximum(np.array([1.0]), np.array([0.01]))[0] == pytest.approx(1.0)
    assert smooth_maximum(np.array([0.01]), np.array([1.0]))[0] == pytest.approx(1.0)
    assert smooth_maximum(np.array([1.0]), np.array([1.0]))[0] == pytest.approx(2 ** (1 / 6))


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-6, 1e3), st.floats(1e-6, 1e3))
def test_the_smooth_maximum_lies_between_maximum_and_sum(device_s, host_s):
    value = smooth_maximum(np.array([device_s]), np.array([host_s]))[0]
    assert max(device_s, host_s) * (1 - 1e-12) <= value <= (device_s + host_s) * (1 + 1e-12)


def test_chunks_change_nothing(monkeypatch):
    weights = random_weights()
    points = [point(device, size) for device in DEVICES for size in (1, 2, 31, 64, 500)]
    offsets = np.random.default_rng(0).normal(0, 0.2, (2, len(points), 4))
    whole = step_times(ops_named("cnn"), points, weights, offsets, with_kernels=True)
    monkeypatch.setattr(op_time, "_POINTS_PER_CHUNK", 1)
    # Another cost model by identity: points of one are remembered.
    single = step_times(ops_named("cnn"), points, replace(weights), offsets, with_kernels=True)
    for name in whole.__slots__:
        np.testing.assert_allclose(getattr(whole, name), getattr(single, name), rtol=1e-14)


def test_points_asked_again_are_remembered_by_all_that_tells_them_apart(monkeypatch):
    real, weights, calls = op_time._chunk_times, replace(random_weights()), []
    monkeypatch.setattr(op_time, "_chunk_times", lambda *args: calls.append(len(args[1])) or real(*args))
    points = [point("t4", size) for size in (4096, 8192)]
    offsets = no_offsets(weights)
    first = step_times(ops_named("cnn"), points, weights, offsets)
    asked = sum(calls)
    again = step_times(ops_named("cnn"), points[::-1], weights, offsets)
    assert sum(calls) == asked
    np.testing.assert_array_equal(first.step_s, again.step_s[::-1])
    for changed in ({"era": 0.5}, {"uses_layer_norm": True}):
        step_times(ops_named("cnn"), [replace(points[0], **changed)], weights, offsets)
    step_times(ops_named("cnn"), points[:1], weights, offsets + 0.1)
    assert sum(calls) >= asked + 3


def test_without_kernels_the_times_are_the_same():
    weights = random_weights()
    plain, full = (
        step_times(ops_named("cnn"), [point()], weights, no_offsets(weights), with_kernels=w)
        for w in (False, True)
    )
    assert plain.kernel_s is plain.compute_share is plain.memory_share is None
    np.testing.assert_array_equal(plain.step_s, full.step_s)


def test_an_offset_scales_its_own_part_alone():
    weights = random_weights()
    ops = ops_named("resnet18")

    def times(compute=0.0, memory=0.0, host=0.0):
        offsets = np.full((2, 1, 4), (compute, memory, host, 0.0))
        return step_times(ops, [point(batch_size=256)], weights, offsets, with_kernels=True)

    base, host = times(), times(host=0.5)
    assert host.device_s == base.device_s
    assert host.host_s > base.host_s
    compute, memory = times(compute=0.01), times(memory=0.01)
    assert compute.host_s == memory.host_s == base.host_s
    # A small offset times the elasticity of each kernel is what the device time gains.
    for changed, share in ((compute, base.compute_share), (memory, base.memory_share)):
        gain = np.log(changed.kernel_s / base.kernel_s)
        large = base.kernel_s > base.kernel_s.max() / 100
        np.testing.assert_allclose(gain[large], 0.01 * share[large], rtol=0.1, atol=3e-4)
        assert changed.device_s > base.device_s


def test_offsets_apply_to_their_own_points():
    weights = random_weights()
    offsets = np.zeros((2, 2, 4))
    offsets[:, 1] = 0.7
    both = step_times(ops_named("cnn"), [point(), point()], weights, offsets)
    assert both.step_s[1] > both.step_s[0]
    alone = step_times(ops_named("cnn"), [point()], weights, no_offsets(weights))
    assert both.step_s[0] == pytest.approx(alone.step_s[0], rel=1e-6)


def test_members_are_averaged_in_log_space():
    weights = random_weights(3)
    singles = [replace(weights, networks=(network,)) for network in weights.networks]
    steps = [step_times(ops_named("cnn"), [point()], w, no_offsets(w)).step_s[0] for w in singles]
    ensemble = step_times(ops_named("cnn"), [point()], weights, no_offsets(weights))
    assert ensemble.step_s[0] == pytest.approx(np.exp(np.mean(np.log(steps))))
    assert ensemble.spread[0] == pytest.approx(np.std(np.log(steps)))


def test_compiling_launches_fewer_kernels_and_each_for_less():
    networks = random_networks(1, 1)
    with torch.no_grad():
        networks[0].host_compiled.fill_(-2.0)
        networks[0].host_constant.fill_(-30.0)
    weights = as_weights(networks, ("a",), {})
    eager, compiled = (
        step_times(ops_named("cnn"), [point(compile=c)], weights, no_offsets(weights)).host_s[0]
        for c in (False, True)
    )
    ops, pair = ops_named("cnn"), ops_named("cnn").op_class * len(StepPart) + ops_named("cnn").step_part
    launch_s = np.exp(weights.networks[0].host[pair].astype(float))
    fewer = (ops.joined_count @ launch_s) / (ops.count @ np.maximum(launch_s, LEAST_LAUNCH_S[pair]))
    assert fewer < 0.95
    assert compiled / eager == pytest.approx(fewer * np.exp(-2.0), rel=1e-3)
    older = replace(weights, has_least_launches=False)  # a calibration of before
    (host_s,) = step_times(ops_named("cnn"), [point()], older, no_offsets(older)).host_s
    assert host_s / eager == pytest.approx(
        (ops.count @ launch_s) / (ops.count @ np.maximum(launch_s, LEAST_LAUNCH_S[pair])), rel=1e-3
    )


# ---------------------------------------------------------------------------------------------------------
# what was fitted


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("precision", ["fp32", "amp"])
def test_more_samples_take_more_time(name, precision):
    # Doubling the batch at a time: a batch that is no multiple of a tile may be slower than the next one.
    weights = shipped_weights()
    sizes = [2**power for power in range(13)]
    for device in DEVICES[:-1]:
        points = [point(device, size, precision) for size in sizes]
        step_s = step_times(ops_named(name, precision), points, weights, no_offsets(weights)).step_s
        growth = step_s[1:] / step_s[:-1]
        assert (growth[2:] > 1 - 1e-3).all(), f"{device}: {step_s}"
        # From 1 to 4 samples launches and tiny kernels set the pace, where nothing was measured; the network
        # alone knows no such law. 2 % is far inside the interval.
        assert (growth[:2] > 0.98).all(), f"{device}: {step_s}"


@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_takes_longer_than_its_forward_pass(name):
    weights = shipped_weights()
    for size in (1, 16, 256):
        training, forward = (
            step_times(
                ops_named(name, "fp32", phase),
                [point(batch_size=size, phase=Phase(phase))],
                weights,
                no_offsets(weights),
            )
            for phase in ("train", "forward")
        )
        assert training.step_s[0] > forward.step_s[0]
