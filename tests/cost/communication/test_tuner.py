"""Choice of algorithm and protocol."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import UnknownDeviceError
from forerun.cost.communication.collectives import (
    AllReduce,
    all_reduce_of,
    nccl_choice,
    ring_all_reduce_time_s,
)
from forerun.question.devices.cluster import parse_cluster
from forerun.question.devices.device import LinkKind
from forerun.question.sharing import Algorithm

DGX = all_reduce_of(parse_cluster("4x8xa100-sxm4-80gb", inter="8xinfiniband-hdr"))


def test_small_messages_take_the_protocol_of_low_latency_and_large_ones_the_simple_one():
    assert nccl_choice(DGX, 256).protocol == "LL"
    assert nccl_choice(DGX, 1e9).protocol == "Simple"


def test_many_nodes_take_a_tree_for_small_messages_and_a_ring_for_large_ones_inside_a_node():
    wide = all_reduce_of(parse_cluster("128x8xa100-sxm4-80gb", inter="8xinfiniband-hdr"))
    assert nccl_choice(wide, 1024).algorithm is Algorithm.TREE
    one_node = all_reduce_of(parse_cluster("1x8xa100-sxm4-80gb"))
    assert nccl_choice(one_node, 1e9).algorithm in (Algorithm.RING, Algorithm.HIERARCHICAL)


@given(st.floats(0, 1e10), st.sampled_from(["ring", "tree", "hierarchical"]))
def test_the_choice_is_never_slower_than_what_is_forced(size, forced):
    cluster = parse_cluster("4x8xa100-sxm4-80gb", inter="8xinfiniband-hdr")
    assert DGX.time_s(size) <= all_reduce_of(cluster, Algorithm(forced)).time_s(size)


def test_a_message_of_nothing_has_the_floor_of_latency():
    assert 1e-6 < DGX.time_s(0) < 1e-3


def test_processes_of_one_machine_take_the_ring_that_was_probed():
    host = AllReduce(num_devices_per_node=2, intra=LinkKind.HOST, intra_bytes_per_s=1e9, intra_latency_s=1e-4)
    assert host.time_s(3e6) == ring_all_reduce_time_s(3e6, 2, 1e-4, 1e9)
    assert nccl_choice(host, 3e6).protocol == "gloo"


def test_one_device_reduces_in_no_time():
    assert all_reduce_of(parse_cluster("t4")).time_s(1e9) == 0


def test_unknown_topology_is_asked_for():
    with pytest.raises(UnknownDeviceError, match=r"link between the nodes.*--inter"):
        all_reduce_of(parse_cluster("2x8xa100-sxm4-80gb"))
    with pytest.raises(UnknownDeviceError, match=r"link between the cpu of a node.*--intra"):
        all_reduce_of(parse_cluster("2xcpu"))
