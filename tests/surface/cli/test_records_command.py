import json

import pytest

from forerun.adapters.classics.csv_formats import CNN_COLUMNS
from forerun.evidence.records.measurement import Outcome
from forerun.evidence.records.record_store import RecordStore
from forerun.surface.cli.main import app
from made_measurements import measurement


@pytest.fixture
def store(tmp_path, monkeypatch):
    path = tmp_path / "records.sqlite"
    monkeypatch.setenv("FORERUN_RECORDS", str(path))
    with RecordStore.open(path) as opened:
        opened.add_many([measurement(1), measurement(2, device="rtx-3090")])
        opened.add(measurement(3, outcome=Outcome.TIMED_OUT, reason="hung", repetitions_s=(), summary=None))
    return path


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        app(list(words))
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_the_store_is_counted(store, capsys):
    status, out, _ = run(capsys, "records", "list")
    assert status == 0
    assert "3 measurements in" in out
    assert "timed-out" in out
    groups = json.loads(run(capsys, "records", "list", "--json")[1])["groups"]
    assert sum(group["num_records"] for group in groups) == 3


def test_records_of_a_device(store, capsys):
    _, out, _ = run(capsys, "records", "list", "--device", "cpu")
    assert "200 ms" in out
    assert "hung" in out
    assert "rtx-3090" not in out
    assert (
        len(json.loads(run(capsys, "records", "list", "--device", "rtx-3090", "--json")[1])["records"]) == 1
    )


def test_out_and_in_again(store, capsys, tmp_path):
    file, other = tmp_path / "all.parquet", tmp_path / "other.sqlite"
    assert run(capsys, "records", "export", str(file))[0] == 0
    status, out, _ = run(capsys, "records", "import", str(file), "--records", str(other))
    assert (status, out.split()[0]) == (0, "3")
    again = json.loads(run(capsys, "records", "import", str(file), "--records", str(other), "--json")[1])
    assert (again["num_written"], again["num_read"]) == (0, 3)


def test_one_record_is_shown_whole(store, capsys):
    status, out, _ = run(capsys, "records", "show", measurement(2).key)
    assert status == 0
    assert "0.1, 0.3, 0.2" in out
    assert "rtx-3090" in out
    assert "power_before_w=12.5" in out
    shown = json.loads(run(capsys, "records", "show", measurement(2).key, "--json")[1])
    assert shown["repetitions_s"] == list(measurement(2).repetitions_s)
    status, _, err = run(capsys, "records", "show", "0000")
    assert (status, "more than one" in err) == (1, True)


def test_a_long_list_is_cut(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # in one block of columns
    _, out, err = run(capsys, "records", "list", "--family", "cnn", "--limit", "2")
    assert out.count("cnn:depth=2") == 2
    assert "the first 2 of 3" in err


def test_the_grid_of_cnns_comes_in_with_its_device(tmp_path, capsys):
    file, store = tmp_path / "grid.csv", str(tmp_path / "records.sqlite")
    file.write_text(f"{','.join(CNN_COLUMNS)}\n2,32,64,268650,50000,3,4.0,12500,700\n")
    words = ("records", "import", str(file), "--records", store, "--cnn-grid")
    assert run(capsys, *words)[0] == 2
    status, out, _ = run(capsys, *words, "--device", "NVIDIA A100-SXM4-40GB")
    assert (status, out.split()[0]) == (0, "1")
    out_file = tmp_path / "out.csv"
    assert run(capsys, "records", "export", str(out_file), "--records", store, "--cnn-grid")[0] == 0
    assert out_file.read_text().splitlines()[1].startswith("2,32,64,268650,50000,3,4.0,12500.0,700.0")


def test_nothing_measured_yet(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORERUN_RECORDS", str(tmp_path / "none.sqlite"))
    status, out, err = run(capsys, "records", "list")
    assert (status, out) == (1, "")
    assert "measure something first" in err
