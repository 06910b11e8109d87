"""Model files that cannot be used: each says why, none gives an untrained guess."""

import json
import warnings

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from forerun.adapters.classics.baselines import STORABLE_KINDS, BoostedTrees
from forerun.adapters.classics.model_file import TrainedModel, load_model_file
from forerun.adapters.classics.network_regressors import AnnSettings, NeuralNetwork
from forerun.base.errors import CostModelError, StoreWarning
from regressor_cases import lawful_times_s, random_features

ENTRY = "forerun_regressor"


@pytest.fixture(params=["ann", "boosting"])
def model_path(request, tmp_path):
    features = random_features(20)
    regressor = {
        "ann": NeuralNetwork(AnnSettings(hidden_sizes=(4, 4), max_epochs=2, seeds=(0,))),
        "boosting": BoostedTrees(),
    }[request.param]
    regressor.fit(features, lawful_times_s(features))
    path = tmp_path / "model.safetensors"
    TrainedModel(regressor=regressor, provenance={"records": ["a.csv"]}).save(path)
    return path


def rewrite(path, header=None, arrays=None):
    """Writes the file again with a changed header and changed arrays."""
    with safe_open(path, framework="numpy") as file:
        old = json.loads(file.metadata()[ENTRY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    old.pop("sha256", None)  # a stranger's file may have none
    save_file({**tensors, **(arrays or {})}, path, metadata={ENTRY: json.dumps({**old, **(header or {})})})


def load(path):
    return load_model_file(path, STORABLE_KINDS)


def test_the_header_says_what_a_reader_needs(model_path):
    with safe_open(model_path, framework="numpy") as file:
        header = json.loads(file.metadata()[ENTRY])
    assert set(header) == {
        "format_version", "kind", "kind_version", "features", "settings", "provenance", "sha256"
    }  # fmt: skip
    assert header["features"]


def test_a_missing_file(tmp_path):
    with pytest.raises(CostModelError, match=r"no such file.*forerun fit"):
        load(tmp_path / "none.safetensors")


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_cut_off_file(model_path, keep):
    model_path.write_bytes(model_path.read_bytes()[:keep])
    with pytest.raises(CostModelError, match="damaged"):
        load(model_path)


def test_another_file_of_the_same_format(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(CostModelError, match="no model file of"):
        load(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format_version": 2}, "newer than this program"),
        ({"kind_version": 9}, "newer than this program"),
        ({"format_version": 0}, "older than this program"),
        ({"kind_version": 0}, "older than this program"),
        ({"kind_version": "one"}, "damaged"),
        ({"kind": "forest"}, "does not know"),
        ({"features": ["depth"]}, "older than this program: it reads other columns"),
        ({"settings": {}}, "damaged"),
    ],
)
def test_a_file_of_other_code(model_path, header, message):
    rewrite(model_path, header)
    with pytest.raises(CostModelError, match=message):
        load(model_path)


def test_damaged_numbers(model_path):
    with safe_open(model_path, framework="numpy") as file:
        names = sorted(file.keys())
        first = file.get_tensor(names[0])
    rewrite(model_path, arrays={names[0]: np.full(first.shape, np.nan)})
    with pytest.raises(CostModelError, match="NaN"):
        load(model_path)


def test_a_changed_number_does_not_have_the_checksum(model_path):
    content = bytearray(model_path.read_bytes())
    content[-1] ^= 1
    model_path.write_bytes(content)
    with pytest.raises(CostModelError, match="checksum"):
        load(model_path)


def test_arrays_that_contradict_the_settings(model_path):
    rewrite(model_path, arrays={"0.0.weight": np.zeros((1, 1)), "log_times": np.zeros(3)})
    with pytest.raises(CostModelError, match="damaged"):
        load(model_path)


@pytest.mark.parametrize("name", ["ranges", "shared", "started_from"])
def test_a_fact_without_a_value(model_path, name):
    rewrite(model_path, {"provenance": {"records": ["a.csv"], name: None}})
    with pytest.raises(CostModelError, match=rf"provenance {name}: expected .*, got 'None'"):
        load(model_path)


def test_trees_of_earlier_versions_are_refused_and_those_of_another_release_of_the_library_named(tmp_path):
    features = random_features(20)
    trees = BoostedTrees()
    trees.fit(features, lawful_times_s(features))
    path = tmp_path / "trees.safetensors"
    TrainedModel(regressor=trees, provenance={}).save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(path)
    rewrite(path, {"settings": {"seed": 0, "scikit_learn": "0.1"}})
    with pytest.warns(StoreWarning, match=r"grew in scikit-learn 0\.1 .* scikit-learn==0\.1"):
        load(path)
    rewrite(path, {"kind_version": 1})
    with pytest.raises(
        CostModelError, match=r"older than this program.*forerun fit RECORDS --model boosting"
    ):
        load(path)


def test_a_folder_that_cannot_be_written_leaves_nothing(model_path, tmp_path):
    model = load(model_path)
    with pytest.raises(CostModelError, match="cannot be written"):
        model.save(tmp_path / "none" / "a.safetensors")


def test_writing_again_replaces_the_file(model_path):
    before = model_path.read_bytes()
    load(model_path).save(model_path)
    assert model_path.read_bytes() == before
    assert list(model_path.parent.iterdir()) == [model_path]
