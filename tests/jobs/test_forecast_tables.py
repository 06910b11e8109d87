"""Batch size, gradient noise, and networks that were never trained."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.convergence import (
    NetworkRuns,
    fit_batch_scaling,
    gradient_noise_scale,
    predict_network,
)


@settings(max_examples=50, deadline=None)
@given(least=st.floats(10, 1e5), critical=st.floats(16, 1e5))
def test_two_batches_determine_the_law(least, critical):
    sizes = np.asarray([32.0, 4096.0])
    law = fit_batch_scaling(sizes, least * (1 + critical / sizes))
    assert law.least_steps == pytest.approx(least, rel=1e-3)
    assert law.critical_batch_size == pytest.approx(critical, rel=1e-2)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000))
def test_larger_batches_never_need_more_steps_nor_fewer_samples(seed):
    rng = np.random.default_rng(seed)
    law = fit_batch_scaling([64, 128, 512], rng.uniform(100, 5000, 3))
    sizes = np.geomspace(1, 1e6, 30)
    assert np.all(np.diff(law.steps(sizes)) <= 1e-9)
    assert np.all(np.diff(law.samples(sizes)) >= -1e-6)


def test_epochs_and_steps_are_one_law():
    sizes = np.asarray([3300, 8192])
    by_epochs = fit_batch_scaling(sizes, np.asarray([35, 42]) * 1_281_167 / sizes)
    assert by_epochs.epochs([3300, 8192], 1_281_167) == pytest.approx([35, 42], rel=1e-3)
    assert by_epochs.steps([8192])[0] == pytest.approx(42 * 1_281_167 / 8192, rel=1e-3)
    assert by_epochs.worst_error < 1e-3


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [([64], [100]), ([64, 64], [100, 90]), ([64, 128], [100, -1]), ([0, 4], [1, 2]), ([1, 2], [3])],
)
def test_a_law_needs_two_batches(sizes, steps):
    with pytest.raises(InvalidSetupError, match="two or more different batch sizes"):
        fit_batch_scaling(sizes, steps)


def test_gradient_noise_scale_of_known_gradients():
    """Gradients with mean g and covariance s I: B_simple = d s / |g|^2."""
    rng = np.random.default_rng(0)
    dimension, spread, steps = 50, 3.0, 4000
    mean = rng.normal(size=dimension)
    halves = mean + spread / np.sqrt(16) * rng.normal(size=(steps, 2, dimension))
    small = (halves**2).sum(-1).mean(1)
    large = (halves.mean(1) ** 2).sum(-1)
    found = gradient_noise_scale(small, large, 16, 32)
    assert found.squared_gradient == pytest.approx(mean @ mean, rel=0.02)
    assert found.batch_size == pytest.approx(dimension * spread**2 / (mean @ mean), rel=0.03)


def test_no_gradient_under_the_noise_is_an_endless_batch():
    assert gradient_noise_scale([2.0], [0.9], 16, 32).batch_size == float("inf")


@pytest.mark.parametrize(
    ("small", "large", "a", "b"), [([], [], 1, 2), ([1.0], [1.0], 4, 4), ([1.0], [1.0, 2.0], 1, 2)]
)
def test_gradient_noise_needs_two_batches(small, large, a, b):
    with pytest.raises(InvalidSetupError, match="small and of a larger batch"):
        gradient_noise_scale(small, large, a, b)


def networks(law, features=(1.0, 2.0, 4.0, 8.0, 16.0), devices=3, spread=0.0):
    rng = np.random.default_rng(1)
    return [
        NetworkRuns(
            name=str(x),
            features={"parameters": x},
            values=tuple(float(law(x) * np.exp(rng.normal(0, spread))) for _ in range(devices)),
        )
        for x in features
    ]


@pytest.mark.parametrize("law", [lambda x: 60 * x**-0.3, lambda x: 20 + 30 / x])
def test_laws_of_its_own_forms_are_found_again(law):
    found = predict_network(networks(law), {"parameters": 12.0})
    assert found.value == pytest.approx(law(12.0), rel=0.05)
    assert found.low <= found.value <= found.high


def test_the_device_is_no_feature():
    """Runs of a network on several devices are repetitions: their order, and so the device, changes nothing."""
    once = networks(lambda x: 60 * x**-0.3, spread=0.2)
    shuffled = [NetworkRuns(name=n.name, features=n.features, values=n.values[::-1]) for n in once]
    asked = {"parameters": 32.0}
    assert predict_network(once, asked).value == pytest.approx(predict_network(shuffled, asked).value)


def test_networks_that_follow_a_law_less_well_have_a_wider_interval():
    widths = []
    for spread in (0.02, 0.1, 0.4):
        found = predict_network(networks(lambda x: 60 * x**-0.3, spread=spread), {"parameters": 12.0})
        assert found.low < found.value < found.high
        widths.append(found.high / found.low)
    assert widths == sorted(widths)


def test_the_unit_of_a_feature_is_nothing_to_the_answer():
    def answer(unit):
        sizes, epochs = (0.27, 0.47, 0.66, 0.86, 11.2), (58.0, 51.0, 44.0, 37.0, 29.0)
        known = [
            NetworkRuns(name=str(size), features={"parameters": size * unit}, values=(epoch,))
            for size, epoch in zip(sizes, epochs, strict=True)
        ]
        return predict_network(known, {"parameters": 23.5 * unit}).value

    assert answer(1e6) == pytest.approx(answer(1.0), rel=1e-6)
    assert answer(1e-6) == pytest.approx(answer(1.0), rel=1e-6)


@pytest.mark.parametrize("count", [0, 2])
def test_few_networks_are_refused(count):
    with pytest.raises(InvalidSetupError, match="three or more"):
        predict_network(networks(lambda x: x)[:count], {"parameters": 3.0})


def test_values_may_be_zero_but_not_below():
    """Optimus' b2 is zero for a loss that goes to nothing."""
    known = networks(lambda x: 0.0)
    assert predict_network(known, {"parameters": 3.0}).value == 0
    with pytest.raises(InvalidSetupError, match="not below zero"):
        predict_network(networks(lambda x: -1.0), {"parameters": 3.0})
