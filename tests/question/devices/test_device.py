"""Hardware files: what is read, and what is refused with a message that helps."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import CatalogError
from forerun.question.devices import DeviceKind, NumberFormat, load_catalog, load_device_file
from forerun.question.devices.rows import parse_devices

COMPLETE = {
    "name": "my-card",
    "title": "My card",
    "vendor": "nvidia",
    "kind": "gpu",
    "architecture": "ampere",
    "segment": "geforce",
    "release": "2021-03",
    "num_compute_units": 10,
    "boost_clock_mhz": 1500,
    "l2_cache_mb": 2,
    "memory_gb": 8,
    "memory_bandwidth_gb_s": 256.5,
    "memory_type": "GDDR6",
    "bus": "PCIe 4.0 x16",
    "power_limit_w": 120,
    "aliases": ["Card of mine"],
    "peak_tflops": {"fp32": 3.84, "fp16": 15.4},
    "sources": {"compute": "a", "memory": "b", "board": "c", "peak_tflops": "d"},
}
FILE = """
[device]
name = "my-card"
title = "My card"
vendor = "nvidia"
kind = "gpu"
architecture = "ampere"
segment = "geforce"
release = "2021-03"
num_compute_units = 10
boost_clock_mhz = 1500
l2_cache_mb = 2
memory_gb = 8
memory_bandwidth_gb_s = 256.5
memory_type = "GDDR6"
bus = "PCIe 4.0 x16"
power_limit_w = 120

[device.peak_tflops]
fp32 = 3.84
fp16 = 15.4

[device.sources]
compute = "data sheet"
memory = "data sheet"
l2_cache_mb = "device query"
board = "data sheet"
peak_tflops = { fp32 = "10 x 128 x 2 x 1.5 GHz", fp16 = "data sheet" }
"""


def parse(**changes):
    table = copy.deepcopy(COMPLETE) | changes
    return parse_devices({"device": [table]}, "test.toml")[0]


def without(key):
    table = copy.deepcopy(COMPLETE)
    del table[key]
    return {"device": [table]}


def test_units_become_si():
    device = parse()
    assert device.boost_clock_hz == 1.5e9
    assert device.l2_cache_bytes == 2 * 1024**2
    assert device.memory_bytes == 8 * 1024**3
    assert device.memory_bandwidth_bytes_per_s == pytest.approx(256.5e9)
    assert device.peak_flops_per_s == {NumberFormat.FP32: pytest.approx(3.84e12), NumberFormat.FP16: 15.4e12}
    assert device.kind is DeviceKind.GPU


def test_a_user_file_is_read(tmp_path):
    path = tmp_path / "card.toml"
    path.write_text(FILE, encoding="utf-8")
    device = load_device_file(path)
    assert device.name == "my-card"
    assert device.sources["l2_cache_bytes"] == "device query"
    assert device.sources["num_compute_units"] == "data sheet"
    assert device.sources["peak_flops_per_s.fp32"] == "10 x 128 x 2 x 1.5 GHz"


@pytest.mark.parametrize("key", [key for key in COMPLETE if key != "aliases"])
def test_a_missing_field_is_refused_by_name(key):
    with pytest.raises(CatalogError, match=rf"test\.toml.*{key}"):
        parse_devices(without(key), "test.toml")


@pytest.mark.parametrize("group", ["compute", "memory", "board", "peak_tflops"])
def test_a_missing_source_is_refused_by_name(group):
    sources = {key: text for key, text in COMPLETE["sources"].items() if key != group}
    with pytest.raises(CatalogError, match=r"test\.toml, device 'my-card'.*sources"):
        parse(sources=sources)


def test_the_message_names_the_figure_without_source():
    with pytest.raises(CatalogError, match=r"'boost_clock_mhz' has no source; add sources\.boost_clock_mhz"):
        parse(sources={"num_compute_units": "a", "memory": "b", "board": "c", "peak_tflops": "d"})


def test_every_rate_of_a_table_needs_its_source():
    with pytest.raises(CatalogError, match="fp16"):
        parse(sources=COMPLETE["sources"] | {"peak_tflops": {"fp32": "only this one"}})


@pytest.mark.parametrize("empty", ["", "  ", 3, None])
def test_an_empty_source_is_refused(empty):
    with pytest.raises(CatalogError, match="must be a text"):
        parse(sources=COMPLETE["sources"] | {"compute": empty})


@pytest.mark.parametrize("key", ["boost_clock_mhz", "memory_gb", "power_limit_w"])
@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), True, "10", None, [1]])
def test_figures_must_be_positive_numbers(key, bad):
    with pytest.raises(CatalogError, match=f"'{key}' must be a positive number"):
        parse(**{key: bad})


@given(st.floats(max_value=0) | st.sampled_from([float("nan"), float("inf")]))
def test_rates_must_be_positive_numbers(rate):
    with pytest.raises(CatalogError, match="'fp32' must be a positive number"):
        parse(peak_tflops={"fp32": rate})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"boost_clock_ghz": 1.5}, "unknown key 'boost_clock_ghz'; did you mean boost_clock_mhz"),
        ({"peak_tflops": {"fp32": 1, "fp4": 2}}, "unknown key 'fp4'"),
        ({"peak_tflops": {"fp16": 1}}, "'fp32' must be a positive number, got None; add it"),
        ({"peak_tflops": 12}, "'peak_tflops' must be a table"),
        ({"sources": {**COMPLETE["sources"], "colour": "x"}}, "unknown key 'colour'"),
        ({"sources": "datasheet"}, "'sources' must be a table"),
        ({"kind": "fpga"}, "'kind' must be one of gpu, cpu, tpu, npu"),
        ({"release": "March 2021"}, "year and month"),
        ({"release": "2021-13"}, "year and month"),
        ({"name": "My Card"}, "lower-case words"),
        ({"num_compute_units": 2.5}, "whole number"),
        ({"num_compute_units": 0}, "whole number above zero"),
        ({"aliases": "one"}, "list of names"),
        ({"aliases": [""]}, "list of names"),
    ],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(CatalogError, match=message):
        parse(**changes)


@pytest.mark.parametrize("document", [{}, {"device": []}, {"device": 3}, {"device": [3]}])
def test_a_file_without_a_device_is_refused(document):
    with pytest.raises(CatalogError, match="at least one"):
        parse_devices(document, "test.toml")


def test_a_user_file_holds_one_device(tmp_path):
    path = tmp_path / "two.toml"
    text = FILE.replace("[device]", "[[device]]")
    path.write_text(text + text, encoding="utf-8")
    with pytest.raises(CatalogError, match="expected one device, got 2"):
        load_device_file(path)


@pytest.mark.parametrize("content", [b"device = ", b"\xff\xfe\x00"])
def test_a_file_that_is_no_toml_is_refused(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(CatalogError, match=r"bad\.toml: expected a TOML file"):
        load_device_file(path)


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(CatalogError, match="expected a readable hardware file"):
        load_device_file(tmp_path / "absent.toml")


@pytest.mark.parametrize("device", load_catalog().values(), ids=lambda device: device.name)
def test_devices_survive_json(device):
    plain = json.loads(json.dumps(device.as_dict(), allow_nan=False))
    assert plain["peak_flops_per_s"]["fp32"] == device.peak_flops_per_s[NumberFormat.FP32]
    assert plain["sources"] == device.sources
    assert plain["memory_bytes"] == device.memory_bytes
    assert plain["kind"] == device.kind.value
