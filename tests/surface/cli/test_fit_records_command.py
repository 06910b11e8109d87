"""``forerun fit RECORDS`` from the records to the files."""

import json
import math

import pytest
from command_line import invoke

from forerun.adapters.classics.trained_models import load_trained_model, predict_time
from forerun.evidence.records.record_store import RecordStore
from made_measurements import TRAINING_BATCH_SIZES, small_trainings


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "records.sqlite"
    with RecordStore.open(path) as opened:
        opened.add_many(small_trainings())
    return path


def test_the_command_writes_a_model_plots_and_a_table(store, tmp_path):
    out = tmp_path / "ann.safetensors"
    words = (
        "--model",
        "ann",
        "--out",
        str(out),
        "--plots",
        str(tmp_path / "new" / "plots"),
        "--seeds",
        "0",
        "--epochs",
        "2",
    )
    result = invoke("fit", str(store), *words)
    assert result.exit_code == 0, result.stderr
    assert "Total params:" in result.stdout
    assert "linear on FLOPs" in result.stdout
    plots = {
        "predicted-versus-actual.png", "residuals.png", "throughput.png", "accuracy.png", "accuracy-against-time.png",
    }  # fmt: skip
    assert {path.name for path in (tmp_path / "new" / "plots").iterdir()} == plots
    assert predict_time(load_trained_model(out), {"depth": 2, "base_filters": 32, "batch_size": 64}) > 0


def test_the_command_reports_a_missing_table_in_one_line(tmp_path):
    result = invoke(
        "fit", str(tmp_path / "none.csv"), "--model", "ann", "--out", str(tmp_path / "a.safetensors")
    )
    assert (result.exit_code, result.stdout) == (1, "")
    assert "no such file" in result.stderr


def test_predict_takes_the_cost_model_that_fit_writes(store, tmp_path):
    out = tmp_path / "op.safetensors"
    fitted = invoke("fit", str(store), "--out", str(out), "--json")
    assert fitted.exit_code == 0, fitted.stderr
    assert json.loads(fitted.stdout)["metrics"]["op"]["n"] == len(TRAINING_BATCH_SIZES)
    words = (
        "predict",
        "cnn:depth=2,base_filters=32",
        "--on",
        "cpu",
        "--batch-size",
        "64",
        "--optimizer",
        "adam",
        "--json",
    )
    plain, corrected = (
        json.loads(invoke(*words, *more).stdout) for more in ((), ("--calibration", str(out)))
    )
    measured_s = 2e-3 + 1e-4 * 64
    assert corrected["provenance"] == "calibrated"
    before, after = (
        abs(math.log(found["step_time_s"]["value"] / measured_s)) for found in (plain, corrected)
    )
    assert after < before
    refused = invoke("predict", "mnist-cnn", "--on", "t4", "--calibration", str(out))
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "is a calibration of" in refused.stderr
