import json
import math

import pytest
from command_line import TINY_MODEL, invoke, run

from forerun.base.units import format_bytes, format_duration_s
from forerun.prediction.estimate import Estimate

QUESTION = ("cnn:depth=2,base_filters=32", "--on", "a100-sxm4-40gb")
JOB = ("--dataset", "cifar10", "--epochs", "3", "--price", "1.89/h")
INTERVALS = (
    "step_time_s",
    "throughput_samples_per_s",
    "epoch_time_s",
    "job_time_s",
    "peak_memory_bytes",
    "cost_usd",
)


@pytest.fixture(scope="module")
def answer():
    result = invoke("predict", *QUESTION, *JOB, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(TINY_MODEL)
    return path


def test_json_has_every_attribute_of_the_estimate(answer):
    assert set(answer) == set(Estimate.__slots__)


@pytest.mark.parametrize("name", INTERVALS)
def test_values_lie_inside_their_intervals(answer, name):
    assert 0 < answer[name]["low"] <= answer[name]["value"] <= answer[name]["high"]


def test_parts_add_up_to_the_step(answer):
    assert math.isclose(
        sum(part["time_s"] for part in answer["breakdown"]), answer["step_time_s"]["value"], rel_tol=1e-6
    )


def test_cost_is_price_times_duration(answer):
    assert math.isclose(answer["cost_usd"]["value"], 1.89 * answer["job_time_s"]["value"] / 3600)


def test_page_says_the_same_as_the_json(answer):
    text = invoke("predict", *QUESTION, *JOB).stdout
    for words in ("A100 SXM4 40GB", "cost of the job", "largest batch", "Most expensive layers", "Rests on"):
        assert words in text
    assert format_duration_s(answer["step_time_s"]["value"]) in text
    assert format_bytes(answer["peak_memory_bytes"]["value"]) in text


def test_what_was_not_asked_is_null_with_a_reason():
    answer = json.loads(invoke("predict", *QUESTION, "--json").stdout)
    assert answer["epoch_time_s"] is answer["job_time_s"] is answer["cost_usd"] is None
    assert any("--dataset" in note for note in answer["notes"])


def test_stdout_holds_the_answer_only_whatever_the_model_file_prints(model_file):
    done = run("predict", f"{model_file}:make", "--on", "t4", "--input-shape", "3,32,32", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["device"] == "t4"
    assert "text that a model file prints" in done.stderr
    assert "a warning of a model file" not in done.stderr


def test_an_error_in_a_model_file_is_one_line_with_its_reason(model_file):
    result = invoke("predict", f"{model_file}:broken", "--on", "t4", "--input-shape", "3,32,32", "--json")
    assert (result.exit_code, result.stdout) == (1, "")
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "layers must be positive" in line


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--precision", "fp4"], "amp-bf16"),
        (["--precision", "fp8"], "has no fp8; give --precision bf16,"),
        (["--layout", "chwn"], "nchw"),
        (["--phase", "backward"], "inference"),
        (["--optimizer", "sgdd"], "sgd"),
        (["--batch-size", "0"], "got 0"),
        (["--batch-size", "1e3"], "it must be a valid integer, got '1e3'"),
        (["--dataset", "cifar"], "cifar10"),
        (["--epochs", "3"], "--dataset"),
        (["--dataset", "cifar10", "--epochs", "-1"], "got -1"),
        (["--price", "cheap"], "1.89/h"),
        (["--input-shape", "3x"], "3,224,224"),
        (["--plot", "plot.gif"], ".png"),
        (["--plot", "no/such/folder/plot.png"], "does not exist"),
    ],
)
def test_what_cannot_be_meant_is_status_2_and_one_line_that_helps(words, expected):
    result = invoke("predict", *QUESTION, *words, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert expected in result.stderr


def test_plot_is_written_and_stdout_stays_json(tmp_path):
    path = tmp_path / "plot.png"
    result = invoke("predict", *QUESTION, "--json", "--plot", str(path))
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["model"] == QUESTION[0]
    assert path.read_bytes().startswith(b"\x89PNG")


def test_page_says_where_the_plot_went(tmp_path):
    path = tmp_path / "plot.svg"
    result = invoke("predict", *QUESTION, "--plot", str(path))
    assert f"plot written to {path}" in result.stderr
    assert "memory of the device" in path.read_text()


def test_page_in_a_terminal_of_ascii_signs():
    done = run("predict", *QUESTION, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "####" in done.stdout
