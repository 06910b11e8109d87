"""Tables of steps: those of forerun, and short ones that a person writes."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from record_cases import record

from forerun.base.errors import RecordError
from forerun.evidence.records.reading import read_measured_steps
from forerun.evidence.records.step_record import SCHEMA_VERSION
from forerun.evidence.records.tables import read_records
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision
from made_tables import write_records

FULL = record(
    row_id="2",
    layout=Layout.NHWC,
    compile=True,
    optimizer="adamw",
    optimizer_implementation=OptimizerImplementation.FUSED,
    includes_optimizer=True,
    fused_attention=False,
    autocast_backward=True,
    image_size=None,
    input_shape=(3, 128, 64),
    sequence_length=77,
    framework="tensorflow",
    framework_version="1.10",
    num_devices=8,
    step_time_std_s=1e-4,
    num_parameters=25_557_032,
    peak_memory_bytes=1.5e9,
    next_larger_batch_failed=96,
    note='a "quoted", note',
)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_what_is_written_is_read_back(tmp_path, suffix):
    records = [record(), FULL]
    write_records(records, tmp_path / f"records{suffix}")
    assert read_records(tmp_path / f"records{suffix}") == records


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    step_time_s=st.floats(1e-9, 1e6),
    batch=st.integers(1, 10_000_000),
    precision=st.sampled_from(Precision),
    phase=st.sampled_from(Phase),
    version=st.sampled_from(["", "1.10", "2.5.0a0+b465a58"]),
    num_parameters=st.none() | st.integers(0, 10**12),
)
def test_any_record_survives_a_csv(tmp_path, step_time_s, batch, precision, phase, version, num_parameters):
    original = record(
        step_time_s=step_time_s,
        batch_size_per_device=batch,
        precision=precision,
        phase=phase,
        framework_version=version,
        num_parameters=num_parameters,
    )
    write_records([original], tmp_path / "one.csv")
    assert read_records(tmp_path / "one.csv") == [original]


def test_optional_columns_may_be_absent(tmp_path):
    path = tmp_path / "short.csv"
    path.write_text(
        "schema_version,source,row_id,model,family,device,batch_size_per_device,step_time_s,precision,phase\n"
        "1,cases,1,timm:resnet50,resnet,rtx-3090,64,0.25,amp,train\n"
    )
    assert read_records(path) == [record(image_size=None)]


def _changed(tmp_path: Path, change) -> Path:
    path = tmp_path / "mine.csv"
    write_records([record(), FULL], path)
    frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    change(frame).to_csv(path, index=False)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="step_time_s"), "missing: step_time_s"),
        (
            lambda f: f.rename(columns={"step_time_std_s": "step_time_std_ms"}),
            "unknown column 'step_time_std_ms'",
        ),
        (lambda f: f.assign(step_time_s=["0.1", "-0.1"]), "'step_time_s', row 2"),
        (lambda f: f.assign(step_time_s=["nan", "0.1"]), "'step_time_s', row 1"),
        (lambda f: f.assign(row_id="7"), "row 2: source=cases, row_id=7 occurs twice"),
        (lambda f: f.assign(precision=["amp", "fp17"]), "'precision', row 2.*expected 'fp32'.*fp16"),
        (
            lambda f: f.assign(batch_size_per_device=["12.5", "1"]),
            "'batch_size_per_device', row 1.*valid integer",
        ),
        (lambda f: f.assign(compile=["True", "maybe"]), "'compile', row 2.*valid boolean"),
        (lambda f: f.assign(input_shape=["3xax7", ""]), "'input_shape', row 1"),
        (lambda f: f.assign(model=["", "timm:resnet50"]), "'model', row 1.*empty"),
        (lambda f: f.assign(schema_version=str(SCHEMA_VERSION + 1)), "schema_version"),
    ],
)
def test_a_bad_table_is_refused_with_its_place(tmp_path, change, message):
    with pytest.raises(RecordError, match=message) as caught:
        read_records(_changed(tmp_path, change))
    assert "mine.csv" in str(caught.value)


def test_a_damaged_parquet_file(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(RecordError, match=r"broken\.parquet.*cannot be read"):
        read_records(tmp_path / "broken.parquet")


def table(tmp_path, text):
    path = tmp_path / "steps.csv"
    path.write_text(text)
    return path


def test_a_speed_and_a_time_say_the_same(tmp_path):
    path = table(
        tmp_path,
        "model,device,batch_size,images_per_s,step_time_s,precision\n"
        "timm:resnet50,rtx-3090,128,400,,amp\n"
        "timm:resnet50,rtx-3090,128,,0.32,amp\n",
    )
    first, second = read_measured_steps([path])
    assert first.step_time_s == pytest.approx(second.step_time_s) == pytest.approx(0.32)
    assert first.family == "resnet"
    assert (first.precision, first.phase, first.optimizer) == ("amp", "train", "sgd")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("timm:resnet50,rtx-3090,0,400,", "batch_size"),
        ("timm:resnet50,rtx-3090,8,,", "neither"),
        ("timm:resnet50,rtx-3090,8,400,0.3", "step_time_s and images_per_s"),
        (",rtx-3090,8,400,", "'model' must be a model"),
        ("timm:resnet50,rtx-3090,8,fast,", "'fast'"),
    ],
)
def test_a_cell_that_cannot_be_meant_is_named_with_its_row(tmp_path, row, words):
    path = table(tmp_path, f"model,device,batch_size,images_per_s,step_time_s\n{row}\n")
    with pytest.raises(RecordError, match=f"line 2.*{words}"):
        read_measured_steps([path])


def test_an_unknown_column_is_named(tmp_path):
    path = table(tmp_path, "model,device,batch_size,images_per_s,speed\ntimm:resnet50,rtx-3090,8,400,1\n")
    with pytest.raises(RecordError, match="speed"):
        read_measured_steps([path])
