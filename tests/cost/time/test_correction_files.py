"""A calibration belongs to one framework: never taken for models of the other, and said where it is passed over."""

from dataclasses import replace

import pytest

import forerun
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.cost.time.correction import (
    CALIBRATIONS_VARIABLE,
    calibration_path,
    find_calibration,
    load_calibration,
)
from forerun.cost.time.weights import save_weights
from forerun.prediction.estimate_run import estimate_run
from forerun.prediction.stack import calibrated_effect, stack_note
from forerun.prediction.step import prepare, timed_steps
from forerun.question.devices import find_device
from forerun.question.devices.cluster import cluster_of
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Phase, TrainingSetup
from forerun.tracing.trace import trace
from made_calibrations import made_calibration

SETUP = TrainingSetup(batch_size_per_device=64)
HERE = find_device("here")


def calibrated(framework, step_cost_s=0.0):
    return made_calibration(HERE, framework, step_cost_s)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(CALIBRATIONS_VARIABLE, str(tmp_path))
    return tmp_path


def test_each_framework_has_a_file_of_its_own(folder):
    save_weights(calibrated("keras", 0.002), calibration_path(HERE, "keras"))
    assert find_calibration(HERE) is None
    assert find_calibration(HERE, "keras").step_cost_s == 0.002
    save_weights(calibrated("pytorch"), calibration_path(HERE))
    assert find_calibration(HERE).calibrated_stack == "pytorch"
    assert find_calibration(HERE, "keras").calibrated_stack == "keras"


def test_a_file_of_the_other_framework_is_refused(folder):
    path = folder / "mine.safetensors"
    save_weights(calibrated("keras"), path)
    with pytest.raises(UsageError, match=r"a calibration of keras, but the model runs with pytorch"):
        forerun.predict("mnist-cnn", device="here", calibration=path)
    save_weights(calibrated("pytorch"), folder / "other.safetensors")
    with pytest.raises(UsageError, match="make one with: forerun calibrate --framework keras"):
        load_calibration(folder / "other.safetensors", HERE, "keras")
    assert load_calibration(path, HERE, "keras").calibrated_stack == "keras"


def test_a_calibration_that_is_passed_over_is_told(folder):
    said = "calibration of keras, which does not hold for pytorch"
    assert not any(said in note for note in forerun.predict("mnist-cnn", device="here").notes)
    save_weights(calibrated("keras"), calibration_path(HERE, "keras"))
    found = forerun.predict("mnist-cnn", device="here")
    assert any(said in note for note in found.notes)
    assert found.provenance != "calibrated"


def test_the_cost_of_the_loop_is_a_part_of_a_calibrated_prediction():
    graph = trace(ModelRequest(model="mnist-cnn"), SETUP)
    keras = replace(graph, versions=(*graph.versions, ("keras", "3.15.1")))
    weights = calibrated("keras", 0.002)
    run = Run(model=ModelRequest(model="mnist-cnn"), setup=SETUP, cluster=cluster_of(HERE, 1, 1))
    found, plain = (estimate_run(prepare(g), None, run, weights).estimate for g in (keras, graph))
    assert found.step_time_s.value == pytest.approx(plain.step_time_s.value + 0.002)
    parts = {part.name: part.time_s for part in found.breakdown}
    assert parts["training loop of Keras on TensorFlow"] == 0.002
    assert sum(parts.values()) == pytest.approx(found.step_time_s.value)
    assert found.provenance == "calibrated"
    assert any("a step of fit costs 2.0 ms" in note for note in found.notes)
    assert "keras 3.0" in stack_note(calibrated_effect(weights), "cpu")


def test_a_calibration_keeps_the_width_of_the_interval():
    graph = trace(ModelRequest(model="mnist-cnn"), SETUP)
    keras = replace(graph, versions=(*graph.versions, ("keras", "3.15.1")))
    weights = calibrated("keras", 0.5)
    plain, found = (timed_steps(prepare(g), [HERE], [SETUP], weights) for g in (graph, keras))
    assert found.step_s - plain.step_s == pytest.approx(0.5)
    assert found.log_width == pytest.approx(plain.log_width)
    inference = replace(SETUP, phase=Phase.INFERENCE, optimizer="none")
    plain, found = (timed_steps(prepare(g), [HERE], [inference], weights) for g in (graph, keras))
    assert found.step_s == pytest.approx(plain.step_s)


def test_a_framework_nobody_calibrates_is_refused():
    with pytest.raises(InvalidSetupError, match="expected framework pytorch or keras, got 'jax'"):
        forerun.calibrate(framework="jax")


def test_a_plan_of_both_frameworks_takes_no_calibration(folder):
    from forerun.prediction.models import TracedModels
    from forerun.search.devices import parse_devices
    from forerun.search.engine import Engine
    from forerun.search.search import SETTINGS, Search

    save_weights(calibrated("pytorch"), calibration_path(HERE))
    (option,) = parse_devices("here")
    models = {"pytorch": "mnist-cnn", "keras": "keras:mnist-cnn"}
    for stacks, expected in ((("pytorch",), "pytorch"), (("keras",), None), (("keras", "pytorch"), None)):
        run = Run.of(models[stacks[0]], device=option.cluster)
        axes = {
            SETTINGS: [{"model": models[stack]} for stack in stacks],
            "device": [option],
            "batch_size": [8],
        }
        found = Engine(Search(run=run, axes=axes), TracedModels()).weights_of(option)
        assert found.calibrated_stack == expected
