"""Layers and steps of Keras on TensorFlow, for real: what they are, what is recorded, what is refused."""

import csv
import json
import os
import subprocess
import sys
from importlib import util

import pytest
from layer_sizes import SIZES

import forerun
from forerun.adapters.classics.layer_table import read_layers
from forerun.base.errors import InvalidSetupError, UnknownModelError
from forerun.evidence.measurement.layer_design import design_layers
from forerun.evidence.measurement.layer_figures import LAYER_KINDS, layer_figures
from forerun.evidence.measurement.settings import LayerDesign
from forerun.evidence.records.measurement import JobKind
from forerun.evidence.records.record_store import RecordStore
from forerun.evidence.records.step_record import as_step_record

needs_tensorflow = pytest.mark.skipif(
    util.find_spec("tensorflow") is None, reason="the extra 'keras' is not installed"
)

LAYERS_AND_STEPS = """
import json, sys
from forerun.adapters.keras.runner import open_tensorflow, run_keras_job, set_keras_defaults, use_tensorflow
use_tensorflow()
from forerun.base.errors import ForerunError
from forerun.adapters.keras import layers as keras_layers
from forerun.adapters.keras.layers import build_keras_layer
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.question.setup import Layout, TrainingSetup
open_tensorflow("cpu", Protocol(num_threads=1))
set_keras_defaults(TrainingSetup(layout=Layout.NHWC))
told = {}
for kind, asked in json.loads(sys.argv[1]).items():
    layer = build_keras_layer(kind, asked)
    told[kind] = {"output": layer.output_shape[1:], "parameters": layer.count_params()}
try:
    build_keras_layer("conv2d", {"batch_size": 1, "in_features": 1, "in_size": 9, "out_features": 1, "kernel": 4})
except ForerunError as error:
    told["even kernel"] = str(error)
layer = build_keras_layer("dense", {"batch_size": 3, "in_features": 8, "out_features": 5})
for name in ("none", "sgd-plain"):
    given = keras_layers._input(layer, 3)
    before = layer.get_weights()[0].copy()
    keras_layers._train_step(layer, given, TrainingSetup(optimizer=name), True)()
    told[f"changed by {name}"] = bool((layer.get_weights()[0] != before).any())
protocol = Protocol(min_warm_up=1, max_warm_up=3, window=3, num_repetitions=4, num_threads=1)
steps = []
for text in json.loads(sys.argv[2]):
    try:
        found = run_keras_job(MeasurementJob.from_json(text), "cpu", protocol)
        steps.append([len(found.repetitions_s), found.results])
    except ForerunError as error:
        steps.append([type(error).__name__, str(error)])
print(json.dumps([told, steps]))
"""

COMMANDS = """
import json, sys, tempfile
from typer.testing import CliRunner
from forerun.surface.cli.main import app
tempfile.tempdir = sys.argv[2]  # must not wait for a session of this machine
if __name__ == "__main__":
    told = []
    for words in json.loads(sys.argv[1]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.stderr
        told.append(json.loads(done.stdout))
    print(json.dumps(told))
"""

MODELS_PY = """
import keras

def two_inputs():
    a, b = keras.Input((4,)), keras.Input((3,))
    joined = keras.layers.Concatenate()([a, b])
    return keras.Model([a, b], keras.layers.Dense(1, activation="sigmoid")(joined))
"""


