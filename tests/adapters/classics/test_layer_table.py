"""The layer network on measured layers: own ones by a law, public ones as they are; whole models as sums."""

import os
from pathlib import Path

import numpy as np
import pytest

from forerun.adapters.classics.layer_table import measured_layer_table, public_layer_table
from forerun.adapters.classics.regressor_fit import fit_layer_regressor
from forerun.adapters.classics.trained_models import load_trained_model, predict_step_time, save_trained_model
from forerun.base.errors import CostModelError, RecordError, UsageError
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.measurement.layer_modules import model_layers
from forerun.evidence.records.measurement import JobKind, Outcome
from forerun.question.model import ModelRequest
from made_measurements import measurement

CHOICES = {"max_epochs": 60}


def made_layers(n):
    """Layers of the CNN family, training steps by a law of work."""
    draw = np.random.default_rng(0)
    for number in range(n):
        kind = ("conv2d", "dense", "max_pool")[number % 3]
        sizes = {"batch_size": int(2 ** draw.integers(2, 8)), "in_features": int(2 ** draw.integers(2, 7))}
        if kind != "dense":
            sizes |= {"in_size": int(2 ** draw.integers(2, 6)), "kernel": 3 if kind == "conv2d" else 2}
            sizes |= {
                "stride": 1 if kind == "conv2d" else 2,
                "padding": "same" if kind == "conv2d" else "valid",
            }
        if kind != "max_pool":
            sizes |= {"out_features": int(2 ** draw.integers(2, 7)), "use_bias": True}
            sizes |= {"activation": str(draw.choice(["relu", "none"]))}
        figures = layer_figures(kind, sizes)
        time_s = 3e-5 + 3 * figures.flops / 5e10 + 12 * (figures.num_inputs + figures.num_outputs) / 1e10
        yield measurement(
            number,
            kind=JobKind.LAYER,
            subject=kind,
            family=kind,
            parameters={**sizes, "mode": "train_step", "optimizer": "adam"},
            repetitions_s=(time_s,) * 3,
            summary=None,
        )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    result = fit_layer_regressor(measured_layer_table(made_layers(900)), ["layers"], CHOICES)
    path = tmp_path_factory.mktemp("layers") / "layers.safetensors"
    save_trained_model(result.model, path)
    return result, load_trained_model(path)


def test_unseen_layers_follow_the_law(fitted):
    result, _ = fitted
    assert result.split.startswith("80:10:10")
    assert result.metrics["layers"].median_ape < 0.12
    assert result.metrics["layers"].median_ape < 0.5 * result.metrics["linear on FLOPs"].median_ape


def test_a_whole_model_is_the_sum_of_its_layers(fitted):
    _, model = fitted
    request = ModelRequest(model="cnn:depth=2,base_filters=32", image_size=32)
    layers = model_layers(request, 64).layers
    same = {"mode": "train_step", "optimizer": "adam"}
    alone = [predict_step_time(model, {"layer": kind, **sizes, **same}) for kind, sizes in layers]
    whole = predict_step_time(model, {"depth": 2, "base_filters": 32, "batch_size": 64, "optimizer": "adam"})
    assert whole == pytest.approx(sum(alone))


def test_the_layers_of_the_cnn_family():
    found = model_layers(ModelRequest(model="cnn:depth=2,base_filters=32", image_size=32), 64)
    assert [kind for kind, _ in found.layers] == [
        "conv2d", "conv2d", "max_pool", "conv2d", "conv2d", "max_pool", "dense", "dense",
    ]  # fmt: skip
    assert found.layers[0][1] == {
        "batch_size": 64, "in_features": 3, "in_size": 32, "out_features": 32, "kernel": 3, "stride": 1,
        "padding": "same", "use_bias": True, "activation": "relu",
    }  # fmt: skip
    assert found.layers[-1][1]["activation"] == "none"
    assert found.left_out == ()


def test_layers_that_nobody_measures_are_named(fitted):
    _, model = fitted
    with pytest.raises(UsageError, match="AdaptiveAvgPool2d"):
        predict_step_time(model, {"model": "torchvision:resnet18", "optimizer": "adam"})


def test_a_kind_of_layer_that_was_not_fitted(fitted):
    _, model = fitted
    question = {
        "layer": "layer_norm",
        "batch_size": 4,
        "sequence_length": 8,
        "in_features": 16,
        "mode": "train_step",
    }
    with pytest.raises(CostModelError, match="cannot tell the time of layer layer_norm"):
        predict_step_time(model, question)


def test_jobs_that_failed_and_steps_are_passed_over():
    layers = list(made_layers(6))
    failed = measurement(99, kind=JobKind.LAYER, subject="dense", outcome=Outcome.FAILED, repetitions_s=())
    assert len(measured_layer_table([*layers, failed, measurement(100)]).time_s) == 6
    with pytest.raises(RecordError, match="measure layers"):
        measured_layer_table([measurement(1)])


def test_repetitions_of_a_layer_share_a_configuration():
    layers = list(made_layers(6))
    table = measured_layer_table([*layers, *layers])
    assert len(set(table.configurations)) == 6
    assert table.configurations[:6] == table.configurations[6:]


def reference(name):
    named = os.environ.get("FORERUN_REFERENCE_DATA")
    folder = Path(named) if named else Path(__file__).parents[4] / "shared" / "data"
    path = folder / f"{name}.parquet"
    if not path.is_file():
        pytest.skip(f"the public table {name} is not at FORERUN_REFERENCE_DATA or ../shared/data")
    return path


@pytest.mark.reference
@pytest.mark.parametrize(("name", "most_median"), [("justus_layers", 0.15), ("iit_layers", 0.15)])
def test_public_layers(name, most_median):
    table = public_layer_table(reference(name), most_rows=5000)
    result = fit_layer_regressor(table, [name], {"max_epochs": 50})
    assert result.metrics["layers"].median_ape < most_median
    assert result.metrics["linear on FLOPs"].median_ape > 2 * most_median
