import csv
from pathlib import Path

import pytest

from forerun.adapters.classics.csv_formats import CNN_COLUMNS, read_cnn_csv, write_cnn_csv
from forerun.base.errors import RecordError
from forerun.evidence.records.measurement import JobKind, Outcome
from forerun.evidence.records.reading import (
    FILE_COLUMNS,
    export_measurements,
    import_measurements,
    read_measured_steps,
)
from forerun.evidence.records.record_store import RecordStore
from forerun.evidence.records.step_record import StepRecord, as_step_record
from forerun.question.setup import Phase, Precision
from made_measurements import measurement
from made_tables import write_records

STEP = StepRecord(
    source="mine",
    row_id="1",
    model="timm:resnet50",
    family="resnet",
    device="rtx-3090",
    batch_size_per_device=64,
    step_time_s=0.25,
    precision=Precision.AMP,
    phase=Phase.TRAIN,
    optimizer="adamw",
    includes_optimizer=True,
    input_shape=(3, 128, 224),
    framework_version="2.4.1",
    peak_memory_bytes=2e9,
    next_larger_batch_failed=96,
    num_parameters=25_000_000,
    compile=True,
)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_files_round(tmp_path, ending):
    path = tmp_path / f"records.{ending}"
    failed = measurement(
        7, outcome=Outcome.OUT_OF_MEMORY, reason="3 GiB", summary=None, repetitions_s=(), results={}
    )
    added = [*(measurement(i) for i in range(6)), failed]
    assert export_measurements(added, path) == 7
    assert list(import_measurements(path)) == added
    assert not list(tmp_path.glob("*.partial"))


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]], columns=None) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns or list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def exported(tmp_path):
    path = tmp_path / "records.csv"
    export_measurements([measurement(1), measurement(2)], path)
    return path


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("repetitions_s", "[-1.0]", "row 2, 'repetitions_s', item 1"),
        ("repetitions_s", "[NaN]", "row 2, 'repetitions_s', item 1"),
        ("repetitions_s", "0.1 0.2", "row 2, column 'repetitions_s': expected JSON"),
        ("schema_version", "9", "row 2: expected schema_version 2, got 9;"),
        ("schema_version", "", "row 2, column 'schema_version'"),
        ("key", f"{1:032x}", "row 2: key .* occurs twice \\(first in row 1\\)"),
        ("outcome", "fine", "row 2, 'outcome': expected 'done', 'out-of-memory'"),
    ],
)
def test_a_bad_cell_is_named_by_row_and_column(exported, column, value, message):
    rows = rows_of(exported)
    rows[1][column] = value
    write_rows(exported, rows)
    with pytest.raises(RecordError, match=message):
        list(import_measurements(exported))


def test_a_file_is_read_piece_by_piece(exported):
    rows = rows_of(exported)
    rows[1]["outcome"] = "fine"
    write_rows(exported, rows)
    reading = import_measurements(exported)
    assert next(reading) == measurement(1)
    with pytest.raises(RecordError, match="row 2"):
        next(reading)