def run_script(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kind_is_tested_here():
    assert set(SIZES) == set(LAYER_KINDS)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What layers and what jobs tell, of one process that loads TensorFlow."""
    path = tmp_path_factory.mktemp("keras") / "models.py"
    path.write_text(MODELS_PY)

    def job(subject, **parameters):
        asked = {"batch_size": 4, "layout": "nhwc", "optimizer": "sgd", **parameters}
        return json.dumps({"kind": "step", "subject": subject, "family": "test", "parameters": asked})

    jobs = [
        job("keras:mlp:depth=1,width=3", image_size=6),
        job(f"{path}:two_inputs", optimizer="adam"),
        job("keras:mlp:depth=1,width=3", phase="inference"),
        job("keras:mlp", optimizer="lamb"),
        job("keras:ResNet51"),
    ]
    return run_script(LAYERS_AND_STEPS, json.dumps(SIZES), json.dumps(jobs))


@needs_tensorflow
def test_a_layer_of_keras_is_the_layer_that_its_sizes_say(answers):
    told, _ = answers
    for kind, asked in SIZES.items():
        figures = layer_figures(kind, asked)
        shape = figures.output_shape[1:]
        expected = (*shape[1:], shape[0]) if len(shape) == 3 else shape
        assert tuple(told[kind]["output"]) == expected, kind
        if kind not in (
            "lstm",
            "batch_norm",
        ):  # one vector of biases instead of two; running statistics count in Keras
            assert told[kind]["parameters"] == figures.num_parameters, kind
    assert told["changed by sgd-plain"]
    assert not told["changed by none"]
    assert "choose an odd kernel" in told["even kernel"]


@needs_tensorflow
def test_layers_and_models_are_measured_kept_resumed_and_fit_for_a_regressor(tmp_path):
    records, table = tmp_path / "r.sqlite", tmp_path / "layers.csv"
    quick = (
        "--threads",
        "1",
        "--repetitions",
        "3",
        "--max-seconds",
        "0.1",
        "--records",
        str(records),
        "--json",
    )
    layers = (
        *("measure", "layers", "--framework", "keras", "--kinds", "dense,max_pool", "--num-layers", "2"),
        *("--max-gflop", "0.001", "--max-mb", "0.1", *quick, "--csv", str(table)),
    )
    model = ("measure", "model", "mlp:depth=1,width=2", "--framework", "keras", "--batch-sizes", "4", *quick)
    first, again, step = run_script(COMMANDS, json.dumps([layers, layers, model]), str(tmp_path))
    assert (first["outcomes"], step["outcomes"]) == ({"done": 4}, {"done": 1})
    assert again["num_skipped"] == 4
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows].count("null") == 2
    assert {row["layer"] for row in rows} == {"null", "dense", "max_pool"}
    assert all(
        float(row["time_ms_min"]) <= float(row["time_ms"]) <= float(row["time_ms_max"]) for row in rows
    )
    with RecordStore.open(records, create=False) as store:
        (dense,) = [m for m in store.measurements(kind=JobKind.LAYER) if m.subject == "dense"]
        (trained,) = store.measurements(kind=JobKind.STEP)
    assert dense.circumstances.framework == "keras"
    assert dense.parameters["layout"] == "nhwc"
    assert {"flops", "input_bytes", "output_bytes", "weight_bytes"} <= set(dense.parameters)
    assert {"num_parameters", "first_step_s", "peak_rss_delta_bytes"} <= set(dense.results)
    found = read_layers([records])
    assert len(found.time_s) == 4
    assert found.software[0].startswith("keras 3")
    assert (trained.subject, trained.family) == ("keras:mlp:depth=1,width=2", "mlp")
    record = as_step_record(trained)
    assert record.framework == "keras"
    assert record.training_setup().layout == "nhwc"


@needs_tensorflow
def test_steps_of_fit_are_timed_for_any_model_and_bad_jobs_say_why(answers):
    _, (mlp, two, phase, optimizer, name) = answers
    assert mlp[0] == 4
    assert mlp[1]["num_parameters"] == (6 * 6 + 1) * 3 + 4 * 10
    assert mlp[1]["first_step_s"] > 0
    assert two[1]["num_parameters"] == 4 + 3 + 1
    assert phase == ["InvalidSetupError", "steps of Keras are measured in training only, got phase inference"]
    assert optimizer[0] == "InvalidSetupError"
    assert name[0] == "UnknownModelError"


def test_even_windows_padded_the_same_are_no_layers_of_a_design_for_keras():
    design = {"kinds": ("conv2d", "max_pool"), "num_layers": 60, "with_null": False}
    of_pytorch, of_keras = (design_layers(LayerDesign(**design, framework=f)) for f in ("pytorch", "keras"))

    def even_and_same(jobs):
        return [j for j in jobs if j.parameters["padding"] == "same" and j.parameters["kernel"] % 2 == 0]

    assert even_and_same(of_pytorch)
    assert not even_and_same(of_keras)
    assert any(job.parameters["kernel"] % 2 == 0 for job in of_keras)


@pytest.mark.parametrize("options", [{"framework": "jax"}, {"framework": "keras", "copies": 2}])
def test_designs_that_cannot_be_are_refused(options):
    with pytest.raises(InvalidSetupError, match="expected framework pytorch"):
        LayerDesign(**options)


@needs_tensorflow
@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("keras:mnist-cnn", {"framework": "pytorch"}, InvalidSetupError, "expected framework keras"),
        ("mnist-cnn", {"framework": "jax"}, InvalidSetupError, "expected framework keras"),
        ("mnist-cnn", {"num_servers": 1}, InvalidSetupError, "parameter servers are those of TensorFlow"),
        ("keras:mnist-cnn", {"num_devices": 2}, InvalidSetupError, "--replicas N"),
        ("keras:mnist-cnn", {"num_servers": -1}, InvalidSetupError, "0 or more"),
        ("keras:mnist-cnn", {"num_servers": 1, "num_workers": 0}, InvalidSetupError, "at least one worker"),
        ("keras:mnist-cnn", {"num_servers": 1, "optimizer": "adam"}, InvalidSetupError, "sgd-plain only"),
        ("keras:mnist-cnn", {"num_servers": 1, "device": "cuda:0"}, InvalidSetupError, "device cpu only"),
        ("keras:mnist-cnn", {"phase": "inference"}, InvalidSetupError, "in training only"),
        ("keras:mnist-cnn", {"optimizer": "adm"}, InvalidSetupError, "expected an optimizer"),
        ("keras:mnist-cnn", {"ray": "auto"}, InvalidSetupError, "leave --ray out"),
        ("keras:cnn:dept=2", {}, UnknownModelError, "did you mean depth"),
        ("keras:nothing.keras", {}, UnknownModelError, "there is no file"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, options, error, message, tmp_path):
    with pytest.raises(error, match=message):
        forerun.measure_model(model, records=tmp_path / "r.sqlite", **options)
