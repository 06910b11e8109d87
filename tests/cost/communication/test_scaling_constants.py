"""Hidden communication costs by the bytes that it moves."""

import pytest

from forerun.cost.communication.collectives import AllReduce
from forerun.cost.communication.constants import FULL_SLOWDOWN_BYTES_PER_S, ScalingConstants
from studies.scaling.fit import scale_measured_step


def over(gigabit, num_nodes=16):
    return AllReduce(
        num_nodes=num_nodes,
        num_devices_per_node=4,
        intra_bytes_per_s=1e11,
        inter_bytes_per_s=gigabit / 8 * 1e9,
    )


def test_a_hidden_second_costs_less_over_a_slower_network():
    constants = ScalingConstants(slowdown=0.6)
    assert constants.slowdown_on(over(25)) == pytest.approx(0.6 * 25 / 100)
    assert constants.slowdown_on(over(100)) == constants.slowdown_on(over(400)) == 0.6
    # Inside a node nothing changes.
    assert constants.slowdown_on(over(1, num_nodes=1)) == 0.6
    assert FULL_SLOWDOWN_BYTES_PER_S == 12.5e9


def test_a_slower_network_is_never_faster_for_it():
    constants = ScalingConstants(slowdown=0.6)
    steps = [
        scale_measured_step(0.5, 180e6, over(g), constants).step_s for g in (400, 200, 100, 50, 25, 10, 5, 1)
    ]
    assert steps == sorted(steps)
