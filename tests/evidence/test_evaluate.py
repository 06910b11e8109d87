"""What may be said of a table of measured steps, and where it is refused."""

from dataclasses import replace
from importlib import util

import numpy as np
import pytest

import forerun
from forerun.base.errors import InvalidSetupError, UsageError
from forerun.cost.time.weights import save_weights
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import OpClass
from forerun.question.devices import find_device
from forerun.question.setup import Phase, Precision
from made_calibrations import made_calibration
from made_tables import write_records

HERE = find_device("here")
SLOWER = 0.7  # added to the logarithm of every operation's time


@pytest.fixture(scope="module")
def timm(tmp_path_factory):
    path = tmp_path_factory.mktemp("timm") / "benchmark.csv"
    path.write_text(
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
        "resnet18,400.0,160.0,64,64,11.69\n"
    )
    return path


def row(model="torchvision:resnet18", device="cpu", **changes):
    values = {
        "source": "mine",
        "row_id": f"{model} {device}",
        "model": model,
        "family": "resnet",
        "device": device,
        "batch_size_per_device": 16,
        "image_size": 64,
        "step_time_s": 0.1,
        "precision": Precision.FP32,
        "phase": Phase.TRAIN,
        "optimizer": "sgd",
        "includes_optimizer": True,
    }
    return StepRecord(**{**values, **changes})


@pytest.fixture
def own(tmp_path):
    def write(*rows):
        write_records(rows, tmp_path / "own.csv")
        return tmp_path / "own.csv"

    return write


@pytest.fixture
def calibration(tmp_path):
    """A calibration of this machine, slower in every operation, with the provenance of a measured one."""
    weights = made_calibration(HERE)
    provenance = dict(weights.provenance)
    provenance["started_from"] = {"rows": provenance.pop("rows")}
    provenance["models"] = ["torchvision:resnet18"]
    path = tmp_path / "here.safetensors"
    save_weights(replace(weights, class_offsets=(SLOWER,) * len(OpClass), provenance=provenance), path)
    return path


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"precision": "amp"}, "--precision"),
        ({"layout": "nhwc"}, "--layout"),
        ({"compile": True}, "--compile"),
        ({"torch_version": "2.4"}, "--torch-version"),
    ],
)
def test_what_each_row_says_itself_is_refused(own, option, name):
    with pytest.raises(InvalidSetupError, match=f"every row of own.csv says .* {name} would"):
        forerun.evaluate(own(row()), **option)


@pytest.mark.parametrize(
    ("option", "group"),
    [
        ({}, "precision amp"),
        ({"precision": "fp32"}, "precision fp32"),
        ({"layout": "nhwc"}, "layout nhwc"),
    ],
)
def test_what_is_said_of_a_timm_table_is_used(timm, option, group):
    assert group in forerun.evaluate(timm, devices=["rtx-3090"], **option).groups


@pytest.mark.parametrize("option", [{"compile": True}, {"torch_version": "1.12"}, {"precision": "fp32"}])
def test_what_is_said_of_a_timm_table_changes_the_prediction(timm, option):
    usual, other = (forerun.evaluate(timm, devices=["rtx-3090"], **more) for more in ({}, option))
    assert usual.predicted_s[0] != other.predicted_s[0]


@pytest.mark.parametrize(
    "option", [{"precision": "fp7"}, {"layout": "hwc"}, {"torch_version": "two"}, {"calibration": "absent"}]
)
def test_what_cannot_be_meant_is_refused(timm, option):
    with pytest.raises(UsageError):
        forerun.evaluate(timm, devices=["rtx-3090"], **option)


def test_a_calibration_predicts_as_it_does_in_predict(own, calibration):
    table = own(row())
    usual = forerun.evaluate(table, devices=["here"])
    found = forerun.evaluate(table, devices=["here"], calibration=calibration)
    assert found.predicted_s[0] > 1.3 * usual.predicted_s[0]
    asked = {"device": "here", "batch_size": 16, "image_size": 64, "calibration": calibration}
    estimate = forerun.predict("torchvision:resnet18", **asked).step_time_s
    assert (found.predicted_s[0], found.low_s[0], found.high_s[0]) == pytest.approx(
        (estimate.value, estimate.low, estimate.high)
    )
    assert "predictions rest on: calibrated" in found.notes
    assert "the calibration was fitted to these models too: torchvision:resnet18" in found.notes


@pytest.mark.skipif(util.find_spec("keras") is None, reason="Keras is not installed")
def test_a_prediction_in_keras_is_that_of_predict(own):
    table = own(row("keras:cnn:depth=2,base_filters=8", "rtx-3090", framework="keras", layout="nhwc"))
    found = forerun.evaluate(table)
    asked = {"device": "rtx-3090", "batch_size": 16, "image_size": 64}
    estimate = forerun.predict("keras:cnn:depth=2,base_filters=8", **asked).step_time_s
    assert (found.predicted_s[0], found.low_s[0], found.high_s[0]) == pytest.approx(
        (estimate.value, estimate.low, estimate.high)
    )


def test_a_calibration_is_that_of_one_device(own, calibration):
    table = own(row(), row(device="rtx-3090"))
    with pytest.raises(InvalidSetupError, match=r"one device, but the table has rows of .* with --on DEVICE"):
        forerun.evaluate(table, calibration=calibration)
    assert np.isfinite(forerun.evaluate(table, devices=["here"], calibration=calibration).metrics.mape)


def test_a_calibration_of_another_device_is_refused(own, calibration):
    with pytest.raises(UsageError, match="is a calibration of"):
        forerun.evaluate(own(row(device="rtx-3090")), calibration=calibration)


def test_a_calibration_is_that_of_one_framework(own, calibration):
    table = own(row(), row("keras:MobileNetV3Small", framework="keras"))
    with pytest.raises(InvalidSetupError, match="one framework, but the table has rows of keras and pytorch"):
        forerun.evaluate(table, devices=["here"], calibration=calibration)
    with pytest.raises(UsageError, match="a calibration of pytorch, but the model runs with keras"):
        forerun.evaluate(own(row("keras:MobileNetV3Small")), devices=["here"], calibration=calibration)
