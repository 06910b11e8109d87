"""``forerun measure``: what is printed where, and what is refused."""

import csv
import json

import pytest
from command_line import invoke, run

from forerun.adapters.classics.csv_formats import CNN_COLUMNS
from forerun.evidence.commands.measure import (
    parse_flags,
    parse_sizes,
    parse_words,
    progress_bar,
    time_left,
)
from forerun.evidence.measurement.session import SessionStarted
from forerun.question.setup import Precision
from forerun.surface.cli.settings import parse_numbers

QUICK = ("--threads", "1", "--repetitions", "3", "--max-seconds", "0.1")
TINY_GRID = (
    *("measure", "grid", "--dataset", "synthetic", "--image-size", "8", "--epochs", "1", "--steps", "2"),
    *("--sizes", "depth=1", "--sizes", "base_filters=2", "--batch-sizes", "4,8", *QUICK),
)


@pytest.fixture(autouse=True)
def _own_lock_folder(tmp_path, monkeypatch):
    # The sessions of these tests must not wait for a real one on this machine.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("FORERUN_RECORDS", str(tmp_path / "records.sqlite"))


def test_a_grid_prints_one_json_object_and_writes_the_table(tmp_path):
    done = invoke(*TINY_GRID, "--csv", str(tmp_path / "grid.csv"), "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["outcomes"] == {"done": 2}
    assert told["records"] == str(tmp_path / "records.sqlite")
    assert {row["parameters"]["batch_size"] for row in told["measurements"]} == {4, 8}
    assert "2 rows written" in done.stderr
    with (tmp_path / "grid.csv").open(newline="") as file:
        assert tuple(next(csv.reader(file)))[:9] == CNN_COLUMNS

    again = invoke(*TINY_GRID)
    assert again.exit_code == 0, again.stderr
    assert "nothing new; 2 were in the records already" in again.stdout
    assert "cnn:depth=1,base_filters=2" in again.stdout


def test_a_model_and_layers_are_measured_and_told(tmp_path):
    done = invoke("measure", "model", "cnn:depth=1,base_filters=2", "--image-size", "8", *QUICK)
    assert done.exit_code == 0, done.stderr
    assert "1 done" in done.stdout
    limits = ("--max-gflop", "0.001", "--max-mb", "0.1")
    table = tmp_path / "layers.csv"
    words = ("--csv", str(table), "--plots", str(tmp_path))
    done = invoke("measure", "layers", "--kinds", "dense", "--num-layers", "2", *limits, *QUICK, *words)
    assert done.exit_code == 0, done.stderr
    assert "4 done" in done.stdout  # two layers, and the null layer in both modes
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["null", "null", "dense", "dense"]
    assert all(float(row["time_ms"]) > 0 and float(row["cores"]) > 0 for row in rows)
    assert float(rows[2]["in_features"]) > 0
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "layer-times.png",
        "layer-times-against-flops.png",
    }


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("grid", "--sizes", "depth"), "--sizes such as depth=2,3,4"),
        (("grid", "--sizes", "dept=2"), "did you mean depth"),
        (("grid", "--batch-sizes", "0"), "whole numbers from 1 to"),
        (("grid", "--precision", "fp31"), "unknown precision 'fp31'"),
        (("grid", "--compile", "maybe"), "no, yes or no,yes"),
        (("grid", "--dataset", "fashion"), "cifar10, mnist, pcam, synthetic, digits"),
        (("grid", "--dataset", "mnist"), "mnist has images of 28 pixels, got image size 32"),
        (("grid", "--dataset", "synthetic", "--device", "tpu"), "cpu or cuda:N"),
        (("grid", "--device", "cuda:99"), "one of this machine's"),  # said before CIFAR-10 is downloaded
        (("layers", "--kinds", "conv3d"), "unknown layer 'conv3d'"),
        (("layers", "--ranges", "narrow"), "justus, wide"),
        (("layers", "--repetitions", "2"), "num_repetitions of at least 3"),
        (("model", "torchvision:resnet5"), "did you mean"),
        (("model", "cnn:depth=1", "--phase", "backward"), "unknown phase"),
        (("model", "cnn:depth=1", "--optimizer", "adm"), "did you mean adam"),
    ],
)
def test_mistakes_are_one_line_each(words, told):
    failed = invoke("measure", *words)
    assert failed.exit_code == 2
    assert failed.stdout == ""
    assert told in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_help_needs_no_framework():
    result = run("measure", "grid", "--help", PYTHONPROFILEIMPORTTIME="1")
    assert result.returncode == 0
    loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in loaded
    assert not loaded & {"torch", "numpy", "scipy", "pandas", "sqlalchemy"}


def test_a_dataset_that_cannot_be_had_is_one_error_naming_the_other(tmp_path, monkeypatch):
    monkeypatch.setenv("FORERUN_DATASETS", str(tmp_path))
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (_ for _ in ()).throw(OSError("no network")))
    failed = invoke("measure", "grid", "--sizes", "depth=1", "--batch-sizes", "4")
    assert failed.exit_code == 1
    assert "--dataset synthetic" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_lists_of_options():
    assert parse_numbers("batch sizes", "32, 64") == [32, 64]
    assert parse_words("precision", "FP32,amp", Precision) == [Precision.FP32, Precision.AMP]
    assert parse_flags("no,yes") == [False, True]
    assert parse_sizes(["depth=2,3", "base_filters=8"]) == {"depth": [2, 3], "base_filters": [8]}


def test_the_bar_is_silent_without_a_terminal_and_tells_times_in_words(capsys):
    with progress_bar() as tell:
        tell(SessionStarted(num_jobs=3, num_skipped=1))
    assert capsys.readouterr().out == ""
    assert [time_left(t) for t in (None, 40.0, 600.0, 9000.0)] == [
        "",
        "about 40 s left",
        "about 10 min left",
        "about 2.5 h left",
    ]


def test_a_network_is_told_beside_its_layers(tmp_path):
    picture = tmp_path / "sums.png"
    asked = ("measure", "composition", "mnist-cnn", "--batch-sizes", "2", *QUICK)
    done = invoke(*asked, "--plot", str(picture))
    assert done.exit_code == 0, done.stderr
    assert "Mean overshoot: sum of layers" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = json.loads(invoke(*asked, "--json").stdout)
    [row] = told["compositions"]
    assert row["overshoot_before"] == pytest.approx(row["sum_of_layers_s"] / row["measured_s"] - 1)
    assert told["num_skipped"] == 17


def test_a_picture_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    done = invoke("measure", "composition", "mnist-cnn", "--plot", str(tmp_path / "no" / "sums.png"))
    assert done.exit_code == 2
    assert "does not exist" in done.stderr
