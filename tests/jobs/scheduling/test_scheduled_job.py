"""Clusters as they are written and what they add up to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.jobs.scheduling.job import NodeGroup, SharedCluster, parse_cluster


@given(nodes=st.integers(1, 999), devices=st.integers(1, 16))
def test_what_is_written_is_what_is_there(nodes, devices):
    cluster = parse_cluster(f"{nodes}x{devices}xt4")
    assert (cluster.num_nodes, cluster.num_devices, str(cluster)) == (
        nodes,
        nodes * devices,
        f"{nodes}x{devices}xt4",
    )


def test_groups_are_numbered_through():
    cluster = parse_cluster("2x8xA100-SXM4-40GB + 4x4xt4")
    assert cluster.kinds == ("a100-sxm4-40gb", "t4")
    assert cluster.first_node("t4") == 2
    assert cluster.group("t4").num_devices == 16


@pytest.mark.parametrize("text", ["", "16", "axbxt4", "2x4xt4+", "-1x4xt4"])
def test_text_that_is_no_cluster(text):
    with pytest.raises(
        InvalidSetupError, match="a cluster must be nodes x devices a node x kind, such as 16x4xt4"
    ):
        parse_cluster(text)


@pytest.mark.parametrize("text", ["0x4xt4", "2x0xt4"])
def test_zero_devices(text):
    with pytest.raises(InvalidSetupError, match="at least one node and one device a node, got"):
        parse_cluster(text)


def test_a_kind_has_one_group():
    with pytest.raises(InvalidSetupError, match="'t4' occurs in two groups"):
        parse_cluster("1x4xt4+2x8xt4")


def test_no_groups():
    with pytest.raises(InvalidSetupError, match="at least one group"):
        SharedCluster(groups=())


@pytest.mark.parametrize("text", ["999999x999999xt4", "100001x1xt4", "12501x8xt4", "1x1025xt4"])
def test_a_cluster_beyond_any_that_exists_is_refused(text):
    with pytest.raises(InvalidSetupError, match="at most 100,000 devices of a kind, 1,024 in a node"):
        parse_cluster(text)
    assert parse_cluster("12500x8xt4").num_devices == 100_000


def test_nodes_of_one_kind_may_differ():

    group = NodeGroup(device="t4", num_nodes=2, devices_per_node=4, devices_by_node=(4, 1))
    assert (group.num_devices, group.node_sizes) == (5, (4, 1))
