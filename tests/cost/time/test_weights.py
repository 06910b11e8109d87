"""The fitted model on disk: a round trip, and one clear error for every way a file can be wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from forerun.base.errors import CostModelError
from forerun.cost.time.features import Point, software_era
from forerun.cost.time.systems import system_key
from forerun.cost.time.weights import NetworkWeights, load_weights, save_weights
from forerun.question.devices import find_device
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from op_models import random_weights, shipped_weights


def contents(path):
    with safe_open(path, framework="numpy") as file:
        names = file.keys()
        header = json.loads(file.metadata()["forerun"])
        del header["sha256"]  # a stranger's file may have none
        return {name: file.get_tensor(name) for name in names}, header


def rewrite(path, tensors, header):
    save_file(tensors, path, metadata={"forerun": json.dumps(header)})


@pytest.fixture
def path(tmp_path):
    save_weights(random_weights(), tmp_path / "new" / "model.safetensors")
    return tmp_path / "new" / "model.safetensors"


def test_a_round_trip_loses_nothing(path):
    saved, loaded = random_weights(), load_weights(path)
    assert loaded.systems == saved.systems
    assert loaded.provenance == saved.provenance
    for ours, theirs in zip(loaded.networks, saved.networks, strict=True):
        for name in NetworkWeights.__slots__:
            np.testing.assert_array_equal(getattr(ours, name), np.atleast_1d(getattr(theirs, name)))


def test_a_missing_file(tmp_path):
    with pytest.raises(CostModelError, match=r"missing: expected absent.safetensors.*reinstall forerun"):
        load_weights(tmp_path / "absent.safetensors")


@pytest.mark.parametrize("content", [b"", b"no tensors", b"\xff" * 100])
def test_a_file_that_holds_something_else(path, content):
    path.write_bytes(content)
    with pytest.raises(CostModelError, match="damaged"):
        load_weights(path)


def test_half_a_file(path):
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CostModelError, match="damaged"):
        load_weights(path)


def test_tensors_without_our_header(tmp_path):
    save_file({"0.mean": np.zeros(3)}, tmp_path / "plain.safetensors")
    with pytest.raises(CostModelError, match="damaged"):
        load_weights(tmp_path / "plain.safetensors")


@pytest.mark.parametrize("change", [{"features": ["flops"]}, {"format_version": 0}, {"features": []}])
def test_a_file_for_another_version(path, change):
    tensors, header = contents(path)
    rewrite(path, tensors, header | change)
    with pytest.raises(
        CostModelError, match=r"another version of forerun.*reinstall forerun.*forerun calibrate"
    ):
        load_weights(path)


def test_features_in_another_order(path):
    tensors, header = contents(path)
    rewrite(path, tensors, header | {"features": header["features"][::-1]})
    with pytest.raises(CostModelError, match="another version"):
        load_weights(path)


@pytest.mark.parametrize("name", ["1.latency", "0.mean"])
def test_a_missing_tensor(path, name):
    tensors, header = contents(path)
    del tensors[name]
    rewrite(path, tensors, header)
    with pytest.raises(CostModelError, match=rf"1 tensors are missing, first {name}"):
        load_weights(path)


def test_no_tensor_at_all(path):
    _, header = contents(path)
    rewrite(path, {"note": np.zeros(1)}, header)
    with pytest.raises(CostModelError, match="tensors are missing"):
        load_weights(path)


@pytest.mark.parametrize("name", ["systems", "provenance"])
def test_a_header_without_a_part(path, name):
    tensors, header = contents(path)
    del header[name]
    rewrite(path, tensors, header)
    with pytest.raises(CostModelError, match=f"damaged.*{name}"):
        load_weights(path)


SYSTEMS = (
    system_key("timm", "t4", "amp", "nhwc", "compiled", "2.4", "train"),
    system_key("timm", "t4", "amp", "nchw", "eager", "2.4", "train"),
    system_key("other", "t4", "amp", "nchw", "eager", "1.12", "inference"),
    system_key("other", "rtx-3090", "fp32", "nchw", "eager", "2.4", "train"),
)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"layout": Layout.NHWC, "compile": True}, 0),
        ({}, 1),
        ({"phase": Phase.INFERENCE}, 2),
        ({"precision": Precision.FP32}, 1),
        ({"precision": Precision.FP32, "device": "rtx-3090"}, 3),
        ({"precision": Precision.FP32, "device": "rtx-3080"}, None),
        ({"precision": Precision.FP32, "device": "h100-sxm", "compile": True}, None),
    ],
)
def test_the_system_of_a_calibration_that_is_most_alike_speaks_for_a_point_if_any_is_alike(asked, expected):
    calibrated = replace(
        random_weights(num_members=2, systems=SYSTEMS), provenance={"calibrated_device": "T4"}
    )
    check_offsets(calibrated, asked, expected)


@pytest.mark.parametrize(
    ("asked", "version", "expected"),
    [
        ({}, "2.4", 1),
        ({}, "2.5", 1),
        ({"layout": Layout.NHWC}, "2.4", None),
        ({"precision": Precision.FP32}, "2.4", None),
        ({"device": "mi100"}, "2.4", None),
    ],
)
def test_another_machine_speaks_for_equal_settings_alone(asked, version, expected):
    check_offsets(random_weights(num_members=2, systems=SYSTEMS), asked, expected, version)


def test_a_board_of_the_same_die_speaks_where_nobody_measured_the_board_itself():
    twin = SYSTEMS[0].replace("t4", "v100-sxm2-16gb")
    weights = random_weights(num_members=2, systems=[*SYSTEMS[1:], twin])
    parts = twin.split("|")
    setup = TrainingSetup(
        precision=parts[2], layout=parts[3], compile=parts[4] == "compiled", phase=Phase(parts[6])
    )
    own, other, kin, none = (
        weights.offsets_of_point(Point(device=find_device(name), setup=setup))
        for name in ("v100-sxm2-16gb", "v100-sxm2-32gb", "titan-v", "a100-sxm4-40gb")
    )
    assert np.abs(own).max() > 0
    np.testing.assert_array_equal(own, other)
    # One board of three halves; less where half precision would be slower than single, or a lesser board quicker.
    assert (kin[:, 0] <= own[:, 0] * 2 / 3 + 0.1).all()
    assert not none.any()


def test_more_bandwidth_of_a_die_counts_by_half():
    weights = shipped_weights()
    small, large = (
        weights.offsets_of_point(
            Point(device=find_device(name), setup=TrainingSetup(precision=Precision.AMP))
        )
        for name in ("gh200", "h200-sxm")
    )
    np.testing.assert_allclose(large[:, 1] - small[:, 1], 0.5 * np.log(4.8e12 / 4.022e12), rtol=0.01)


def check_offsets(weights, asked, expected, version="2.4"):
    device = find_device(asked.get("device", "t4"))
    others = {name: value for name, value in asked.items() if name != "device"}
    setup = TrainingSetup(**({"precision": Precision.AMP} | others))
    found = weights.offsets_of_point(Point(device=device, setup=setup, era=software_era(version)))
    assert found.shape == (2, 4)
    of_machine = float(weights.is_of_one_machine)  # host and loop
    for offsets, network in zip(found, weights.networks, strict=True):
        latents = (
            np.zeros(4) if expected is None else network.latents[expected] * (1, 1, of_machine, of_machine)
        )
        np.testing.assert_allclose(offsets, latents, rtol=1e-6)


def test_the_shipped_model_says_where_it_came_from():
    weights = shipped_weights()
    provenance = weights.provenance
    assert len(weights.networks) >= 2
    assert sum(provenance["rows"].values()) > 1000
    assert provenance["date"] > "2020"
    assert all(
        np.isfinite(getattr(network, name)).all()
        for network in weights.networks
        for name in network.__slots__
    )
    assert provenance["measured_devices"]