def test_flat_tables_of_steps_in_other_units_are_refused(tmp_path):
    path = tmp_path / "steps.csv"
    write_records([STEP], path)
    text = path.read_text()
    for old, new, message in (
        ("step_time_s", "step_time_ms", "step_time_ms"),
        ("0.25", "-0.25", "step_time_s"),
        ("0.25", "nan", "step_time_s"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(RecordError, match=message):
            list(import_measurements(path))


def test_a_step_whose_parameters_cannot_be_meant_is_named():
    wrong = measurement(1, parameters={"batch_size": "many"})
    with pytest.raises(RecordError, match=f"record {wrong.key} of cnn:.*'many'"):
        as_step_record(wrong)


def test_a_column_in_another_unit_is_refused(exported):
    rows = [
        {("repetitions_ms" if k == "repetitions_s" else k): v for k, v in row.items()}
        for row in rows_of(exported)
    ]
    write_rows(exported, rows)
    with pytest.raises(
        RecordError, match=r"unknown column 'repetitions_ms'; did you mean repetitions_s.*units"
    ):
        list(import_measurements(exported))


def test_a_missing_column_is_named(exported):
    rows = rows_of(exported)
    write_rows(exported, [{k: v for k, v in row.items() if k != "outcome"} for row in rows])
    with pytest.raises(RecordError, match="missing: outcome"):
        list(import_measurements(exported))


def test_a_file_that_was_cut_off(exported):
    exported.write_text(exported.read_text()[:-200])
    with pytest.raises(RecordError, match=r"expected 13 cells|expected JSON|cannot be read"):
        list(import_measurements(exported))


def test_files_that_are_none(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        list(import_measurements(tmp_path / "none.csv"))
    (tmp_path / "records.txt").write_text("x")
    with pytest.raises(RecordError, match=r"expected a \.csv or \.parquet"):
        list(import_measurements(tmp_path / "records.txt"))
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(RecordError, match="empty file"):
        list(import_measurements(tmp_path / "empty.csv"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(RecordError, match="cannot be read as parquet"):
        list(import_measurements(tmp_path / "bad.parquet"))
    with pytest.raises(RecordError, match=r"written to \.csv or \.parquet"):
        export_measurements([], tmp_path / "records.xlsx")
    with pytest.raises(RecordError, match="cannot be written"):
        export_measurements([], tmp_path / "missing folder" / "records.csv")


def test_an_export_that_breaks_off_leaves_the_old_file(exported):
    before = exported.read_text()

    def broken():
        yield measurement(5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_measurements(broken(), exported)
    assert exported.read_text() == before
    assert [path.name for path in exported.parent.iterdir() if path.suffix == ".partial"] == []


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_flat_tables_of_steps_are_measurements_too(tmp_path, ending):
    path = tmp_path / f"steps.{ending}"
    write_records([STEP], path)
    (found,) = import_measurements(path)
    assert found.schema_version == 2
    assert found.repetitions_s == (0.25,)
    assert found.circumstances.device == "rtx-3090"
    assert as_step_record(found) == STEP
    assert read_measured_steps([path]) == [STEP]


def test_steps_are_read_from_stores_too(tmp_path):
    path = tmp_path / "records.sqlite"
    layer = measurement(2, kind=JobKind.LAYER, subject="conv2d")
    failed = measurement(3, outcome=Outcome.FAILED, repetitions_s=(), summary=None)
    with RecordStore.open(path) as store:
        store.add_many([measurement(1), layer, failed])
    (step,) = read_measured_steps([path])
    assert step.model == "cnn:depth=2,base_filters=32"
    assert step.step_time_s == 0.2000000000000001
    assert step.batch_size_per_device == 32
    assert step.includes_optimizer
    assert step.image_size == 32
    assert step.num_parameters == 1234


def training(number: int, **changed):
    parameters = {
        "depth": 3,
        "base_filters": 32,
        "batch_size": 64,
        "dataset_size": 50_000,
        "num_epochs": 3,
        "optimizer": "adam",
    }
    results = {
        "num_parameters": 551_082, "step_time_s": 0.0125, "epoch_time_s": 10.0, "peak_memory_bytes": 1.5e9,
        **{f"{name}_{epoch}": 0.1 * epoch for name in ("accuracy", "loss", "val_accuracy", "val_loss")
           for epoch in (1, 2, 3)},
    }  # fmt: skip
    values = {
        "kind": JobKind.TRAINING,
        "parameters": parameters,
        "repetitions_s": (0.012, 0.0125, 0.013),
        "results": results,
    }
    return measurement(number, **(values | changed))


def test_the_csv_of_the_cnn_grid(tmp_path):
    path = tmp_path / "grid.csv"
    resnet = training(4, subject="cifar-resnet:20", parameters={"batch_size": 64})
    assert (
        write_cnn_csv([training(1), measurement(2), training(3, outcome=Outcome.FAILED), resnet], path) == 1
    )
    (row,) = rows_of(path)
    assert tuple(row)[:9] == CNN_COLUMNS
    assert float(row["time_per_epoch"]) == 10.0
    assert float(row["images_per_second"]) == 5000.0
    assert float(row["max_gpu_mem_mb"]) == 1500.0
    assert tuple(row)[9:13] == ("accuracy_1", "loss_1", "val_accuracy_1", "val_loss_1")
    (read,) = read_cnn_csv(path, device="a100-sxm4-40gb")
    assert read.subject == "cnn:depth=3,base_filters=32"
    assert read.circumstances.device == "a100-sxm4-40gb"
    assert read.results["val_accuracy_3"] == pytest.approx(0.3)
    assert as_step_record(read).step_time_s == pytest.approx(10 / 782)
    again = tmp_path / "again.csv"
    write_cnn_csv([read], again)
    assert rows_of(again) == rows_of(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("time_per_epoch", "-1", "line 2: 'time_per_epoch' must be a number above zero, got '-1'"),
        ("time_per_epoch", "nan", "'time_per_epoch' must be"),
        ("batch_size", "64.5", "must be a whole number"),
        ("depth", "three", "must be a whole number above zero, got 'three'"),
        ("time_per_epoch", "10000", "line 2: 'time_per_epoch' of 10000 s .* images_per_second says 5000"),
        ("loss_2", "inf", "line 2: 'loss_2' must be"),
    ],
)
def test_a_bad_cell_of_the_grid_is_named(tmp_path, column, value, message):
    path = tmp_path / "grid.csv"
    write_cnn_csv([training(1)], path)
    rows = rows_of(path)
    rows[0][column] = value
    write_rows(path, rows)
    with pytest.raises(RecordError, match=message):
        read_cnn_csv(path, device="cpu")


def test_a_grid_with_other_columns(tmp_path):
    path = tmp_path / "grid.csv"
    path.write_text("depth,base_filters\n2,32\n")
    with pytest.raises(RecordError, match="missing: batch_size"):
        read_cnn_csv(path, device="cpu")
    write_cnn_csv([training(1)], path)
    path.write_text(path.read_text().replace("loss_1", "loss_of_1", 1))
    with pytest.raises(RecordError, match="unknown column 'loss_of_1'"):
        read_cnn_csv(path, device="cpu")
    write_cnn_csv([training(1)], path)
    path.write_text(path.read_text().replace("time_per_epoch", "time_per_epoch_s", 1))
    with pytest.raises(
        RecordError, match="missing: time_per_epoch, unknown column 'time_per_epoch_s'; did you mean"
    ):
        read_cnn_csv(path, device="cpu")


def test_a_grid_measured_without_a_gpu_in_any_order(tmp_path):
    path = tmp_path / "grid.csv"
    small = {**training(2).parameters, "depth": 2}
    write_cnn_csv([training(1), training(2, subject="cnn:depth=2,base_filters=32", parameters=small)], path)
    assert [row["depth"] for row in rows_of(path)] == ["2", "3"]
    rows = [{name: cell for name, cell in row.items() if name != "max_gpu_mem_mb"} for row in rows_of(path)]
    write_rows(path, rows)
    assert len(read_cnn_csv(path, device="cpu")) == 2


def test_a_configuration_twice_in_a_grid(tmp_path):
    path = tmp_path / "grid.csv"
    write_cnn_csv([training(1), training(2)], path)
    with pytest.raises(RecordError, match="line 3: the same configuration as line 2"):
        read_cnn_csv(path, device="cpu")


def test_a_grid_with_the_accuracy_of_the_last_epoch_only(tmp_path):
    path = tmp_path / "grid.csv"
    columns = ",".join((*CNN_COLUMNS, "accuracy", "val_accuracy"))
    path.write_text(f"{columns}\n2,32,64,268650,50000,3,4.0,12500,,0.61,0.58\n")
    (read,) = read_cnn_csv(path, device="cpu")
    assert (read.results["accuracy"], read.results["val_accuracy"]) == (0.61, 0.58)
    assert "peak_memory_bytes" not in read.results
    write_cnn_csv([read], tmp_path / "again.csv")
    assert read_cnn_csv(tmp_path / "again.csv", device="cpu", occasion="grid.csv") == [read]


def test_a_grid_that_is_not_there(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        read_cnn_csv(tmp_path / "none.csv", device="cpu")


def test_the_columns_of_a_file_are_the_fields_of_a_measurement():
    from dataclasses import fields

    from forerun.evidence.records.measurement import Measurement

    assert set(FILE_COLUMNS) == {field.name for field in fields(Measurement)}
