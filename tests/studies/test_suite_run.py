"""The suite for real on this processor: predict, measure, search, compare, resume."""

import json

import pytest
from typer.testing import CliRunner

from forerun.base.errors import InvalidSetupError, RecordError, UnknownDeviceError
from forerun.question.setup import Layout, Precision
from studies.__main__ import app
from studies.suite.models import Setting, SuiteModel
from studies.suite.run import measure_suite

TINY = (
    SuiteModel(
        subject="cnn:depth=1,base_filters=4",
        model_class="small CNN",
        settings=(Setting(4, Precision.FP32, is_core=True), Setting(64, Precision.FP32, Layout.NHWC)),
        image_size=16,
    ),
    SuiteModel(
        subject="cnn:depth=2,base_filters=16",
        model_class="small CNN",
        settings=(Setting(64, Precision.FP32, is_core=True),),
        image_size=32,
        processor_limit_gib=0.3,
    ),
)


@pytest.fixture(autouse=True)
def _own_lock_folder(tmp_path, monkeypatch):
    # The sessions of these tests must not wait for a real one on this machine.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def suite(folder, **options):
    return measure_suite(folder, device="cpu", minutes=10.0, models=TINY, num_threads=1, **options)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    patch = pytest.MonkeyPatch()
    patch.setattr("tempfile.tempdir", str(folder))
    yield folder, suite(folder)
    patch.undo()


def test_one_call_predicts_measures_and_compares(run):
    folder, done = run
    assert {"predictions.csv", "device.json", "records.sqlite", "records.parquet", "comparison.json"} <= {
        path.name for path in folder.iterdir()
    }
    comparison = json.loads((folder / "comparison.json").read_text())
    assert comparison == json.loads(json.dumps(done.comparison.as_dict()))
    assert comparison["is_predicted_before"]
    assert comparison["step_time"]["n"] == 2  # on a processor settings of one size count once
    assert {kernel["subject"] for kernel in comparison["kernels"]} == {
        "launch",
        "copy",
        "gemm",
        "convolution",
    }
    facts = json.loads((folder / "device.json").read_text())
    assert facts["software"]["torch"]
    assert facts["device"]["name"] == "cpu"


def test_the_largest_batch_is_found_by_running_out_of_memory(run):
    _, done = run
    (batch,) = done.comparison.largest_batches
    assert batch.fitted is not None
    assert batch.failed is not None
    assert batch.failed - batch.fitted <= max(1, 0.06 * batch.fitted)
    assert done.outcomes["out-of-memory"] >= 1


def test_a_second_run_measures_nothing_and_says_the_same(run):
    folder, done = run
    before = (folder / "predictions.csv").read_text()
    told = []
    again = suite(folder, report=told.append)
    assert "is kept" in told[0]
    assert (folder / "predictions.csv").read_text() == before
    assert again.outcomes == {}
    assert again.num_measurements == done.num_measurements
    assert again.comparison.step_time == done.comparison.step_time


def test_records_alone_can_be_compared(run, tmp_path):
    folder, done = run
    for name in ("predictions.csv", "records.parquet"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    found = suite(tmp_path, stages=["compare"])
    assert found.comparison.step_time.n == done.comparison.step_time.n
    assert found.outcomes == {}


def test_a_device_elsewhere_is_predicted_without_being_measured(tmp_path):
    found = suite(tmp_path, stages=["predict"], on="h200-sxm")
    assert found.device == "h200-sxm"
    assert found.num_predictions == 3
    assert [path.name for path in tmp_path.glob("*.csv")] == ["predictions.csv"]
    assert not (tmp_path / "records.sqlite").exists()


def test_what_is_out_of_time_is_left_for_the_next_run(tmp_path):
    found = measure_suite(tmp_path, device="cpu", minutes=1e-6, models=TINY, stages=["predict", "measure"])
    assert found.outcomes == {}
    with pytest.raises(RecordError, match="measure first"):
        suite(tmp_path, stages=["compare"])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"minutes": 0.0}, "minutes above zero"),
        ({"minutes": float("nan")}, "minutes above zero"),
        ({"stages": ["predict", "guess"]}, "predict, measure, compare"),
        ({"stages": []}, "predict, measure, compare"),
        ({"on": "t4"}, "measure there with --device"),
        ({"device": "tpu"}, "cpu or cuda:N"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_made(tmp_path, options, told):
    with pytest.raises(InvalidSetupError, match=told):
        measure_suite(tmp_path / "new", models=TINY, **options)
    assert not list(tmp_path.glob("new/*"))


def test_a_device_nobody_knows_and_a_folder_that_is_a_file(tmp_path):
    with pytest.raises(UnknownDeviceError):
        measure_suite(tmp_path, stages=["predict"], on="h2000", models=TINY)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="cannot be made"):
        measure_suite(tmp_path / "file", models=TINY, stages=["predict"])


def command(*words):
    return CliRunner(env={"COLUMNS": "140"}).invoke(app, ["suite", *map(str, words)])


def test_the_command_prints_one_object_or_a_page_and_draws(run):
    folder, done = run
    told = command("--out", folder, "--stages", "compare", "--json")
    assert told.exit_code == 0, told.stderr
    assert json.loads(told.stdout)["comparison"]["step_time"]["n"] == done.comparison.step_time.n
    assert (folder / "predicted-versus-measured.png").stat().st_size > 10_000
    page = command("--out", folder, "--stages", "compare").stdout
    for words in (
        "before anything was measured",
        "class small CNN",
        "k = 1",
        "largest batch",
        "predicted worst",
    ):
        assert words in page
    assert "GFLOP/s" in page


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "missing option '--out'"),
        (("--stages", "guess"), "predict, measure, compare"),
        (("--minutes", "-1"), "minutes above zero"),
        (("--on", "t4"), "measure there with --device"),
        (("--stages", "predict", "--on", "h2000"), "h200"),
        (("--device", "gpu"), "cpu or cuda:N"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line_each(words, told, tmp_path):
    out = ("--out", tmp_path) if words else ()
    failed = command(*out, *words)
    assert failed.exit_code == 2
    assert failed.stdout == ""
    assert told in failed.stderr
    assert len(failed.stderr.splitlines()) == 1


def test_an_empty_folder_has_nothing_to_compare(tmp_path):
    failed = command("--out", tmp_path, "--stages", "compare")
    assert failed.exit_code == 1
    assert "measure first" in failed.stderr
