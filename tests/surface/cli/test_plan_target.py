"""``forerun plan --target``: epochs from a run, from finished runs and from a table of batch sizes."""

import json
import math

import pytest
from command_line import invoke

from forerun.base.kept import Kept
from forerun.prediction import point_times

MODEL = "cnn:depth=2,base_filters=32"
QUESTION = ("plan", MODEL, "--on", "t4,l4", "--batch-size", "64,256", "--precision", "fp32")
JOB = ("--dataset", "cifar10")
TARGET = ("--target", "accuracy=0.9")
LAST = 60


def write_run(path, num_epochs=20, rate=0.7, unit="epoch"):
    """accuracy = 1 - 0.6 k^-rate, which is 0.9 after 6^(1 / rate) epochs."""
    rows = [f"{k},{1 - 0.6 * k**-rate:.6f}" for k in range(1, num_epochs + 1)]
    path.write_text(f"{unit},accuracy\n" + "\n".join(rows) + "\n")
    return path


@pytest.fixture
def run_file(tmp_path):
    return write_run(tmp_path / "run.csv", 8)


def answer(*words):
    result = invoke(*QUESTION, *JOB, *words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def relative_width(interval):
    return (interval["high"] - interval["low"]) / interval["value"]


def test_a_forecast_gives_the_epochs_and_widens_time_money_and_energy(run_file, monkeypatch):
    # Devices that other tests asked about would be left out of one product, which rounds otherwise.
    monkeypatch.setattr(point_times, "KEPT_ROWS", Kept(1024))
    found = answer(*TARGET, "--curve", str(run_file), "--schedule", "constant", "--epochs", str(LAST))
    assert found["target"] == "accuracy >= 0.9"
    epochs = found["chosen"]["num_epochs"]
    assert epochs["low"] < epochs["value"] < epochs["high"] <= LAST
    assert epochs["low"] < 6 ** (1 / 0.7) < epochs["high"]
    fixed = answer("--epochs", repr(epochs["value"]))
    for own, without in zip(found["points"], fixed["points"], strict=True):
        assert own["step_time_s"] == without["step_time_s"]
        for name in ("job_time_s", "cost_usd", "energy_j"):
            assert own[name]["value"] == pytest.approx(without[name]["value"], rel=1e-9)
            assert relative_width(own[name]) > relative_width(without[name])
    own, step = found["chosen"]["job_time_s"], found["chosen"]["epoch_time_s"]
    above = math.hypot(epochs["high"] / epochs["value"] - 1, step["high"] / step["value"] - 1)
    assert own["high"] == pytest.approx(own["value"] * (1 + above), rel=1e-6)
    assert any("how they grow with the batch is not known" in note for note in found["notes"])


def test_the_page_says_the_target_and_the_epochs(run_file):
    words = (*TARGET, "--curve", str(run_file), "--schedule", "constant", "--epochs", str(LAST))
    result = invoke(*QUESTION, *JOB, *words)
    assert result.exit_code == 0, result.stderr
    assert "Plan for training on 50,000 samples of cifar10 until accuracy >= 0.9" in result.stdout
    assert ") epochs" in " ".join(result.stdout.split())
    assert "epochs to accuracy >= 0.9: forecast from run.csv" in result.stdout


def test_a_slurm_limit_has_room_for_the_epochs(run_file):
    words = (*TARGET, "--curve", str(run_file), "--schedule", "constant", "--epochs", str(LAST))
    found = answer(*words)
    job = json.loads(invoke(*QUESTION, *JOB, *words, "--format", "job").stdout)
    assert job["time_limit_s"] > found["chosen"]["job_time_s"]["high"] * 1.15


def test_finished_runs_alone_are_enough(tmp_path):
    for number, rate in enumerate((0.68, 0.7, 0.72)):
        write_run(tmp_path / f"{number}.csv", 40, rate)
    found = answer(*TARGET, "--history", str(tmp_path))
    epochs = found["chosen"]["num_epochs"]
    assert 11 < epochs["low"] < 13 < epochs["value"] < 14 < epochs["high"] < 17
    assert "epochs to accuracy >= 0.9: 3 of 3 finished runs reached it" in found["notes"]


def test_the_batch_size_changes_the_epochs_where_the_law_is_known(run_file):
    words = (*TARGET, "--curve", str(run_file), "--schedule", "constant", "--epochs", str(LAST))
    found = answer(*words, "--critical-batch-size", "192", "--curve-batch-size", "64")
    by_batch = {point["batch_size_per_device"]: point["num_epochs"]["value"] for point in found["points"]}
    assert by_batch[256] == pytest.approx(by_batch[64] * (256 + 192) / (64 + 192))
    alone = {p["batch_size_per_device"]: p["num_epochs"]["value"] for p in answer(*words)["points"]}
    assert by_batch[64] == pytest.approx(alone[64])


def test_a_table_of_batch_sizes_alone_is_enough(tmp_path):
    table = tmp_path / "batches.csv"
    table.write_text("batch_size,epochs\n64,10\n192,12\n")
    found = answer(*TARGET, "--batches", str(table))
    by_batch = {point["batch_size_per_device"]: point["num_epochs"]["value"] for point in found["points"]}
    assert by_batch == {64: pytest.approx(10), 256: pytest.approx(13)}


def test_several_models_have_a_curve_each(tmp_path):
    write_run(tmp_path / "a.csv", 30, 0.7)
    write_run(tmp_path / "b.csv", 30, 0.9)
    table = tmp_path / "curves.csv"
    models = {2: "a.csv", 3: "b.csv"}
    rows = [f'"cnn:depth={depth},base_filters=32",{run}' for depth, run in models.items()]
    table.write_text("\n".join(["model,run", *rows]))
    words = ("plan", "cnn:depth=2..3,base_filters=32", *QUESTION[2:], *JOB, *TARGET, "--curve", str(table))
    found = json.loads(invoke(*words, "--json").stdout)
    epochs = {p["model"][:11]: p["num_epochs"]["value"] for p in found["points"]}
    assert epochs == {"cnn:depth=2": 13, "cnn:depth=3": 8}
    table.write_text("\n".join(["model,run", rows[0]]))
    result = invoke(*words)
    assert result.exit_code == 2
    assert "no curve of cnn:depth=3,base_filters=32 is given" in result.stderr


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ((*TARGET,), 2, "needs to know how the model learns: give --curve RUN.csv"),
        ((*TARGET, "--critical-batch-size", "64"), 2, "needs to know how the model learns"),
        (("--curve", "RUN"), 2, "curve: expected a target as well"),
        (("--history", "."), 2, "history: expected a target as well"),
        (("--target", "accuracy", "--curve", "RUN"), 2, "compare a metric with a number"),
        (("--target", "speed=3", "--curve", "RUN"), 2, "compare a metric with a number"),
        (("--target", "val_acc>=0.9", "--curve", "RUN"), 2, "val_acc"),
        (("--target", "accuracy>=0.9", "--curve", "none.csv"), 1, "cannot be read"),
        (("--target", "accuracy>=0.9999", "--curve", "RUN", "--epochs", "30"), 2, "with a probability of"),
        ((*TARGET, "--curve", "RUN", "--epochs", "3"), 2, "give its whole length with --epochs"),
        ((*TARGET, "--curve", "RUN", "--critical-batch-size", "0"), 2, "must be above zero"),
        ((*TARGET, "--curve", "RUN", "--critical-batch-size", "64"), 2, "give --curve-batch-size B"),
        (
            (*TARGET, "--curve", "RUN", "--critical-batch-size", "64", "--curve-batch-size", "0"),
            2,
            "must be at least 1, got 0",
        ),
        (
            (*TARGET, "--curve", "RUN", "--critical-batch-size", "64", "--batches", "x.csv"),
            2,
            "give one of them",
        ),
        ((*TARGET, "--batches", "none.csv"), 1, "none.csv"),
        ((*TARGET, "--history", "no-folder"), 1, "expected a folder of finished runs"),
    ],
)
def test_a_target_that_cannot_be_planned_for_is_one_clear_error(words, status, message, run_file):
    given = [str(run_file) if word == "RUN" else word for word in words]
    result = invoke(*QUESTION, *JOB, *given)
    assert (result.exit_code, result.stdout) == (status, ""), result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_one_curve_says_nothing_of_several_models(run_file):
    words = ("plan", "cnn:depth=2..3,base_filters=32", *QUESTION[2:], *JOB, *TARGET, "--curve", str(run_file))
    result = invoke(*words)
    assert result.exit_code == 2
    assert "one run says how one model learns, and the plan has 2" in result.stderr


def test_a_curve_in_steps_needs_its_batch_size(tmp_path):
    run = write_run(tmp_path / "steps.csv", 8, unit="step")
    words = (*TARGET, "--curve", str(run), "--schedule", "constant", "--epochs", "60")
    result = invoke(*QUESTION, *JOB, *words)
    assert result.exit_code == 2
    assert "give --curve-batch-size B" in result.stderr
    found = answer(*words, "--curve-batch-size", "50000")
    assert found["chosen"]["num_epochs"]["value"] > 8
