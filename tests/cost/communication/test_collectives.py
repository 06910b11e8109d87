"""Collectives: closed forms, limits and laws."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.cost.communication.collectives import hierarchical_all_reduce_time_s, ring_all_reduce_time_s

sizes = st.floats(0, 1e10)
numbers = st.integers(1, 512)


def test_one_device_sends_nothing():
    assert ring_all_reduce_time_s(1e9, 1, 1e-6, 1e9) == 0


def test_ring_sends_twice_all_but_one_nth_of_the_message():
    # 4 devices, 400 MB at 1 GB/s: 2 x 3/4 x 0.4 s, and six hops.
    assert ring_all_reduce_time_s(400e6, 4, 0.001, 1e9) == pytest.approx(0.6 + 0.006)


@given(sizes, sizes, numbers)
def test_more_bytes_are_never_faster(one, other, number):
    small, large = sorted((one, other))
    assert ring_all_reduce_time_s(small, number, 1e-6, 1e9) <= ring_all_reduce_time_s(
        large, number, 1e-6, 1e9
    )


@given(sizes, st.integers(2, 16), st.integers(2, 64))
def test_hierarchy_is_between_its_stages(size, per_node, nodes):
    links = {
        "intra_latency_s": 1e-6,
        "intra_bytes_per_s": 1e11,
        "inter_latency_s": 5e-6,
        "inter_bytes_per_s": 1e10,
    }
    time_s = hierarchical_all_reduce_time_s(size, num_nodes=nodes, num_devices_per_node=per_node, **links)
    inside = ring_all_reduce_time_s(size, per_node, 1e-6, 1e11)
    assert math.isclose(time_s, inside + ring_all_reduce_time_s(size, nodes, 5e-6, 1e10))
    assert hierarchical_all_reduce_time_s(size, num_nodes=1, num_devices_per_node=per_node, **links) == inside
