"""Clusters and links: what a text means, what is known and what is asked for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import CatalogError, InvalidSetupError, UnknownDeviceError
from forerun.question.devices import load_catalog
from forerun.question.devices.cluster import (
    find_link,
    link_of_board,
    load_links,
    parse_cluster,
    parse_link,
    parse_links,
)
from forerun.question.devices.device import LinkKind


def test_every_figure_of_every_link_has_a_source():
    for link in load_links().values():
        assert {"bandwidth_bytes_per_s", "usable_share", "latency_s"} <= set(link.sources)
        assert 0 < link.usable_share <= 1
        assert 0 < link.latency_s < 1e-3


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        ("nvlink-2", 150),  # 6 x 25 GB/s, V100 whitepaper
        ("nvlink-3", 300),  # 12 x 25 GB/s, A100 whitepaper
        ("nvlink-4", 450),  # 18 x 25 GB/s, H100 whitepaper
        ("pcie-3-x16", 15.75),  # 16 lanes x 8 GT/s x 128/130
        ("pcie-4-x16", 31.5),
        ("infiniband-edr", 12.5),  # 100 Gbit/s
        ("infiniband-ndr", 50),
        ("infiniband-xdr", 100),
        ("ethernet-10g", 1.25),
    ],
)
def test_published_rates_of_one_direction(name, gigabytes):
    assert load_links()[name].bandwidth_bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.01)


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "device"),
    [
        ("4x8xh100-sxm", 4, 8, "h100-sxm"),
        ("1x8xv100-sxm2-16gb", 1, 8, "v100-sxm2-16gb"),
        ("8xt4", 1, 8, "t4"),
        (" 2 x 4 x T4 ", 2, 4, "t4"),
        ("t4", 1, 1, "t4"),
    ],
)
def test_nodes_times_devices_times_name(text, nodes, per_node, device):
    found = parse_cluster(text)
    assert (found.num_nodes, found.num_devices_per_node, found.device.name) == (nodes, per_node, device)
    assert found.num_devices == nodes * per_node


def test_the_form_of_a_board_says_its_link_and_nothing_says_that_between_nodes():
    assert parse_cluster("2x8xa100-sxm4-80gb").intra_link.name == "nvlink-3"
    assert parse_cluster("2x8xa100-sxm4-80gb").inter_link is None
    assert parse_cluster("2xt4").intra_link.kind is LinkKind.PCIE
    assert parse_cluster("64xgb200").intra_link.name == "nvlink-5"  # NVL72
    assert parse_cluster("8xmi300x").intra_link.name == "infinity-fabric-4"
    assert link_of_board(load_catalog()["cpu"]) is None
    assert link_of_board(load_catalog()["gh200"]) is None


def test_links_that_are_named_win():
    found = parse_cluster("2x8xa100-sxm4-80gb", intra="pcie-4-x16", inter="8xinfiniband-hdr")
    assert (found.intra_link.name, found.inter_link.name, found.num_inter_links) == (
        "pcie-4-x16",
        "infiniband-hdr",
        8,
    )
    assert parse_link("ethernet-25g")[0] == 1


def test_a_file_says_all_of_it(tmp_path):
    (tmp_path / "ours.toml").write_text(
        '[cluster]\ndevice = "t4"\nnum_nodes = 3\nnum_devices_per_node = 2\ninter_link = "2xethernet-25g"\n'
    )
    found = parse_cluster(str(tmp_path / "ours.toml"))
    assert (found.num_nodes, found.num_devices_per_node, found.num_inter_links) == (3, 2, 2)


def test_a_measured_link_is_a_file(tmp_path):
    path = tmp_path / "link.toml"
    path.write_text(
        '[link]\nname = "ours"\ntitle = "Ours"\nkind = "host"\nbandwidth_gb_s = 1.5\nusable_share = 1.0\n'
        'latency_us = 100\n[link.sources]\nbandwidth_gb_s = "probe"\nusable_share = "probe"\nlatency_us = "probe"\n'
    )
    assert find_link(str(path)).usable_bytes_per_s == 1.5e9


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64))
def test_devices_are_spread_evenly_or_refused(nodes, per_node, number):
    cluster = parse_cluster(f"{nodes}x{per_node}xt4")
    needed = -(-number // per_node)
    if number % needed:
        with pytest.raises(InvalidSetupError, match="cannot be spread evenly"):
            cluster.with_devices(number)
    else:
        assert cluster.with_devices(number).num_devices == number


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0x8xt4", InvalidSetupError, "at least 1, got '0x8xt4'"),
        ("4x0xt4", InvalidSetupError, "at least 1, got '4x0xt4'"),
        ("-1x8xt4", InvalidSetupError, "at least 1, got '-1x8xt4'"),
        ("999999x8xt4", InvalidSetupError, "at most 100,000, got 7,999,992"),
        ("4x8xt5", UnknownDeviceError, "t5"),
    ],
)
def test_clusters_that_cannot_be_meant(text, error, message):
    with pytest.raises(error, match=message):
        parse_cluster(text)


@pytest.mark.parametrize("number", [0, -4])
def test_no_devices_are_refused(number):
    with pytest.raises(InvalidSetupError, match=f"devices must be at least 1, got {number}"):
        parse_cluster("1x8xt4").with_devices(number)


def test_devices_must_divide_by_nodes():
    with pytest.raises(
        InvalidSetupError, match="7 devices cannot be spread evenly over 2 nodes; give a multiple of 2"
    ):
        parse_cluster("1x8xt4").with_devices(7, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_link("nvlink-9"), "expected a link of the catalogue or a TOML file, got 'nvlink-9'"),
        (lambda: find_link("no-such.toml"), "there is none"),
        (lambda: parse_cluster("2xt4", intra="pci-3-x16"), "did you mean pcie-3-x16"),
    ],
)
def test_unknown_links_are_named_with_what_is_near(call, message):
    with pytest.raises(UnknownDeviceError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bandwidth_gb_s": -1}, "'bandwidth_gb_s' must be a positive number, got -1"),
        ({"usable_share": 1.5}, "usable_share"),
        ({"kind": "string"}, "'kind' must be one of nvlink, pcie"),
        ({"speed": 3}, "unknown key 'speed'"),
        ({"sources": {}}, "source"),
    ],
)
def test_links_without_a_figure_or_source_are_refused(change, message):
    table = {
        "name": "x",
        "title": "X",
        "kind": "pcie",
        "bandwidth_gb_s": 1,
        "usable_share": 0.5,
        "latency_us": 1,
        "sources": dict.fromkeys(("bandwidth_gb_s", "usable_share", "latency_us"), "a book"),
    }
    assert parse_links({"link": table}, "here")[0].name == "x"
    with pytest.raises(CatalogError, match=message):
        parse_links({"link": table | change}, "here")
