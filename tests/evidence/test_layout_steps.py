"""Measured steps of several devices: what they correct, and tables that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forerun
from forerun.base.errors import ForerunError
from forerun.cost.communication.constants import ErrorLaw, MeasuredLayouts, StepShape

MODEL = "gpt:depth=4,width=512,vocabulary=4096"
SETTINGS: dict[str, Any] = {"precision": "bf16", "sequence_length": 256, "batch_size": 4}
HEADER = "model,device,parallel,strategy,batch_size,precision,sequence_length,step_time_s\n"
ROW = f'"{MODEL}",8xh100-sxm,{{parallel}},{{strategy}},4,bf16,256,{{step_s}}\n'
ROWS = ROW.format(parallel='"tp=2,dp=4"', strategy="zero1", step_s=0.05) + ROW.format(
    parallel="", strategy="ddp", step_s=0.04
)


def predicted(**options: Any) -> forerun.Estimate:
    return forerun.predict(MODEL, device="8xh100-sxm", **{**SETTINGS, **options})


def test_a_measured_layout_is_predicted_as_it_was_measured(tmp_path: Path) -> None:
    steps, out = tmp_path / "steps.csv", tmp_path / "cluster.json"
    steps.write_text(HEADER + ROWS)
    found = forerun.calibrate("h100-sxm", from_records=steps, out=out)
    assert (found.method, found.num_models) == ("layouts", 2)
    for layout, measured_s in (
        ({"parallel": "tp=2,dp=4", "strategy": "zero1"}, 0.05),
        ({"parallel": "dp=8"}, 0.04),
    ):
        before, after = predicted(**layout), predicted(**layout, calibration=str(out))
        assert (
            abs(after.step_time_s.value / measured_s - 1)
            < 0.15
            < abs(before.step_time_s.value / measured_s - 1)
        )
        assert sum(part.time_s for part in after.breakdown) == pytest.approx(after.step_time_s.value)
        widths = [one.step_time_s.high / one.step_time_s.low for one in (before, after)]
        assert widths[1] < widths[0]
    with pytest.raises(ForerunError, match="this run has one device; give more"):
        forerun.predict(MODEL, device="h100-sxm", **SETTINGS, calibration=str(out))
    with pytest.raises(ForerunError, match="measured on h100-sxm, not on a100"):
        forerun.predict(MODEL, device="8xa100-sxm4-80gb", **SETTINGS, strategy="fsdp", calibration=str(out))


def test_a_correction_fades_with_the_distance_of_shapes() -> None:
    shape = StepShape(hidden_size=4096, block_s=0.01, exposed_share=0.1, waiting_share=0.0)
    measured = MeasuredLayouts(device="h100-sxm", shapes=(shape,), logs=(0.3,))
    law = ErrorLaw()
    near, left = measured.correction(shape)
    assert near == pytest.approx(0.3 * (1 - law.noise**2 / (law.common**2 + law.shape**2 + law.noise**2)))
    other = StepShape(hidden_size=64, block_s=1e-5, exposed_share=0.9, waiting_share=0.0)
    far, rest = measured.correction(other)
    assert 0 < far < 0.1 * near
    assert left < rest < 1


@pytest.mark.parametrize(
    ("text", "device", "out", "words"),
    [
        (HEADER + ROWS, "h100-sxm", None, "give --out my-cluster.json"),
        (HEADER + ROWS, "a100-sxm4-80gb", "a.json", "line 2: a step of h100-sxm"),
        (HEADER, "h100-sxm", "a.json", "a row or more below the header"),
        (HEADER.replace("precision", "precison") + ROWS, "h100-sxm", "a.json", "did you mean precision"),
        (
            HEADER + ROWS.replace("0.05", "fast"),
            "h100-sxm",
            "a.json",
            "line 2: 'step_time_s' must be seconds above zero",
        ),
        (
            HEADER + ROWS.replace(",4,", ",four,"),
            "h100-sxm",
            "a.json",
            "line 2: 'batch_size' must be a whole number",
        ),
        (
            HEADER + ROWS.replace("tp=2,dp=4", "tp=3"),
            "h100-sxm",
            "a.json",
            "line 2: tp=3 needs a multiple of 3",
        ),
        (
            HEADER + ROWS.replace("8xh100-sxm,,ddp", "h100-sxm,,"),
            "h100-sxm",
            "a.json",
            "line 3: expected a step of several devices",
        ),
    ],
)
def test_tables_that_cannot_be_read(
    tmp_path: Path, text: str, device: str, out: str | None, words: str
) -> None:
    (tmp_path / "steps.csv").write_text(text)
    with pytest.raises(ForerunError, match=words):
        forerun.calibrate(
            device, from_records=tmp_path / "steps.csv", out=None if out is None else tmp_path / out
        )
