"""The step composed from layers timed on their own: laws of the two forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.adapters.classics.composition import (
    HostCosts,
    host_costs,
    marginal_time_s,
    overlapped_step_time_s,
    serial_step_time_s,
)

TIMES_S = st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=20)
COSTS = HostCosts(alone_s=0.5e-3, per_step_s=0.4e-3, per_layer_s=0.1e-3)


@given(TIMES_S)
def test_more_layers_take_more_time(times_s):
    assert overlapped_step_time_s([*times_s, 1e-3], COSTS) > overlapped_step_time_s(times_s, COSTS)
    assert serial_step_time_s([*times_s, 1e-3], 1e-4) > serial_step_time_s(times_s, 1e-4)


@given(TIMES_S)
def test_work_beside_calls_lies_between_the_larger_and_the_sum(times_s):
    calls_s = COSTS.per_step_s + len(times_s) * COSTS.per_layer_s
    work_s = sum(max(0.0, t - COSTS.alone_s) for t in times_s)
    step_s = overlapped_step_time_s(times_s, COSTS)
    assert max(calls_s, work_s) <= step_s * (1 + 1e-12)
    assert step_s <= (calls_s + work_s) * (1 + 1e-12)


@given(st.floats(0, 1), st.floats(0, 1), st.integers(2, 20))
def test_equal_layers_together_tell_what_one_costs_and_what_a_step_costs(per_step_s, layer_s, num_copies):
    alone_s, together_s = per_step_s + layer_s, per_step_s + num_copies * layer_s
    marginal_s = marginal_time_s(alone_s, together_s, num_copies)
    assert marginal_s == pytest.approx(layer_s, abs=1e-9)
    assert serial_step_time_s([marginal_s] * 5, alone_s - marginal_s) == pytest.approx(
        per_step_s + 5 * layer_s, abs=1e-8
    )


def test_calls_count_for_much_in_small_layers_and_little_in_large_ones():
    small, large = [0.6e-3] * 8, [60e-3] * 8
    assert sum(small) / overlapped_step_time_s(small, COSTS) > 2
    assert sum(large) / overlapped_step_time_s(large, COSTS) == pytest.approx(1, abs=0.01)


def test_noise_makes_no_cost_negative():
    costs = host_costs(0.5e-3, (2, 17), (0.6e-3, 0.5e-3))
    assert (costs.per_layer_s, costs.per_step_s) == (0, 0.6e-3)
    assert marginal_time_s(2e-3, 1e-3, 8) == 0


def test_two_empty_networks_tell_the_costs_of_calls():
    costs = host_costs(0.5e-3, (2, 17), (0.6e-3, 2.1e-3))
    assert costs.per_layer_s == pytest.approx(0.1e-3)
    assert costs.per_step_s == pytest.approx(0.4e-3)


@pytest.mark.parametrize("num_layers", [(2, 2), (17, 2)])
def test_networks_of_equal_size_tell_nothing(num_layers):
    with pytest.raises(AssertionError):
        host_costs(0.5e-3, num_layers, (0.6e-3, 2.1e-3))


def test_one_copy_tells_nothing():
    with pytest.raises(AssertionError):
        marginal_time_s(1e-3, 1e-3, 1)
