from pathlib import Path

import pytest

from forerun.base.errors import RecordError
from forerun.evidence.records.tables import read_timm_csv
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision

TRAIN_HEADER = "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
# Two rows in the form of the published file for PyTorch 1.12 and NHWC.
TRAIN_ROWS = "tinynet_e,11915.85,41.681,512,106,2.04\nswsl_resnet18,3480.5,146.765,512,224,11.69\n"
INFER_HEADER = (
    "model,infer_img_size,infer_samples_per_sec,infer_step_time,infer_batch_size,param_count,"
    "infer_gmacs,infer_macts\n"
)
INFER_ROWS = (
    "resnet18,160,38116.15,26.847,1024,11.69,0.93,1.27\nresnet18,224,19878.7,51.495,1024,11.69,1.82,2.48\n"
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "benchmark.csv"
    path.write_text(text)
    return path


def test_training_rows(tmp_path):
    path = written(tmp_path, TRAIN_HEADER + TRAIN_ROWS)
    first, second = read_timm_csv(path, "rtx-3090", layout=Layout.NHWC, framework_version="1.12")
    assert first.model == "timm:tinynet_e"
    assert first.step_time_s == pytest.approx(0.041681)
    assert (first.batch_size_per_device, first.image_size, first.num_parameters) == (512, 106, 2_040_000)
    assert (first.phase, first.precision, first.layout) == (Phase.TRAIN, Precision.AMP, Layout.NHWC)
    assert (first.optimizer, first.includes_optimizer) == ("nesterov", True)
    assert first.optimizer_implementation is OptimizerImplementation.FOR_LOOP
    assert first.autocast_backward
    assert not first.fused_attention
    assert second.family == "resnet"
    assert {first.device, second.device} == {"rtx-3090"}


def test_inference_rows_of_one_model_at_two_sizes(tmp_path):
    records = read_timm_csv(
        written(tmp_path, INFER_HEADER + INFER_ROWS), "rtx-5090", framework_version="2.9.1"
    )
    assert [record.image_size for record in records] == [160, 224]
    assert {record.phase for record in records} == {Phase.INFERENCE}
    assert not any(record.includes_optimizer or record.autocast_backward for record in records)
    assert records[0].fused_attention


def test_both_modes_in_one_file_and_a_mode_that_failed(tmp_path):
    text = (
        "model,infer_samples_per_sec,infer_step_time,infer_batch_size,infer_img_size,"
        "train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
        "resnet18,19878.7,51.495,1024,224,3480.5,146.765,512,224,11.69\n"
        "big,100.0,1000.0,100,224,,,,,800.0\n"
    )
    records = read_timm_csv(written(tmp_path, text), "rtx-3090")
    assert [(record.model, str(record.phase)) for record in records] == [
        ("timm:resnet18", "train"),
        ("timm:resnet18", "inference"),
        ("timm:big", "inference"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model,accuracy\nresnet18,0.7\n", "columns of timm"),
        (TRAIN_HEADER.replace("train_img_size,", "") + "a,1000,100,100,1.0\n", "missing: train_img_size"),
        (TRAIN_HEADER.replace("param_count", "params") + TRAIN_ROWS, "unknown column 'params'"),
        (TRAIN_HEADER + TRAIN_ROWS.replace("41.681", "-41.681"), "'train_step_time', row 1.*above zero"),
        (TRAIN_HEADER + TRAIN_ROWS.replace("146.765", "nan"), "'train_step_time', row 2.*'nan'"),
        (TRAIN_HEADER + TRAIN_ROWS.replace("146.765", "fast"), "'train_step_time', row 2.*'fast'"),
        (TRAIN_HEADER + TRAIN_ROWS.replace("146.765", ""), "'train_step_time', row 2"),
        (
            TRAIN_HEADER + TRAIN_ROWS.replace("146.765", "0.146765"),
            "row 2: 0.146765 contradicts.*147.1 ms.*mixed",
        ),
        (
            TRAIN_HEADER + TRAIN_ROWS + "tinynet_e,11915.85,41.681,512,106,2.04\n",
            "row 3: model=tinynet_e.*twice",
        ),
        (TRAIN_HEADER, "at least one row"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path, text, message):
    with pytest.raises(RecordError, match=message) as caught:
        read_timm_csv(written(tmp_path, text), "rtx-3090")
    assert "benchmark.csv" in str(caught.value)


def test_a_missing_file_and_a_wrong_kind_of_file(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        read_timm_csv(tmp_path / "absent.csv", "rtx-3090")
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(RecordError, match=r"\.csv or \.parquet"):
        read_timm_csv(tmp_path / "results.json", "rtx-3090")
