"""Measuring through the functions a user calls: real jobs in children, a real store, kill -9 and resume."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from grid_session import GRID, QUICK, measure

from forerun.adapters.classics.csv_formats import CNN_COLUMNS, write_cnn_csv
from forerun.base.errors import InvalidSetupError, MeasurementError, UnknownModelError
from forerun.evidence.measure import measure_layers, measure_model
from forerun.evidence.measurement.layer_design import grid_jobs
from forerun.evidence.measurement.session import JobFinished, JobStarted, SessionFinished, SessionStarted
from forerun.evidence.measurement.settings import LayerDesign
from forerun.evidence.records.measurement import Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.evidence.records.step_record import as_step_record
from forerun.question.setup import Precision

SESSION = Path(__file__).parent / "grid_session.py"
SOURCE = Path(__file__).parents[3] / "src"


@pytest.fixture(autouse=True)
def _own_lock_folder(tmp_path, monkeypatch):
    # The sessions of these tests must not wait for a real one on this machine.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def num_done(records):
    if not records.exists():
        return 0
    with RecordStore.open(records) as store:
        return sum(m.outcome is Outcome.DONE for m in store.measurements(family="cnn"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Records of a session that was killed after its first job, and how many there were."""
    folder = tmp_path_factory.mktemp("killed")
    records = folder / "records.sqlite"
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    session = subprocess.Popen(
        [sys.executable, str(SESSION), str(records)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
    )
    try:
        until_s = time.monotonic() + 400
        while num_done(records) < 1 and session.poll() is None and time.monotonic() < until_s:
            time.sleep(0.05)
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
    return records, num_done(records)


def test_a_killed_session_loses_nothing_and_the_next_one_finishes_the_rest(killed, tmp_path):
    records, num_before = killed
    assert num_before >= 1
    events = []
    run = measure(records, on_event=events.append)
    assert run.report.num_skipped == num_before
    assert run.report.outcomes.get(Outcome.DONE, 0) == len(grid_jobs(GRID)) - num_before
    assert len(run.measurements) == len(grid_jobs(GRID))
    assert all(m.outcome is Outcome.DONE for m in run.measurements)
    assert isinstance(events[0], SessionStarted)
    assert isinstance(events[-1], SessionFinished)
    started = [event for event in events if isinstance(event, JobStarted)]
    assert all(event.remaining_time_s > 0 for event in started)  # forerun's own prediction, from the first on
    assert len(started) == sum(isinstance(event, JobFinished) for event in events)

    again = measure(records)
    assert again.report.num_skipped == len(grid_jobs(GRID))
    assert {m.key for m in again.measurements} == {m.key for m in run.measurements}

    path = tmp_path / "grid.csv"
    assert write_cnn_csv(again.measurements, path) == 4
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0])[:9] == CNN_COLUMNS
    assert {row["depth"] for row in rows} == {"1", "2"}
    for row in rows:
        assert float(row["images_per_second"]) == pytest.approx(50_000 / float(row["time_per_epoch"]))
        assert 0 <= float(row["accuracy_1"]) <= 1
        assert float(row["val_loss_1"]) > 0


def test_steps_of_a_model_become_records_of_steps(tmp_path):
    run = measure_model(
        "cnn:depth=1,base_filters=2",
        batch_sizes=(2, 4),
        precisions=(Precision.FP32, Precision.BF16),
        optimizer="adam",
        image_size=8,
        records=tmp_path / "records.sqlite",
        protocol=QUICK,
        occasion="morning",
    )
    assert run.report.outcomes == {Outcome.DONE: 4}
    steps = [as_step_record(m) for m in run.measurements]
    assert sorted((s.batch_size_per_device, s.precision) for s in steps) == [
        (2, "bf16"),
        (2, "fp32"),
        (4, "bf16"),
        (4, "fp32"),
    ]
    assert {(s.family, s.optimizer, s.image_size) for s in steps} == {("cnn", "adam", 8)}
    assert all(s.step_time_s > 0 for s in steps)
    told = run.as_dict()
    assert told["outcomes"] == {"done": 4}
    assert told["measurements"][0]["summary"]["median_s"] > 0


def test_layers_are_measured_with_their_figures(tmp_path):
    design = LayerDesign(kinds=("dense", "conv2d"), num_layers=4, max_flops=1e6, max_bytes=1e5)
    run = measure_layers(design, records=tmp_path / "records.sqlite", protocol=QUICK)
    assert run.report.outcomes == {Outcome.DONE: 6}
    assert [m.subject for m in run.measurements] == ["null", "null", *["dense", "conv2d"] * 2]
    assert all(m.parameters["flops"] > 0 for m in run.measurements[2:])


def test_mistakes_are_found_before_anything_runs(tmp_path):
    records = tmp_path / "records.sqlite"
    with pytest.raises(UnknownModelError, match="did you mean"):
        measure_model("torchvision:resnet5", records=records)
    with pytest.raises(InvalidSetupError, match="did you mean adam"):
        measure_model("cnn:depth=1", optimizer="adamm", records=records)
    with pytest.raises(InvalidSetupError, match="at least one batch size"):
        measure_model("cnn:depth=1", batch_sizes=(), records=records)
    assert not records.exists()


def test_a_session_in_which_all_jobs_fail_is_a_failure(tmp_path):
    file = tmp_path / "net.py"
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        if not x.is_meta:\n"
        "            raise ValueError('no real numbers please')\n"
        "        return super().forward(x)\n"
        "def make():\n"
        "    return Net(3, 2)\n"
    )
    with pytest.raises(MeasurementError, match="no real numbers please"):
        measure_model(f"{file}:make", records=tmp_path / "records.sqlite", protocol=QUICK)
