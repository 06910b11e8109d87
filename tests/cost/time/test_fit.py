"""The fit of the op-level model: it learns, and the same seed learns the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.base.errors import CostModelError
from forerun.cost.time.features import (
    POINT_FEATURES,
    REACH,
    STATIC_FEATURES,
    Point,
    point_arrays,
    roofline_terms_s,
)
from forerun.evidence.fitting.op_time_fit import (
    FitSettings,
    OperatorSample,
    StepSample,
    as_weights,
    encode_samples,
    take,
)
from forerun.question.devices import find_device
from forerun.question.setup import TrainingSetup
from op_models import NUM_FEATURES, ops_named
from studies.optime.fit import fit_op_network, predict_log_times, provenance

SETTINGS = FitSettings(hidden=16, num_iterations=50, samples_per_batch=16)


def synthetic_samples():
    """Steps of three models that take 1.7 times their roofline, and 1 ms; one system is a third slower."""
    samples = []
    for name in ("cnn", "resnet18", "mobilenet"):
        ops = ops_named(name)
        for device in ("a100-sxm4-40gb", "t4"):
            for size in (8, 32, 128, 512):
                setup = TrainingSetup(batch_size_per_device=size)
                point = Point(device=find_device(device), setup=setup)
                compute_s, memory_s = roofline_terms_s(ops, point_arrays([point]))
                step_s = 1e-3 + 1.7 * float(np.maximum(compute_s, memory_s)[0] @ ops.count)
                slower = 1.3 if device == "t4" else 1.0
                samples.append(StepSample(ops=ops, point=point, step_time_s=slower * step_s, system=device))
    return samples


@pytest.fixture(scope="module")
def encoded():
    return encode_samples(synthetic_samples())


def mean_error(network, encoded, use_latents=True):
    chosen = np.arange(len(encoded))
    predicted = predict_log_times(network, encoded, chosen, use_latents)
    return float(np.abs(predicted - encoded.log_time.numpy()).mean())


def test_encoding_keeps_samples_apart(encoded):
    samples = synthetic_samples()
    assert len(encoded) == len(samples)
    assert encoded.features.shape == (encoded.starts[-1], NUM_FEATURES)
    np.testing.assert_array_equal(np.diff(encoded.starts), [len(sample.ops) for sample in samples])
    assert encoded.systems == ("a100-sxm4-40gb", "t4")
    np.testing.assert_allclose(encoded.log_time, np.log([s.step_time_s for s in samples]), rtol=1e-6)


def test_operators_of_another_framework_share_offsets_and_others_have_none():
    steps = synthetic_samples()[:2]
    ops, point = steps[0].ops, steps[0].point
    times = {"time_s": np.ones(len(ops)), "weight": np.ones(len(ops))}
    own = OperatorSample(ops=ops, point=point, **times)
    encoded = encode_samples(steps, [own, replace(own, system="tensorflow|a100")])
    assert encoded.systems == ("a100-sxm4-40gb", "tensorflow|a100")
    assert encoded.system.tolist() == [0, 0] + [-1] * len(ops) + [1] * len(ops)


def test_a_batch_holds_the_chosen_samples_in_order(encoded):
    chosen = np.array([5, 0, 5])
    batch = take(encoded, chosen)
    lengths = np.diff(encoded.starts)[chosen]
    assert len(batch.features) == lengths.sum()
    np.testing.assert_array_equal(np.bincount(batch.sample), lengths)
    first = encoded.features[encoded.starts[5] : encoded.starts[6]]
    torch.testing.assert_close(batch.features[: lengths[0]], first)
    torch.testing.assert_close(batch.features[-lengths[2] :], first)


def test_a_short_fit_lowers_the_error(encoded):
    everything = np.arange(len(encoded))
    before = fit_op_network(encoded, everything, replace(SETTINGS, num_iterations=1))
    after = fit_op_network(encoded, everything, SETTINGS)
    assert mean_error(after, encoded) < 0.75 * mean_error(before, encoded)
    assert all(torch.isfinite(parameter).all() for parameter in after.parameters())


def test_the_same_seed_fits_the_same(encoded):
    settings = replace(SETTINGS, num_iterations=10)
    everything = np.arange(len(encoded))
    first, second, other = (
        fit_op_network(encoded, everything, replace(settings, seed=seed)) for seed in (3, 3, 4)
    )
    np.testing.assert_array_equal(*(predict_log_times(n, encoded, everything, True) for n in (first, second)))
    assert mean_error(first, encoded) != mean_error(other, encoded)


def test_a_system_that_was_not_chosen_keeps_its_offsets_at_zero(encoded):
    a100_only = np.flatnonzero(encoded.system.numpy() == 0)
    network = fit_op_network(encoded, a100_only, replace(SETTINGS, num_iterations=10))
    assert network.latents[0].abs().sum() > 0
    assert not network.latents[1].any()


def test_samples_without_weight_are_never_drawn(encoded):
    samples = [replace(s, weight=float(s.system == "t4")) for s in synthetic_samples()]
    weighted = encode_samples(samples)
    network = fit_op_network(weighted, np.arange(len(weighted)), replace(SETTINGS, num_iterations=10))
    assert not network.latents[0].any()
    assert network.latents[1].any()


def test_a_kernel_without_work_or_traffic_does_no_harm(encoded):
    samples = synthetic_samples()
    ops = samples[0].ops
    idle = replace(ops, flops=np.zeros_like(ops.flops), moved_bytes=np.zeros_like(ops.moved_bytes))
    with_idle = encode_samples([*samples, replace(samples[0], ops=idle)])
    network = fit_op_network(with_idle, np.arange(len(with_idle)), replace(SETTINGS, num_iterations=10))
    assert np.isfinite(mean_error(network, with_idle))


def test_a_time_of_zero_is_refused():
    samples = synthetic_samples()
    with np.errstate(divide="ignore"):
        broken = encode_samples([replace(sample, step_time_s=0.0) for sample in samples])
    with pytest.raises(CostModelError, match="not finite"):
        fit_op_network(broken, np.arange(len(broken)), SETTINGS)


def test_weights_say_what_their_fit_left_out_and_where_inputs_without_reach_stand(encoded):
    settings = replace(SETTINGS, num_iterations=1)
    network = fit_op_network(encoded, np.arange(len(encoded)), settings)
    found = provenance([], [], [settings], as_weights([network], encoded.systems, {}))
    assert found["left_out"].keys() == {"tresnet", "timm_infer"}
    assert found["one_network_in"] == {"timm_infer, nchw": 4, "timm_infer, nhwc": 8}
    means = network.mean.numpy()[len(STATIC_FEATURES) :]
    assert found["held_inputs"] == {
        name: pytest.approx(means[POINT_FEATURES.index(name)], abs=1e-3) for name in REACH
    }
    # A network sees nothing of an input where it has no reach: whatever the input says, the weights answer alike.
    moved = encoded.features.clone()
    moved[:, len(STATIC_FEATURES) + POINT_FEATURES.index("software_era")] += 0.5
    assert torch.equal(network.outputs(encoded.features), network.outputs(moved))
