"""Evaluating a user's own table, with real traces."""

import json

import pytest

import forerun
from forerun.base.errors import InvalidSetupError, RecordError
from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Phase, Precision
from made_tables import write_records

MODELS = ("resnet18", "squeezenet1_1", "mobilenet_v3_small", "shufflenet_v2_x0_5")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    records = [
        StepRecord(
            source="mine",
            row_id=f"{model} {batch}",
            model=f"torchvision:{model}",
            family=model,
            device="rtx-3090",
            batch_size_per_device=batch,
            image_size=64,
            step_time_s=1e-3 * batch,
            precision=Precision.FP32,
            phase=Phase.TRAIN,
        )
        for model in MODELS
        for batch in (16, 32, 64)
    ]
    path = tmp_path_factory.mktemp("records") / "mine.csv"
    write_records(records, path)
    return path


def test_contract_of_the_json(table):
    found = json.loads(json.dumps(forerun.evaluate(table, format="forerun").as_dict()))
    fields = {"n", "mape", "median_ape", "p90_ape", "rmse", "mae", "r2", "coverage_90"}
    assert fields | {"groups", "baselines"} <= set(found)
    assert found["n"] == 12
    assert {"device rtx-3090", "family resnet18", "precision fp32"} <= set(found["groups"])
    for name in ("roofline", "roofline x constant", "linear on FLOPs", "ann", "gradient boosting"):
        assert fields <= set(found["baselines"][name])


def test_few_rows_leave_fitted_baselines_out_and_say_so(table):
    import pandas as pd

    short = table.with_name("short.csv")
    pd.read_csv(table).head(3).to_csv(short, index=False)
    found = forerun.evaluate(short, format="forerun")
    assert found.baselines["ann"] is None
    assert found.baselines["roofline"] is not None
    assert any("at least 10 rows" in note for note in found.notes)


def test_a_timm_table_needs_its_device(table):
    with pytest.raises(InvalidSetupError, match="exactly one with --on"):
        forerun.evaluate(table, format="timm")


def test_unknown_format(table):
    with pytest.raises(InvalidSetupError, match="timm or forerun"):
        forerun.evaluate(table, format="excel")


def test_no_row_of_the_wanted_device(table):
    with pytest.raises(RecordError, match="no row is left"):
        forerun.evaluate(table, format="forerun", devices=["t4"])


def test_the_format_is_told_by_the_columns(table, tmp_path):
    timm = tmp_path / "timm.csv"
    timm.write_text(
        "model,train_samples_per_sec,train_step_time,train_batch_size,train_img_size,param_count\n"
        "resnet18,400.0,160.0,64,64,11.69\n"
    )
    assert forerun.evaluate(table).metrics.n == 12
    assert forerun.evaluate(timm, devices=["rtx-3090"]).metrics.n == 1


def test_here_means_the_figures_of_this_machine(tmp_path):
    steps = [
        StepRecord(
            source="mine",
            row_id=str(batch),
            model="torchvision:resnet18",
            family="resnet",
            device="cpu",
            batch_size_per_device=batch,
            image_size=64,
            step_time_s=1e-2 * batch,
            precision=Precision.FP32,
            phase=Phase.TRAIN,
        )
        for batch in (16, 32)
    ]
    path = tmp_path / "cpu.csv"
    write_records(steps, path)
    cores = forerun.find_device("cpu").num_compute_units
    generic, here = (
        forerun.evaluate(path),
        forerun.evaluate(path, devices=[str(small_cpu(tmp_path, cores // 8))]),
    )
    assert (here.predicted_s > 2 * generic.predicted_s).all()


def small_cpu(folder, num_cores):
    """A device file of a processor that is a part of the generic one."""
    path = folder / "small.toml"
    path.write_text(
        f"""[device]
name = "cpu"
title = "Small"
vendor = "any"
kind = "cpu"
architecture = "avx512"
segment = "cpu"
release = "2023-01"
num_compute_units = {num_cores}
boost_clock_mhz = 2600
l2_cache_mb = 8
memory_gb = 32
memory_bandwidth_gb_s = 38.4
memory_type = "DDR5"
bus = "socket"
power_limit_w = 34
[device.peak_tflops]
fp64 = {2.662 * num_cores / 32}
fp32 = {5.325 * num_cores / 32}
[device.sources]
compute = "a part of a socket"
memory = "a part of a socket"
board = "a part of a socket"
peak_tflops = "a part of a socket"
"""
    )
    return path
