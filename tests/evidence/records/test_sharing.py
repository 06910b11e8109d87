"""Shared rows tell a step and its prediction, and nothing of who measured it."""

import json

import pytest

from forerun.base.errors import RecordError
from forerun.evidence.records.measurement import Summary
from forerun.evidence.records.sharing import read_shared, shared_rows, write_shared
from made_measurements import measurement
from studies.commands.board import board_page

STABLE = Summary(median_s=0.05, low_s=0.049, high_s=0.051, is_stable=True)
UNSTABLE = Summary(median_s=0.05, low_s=0.01, high_s=0.2, is_stable=False)
ASKED = {"batch_size": 32, "precision": "fp32", "optimizer": "sgd"}


def step(number, **changed):
    values = {"subject": "torchvision:resnet18", "device": "t4", "parameters": ASKED, "summary": STABLE}
    return measurement(number, **(values | changed))


def test_rows_are_public_models_on_catalogued_devices():
    rows = shared_rows(
        [
            step(1),
            step(2, subject="/home/ada/secret.py:model"),
            step(3, subject="hf:config.json"),
            step(4, summary=UNSTABLE),
            step(5, summary=None),
        ]
    )
    assert [(row.model, row.device, row.batch_size) for row in rows] == [("torchvision:resnet18", "t4", 32)]
    assert rows[0].low_s < rows[0].predicted_s < rows[0].high_s
    assert (rows[0].month, rows[0].framework) == ("2026-11", "pytorch 2.15")


def test_a_file_holds_no_host_no_user_and_no_day(tmp_path):
    file = tmp_path / "mine.json"
    write_shared(shared_rows([step(1)]), file)
    text = file.read_text()
    assert all(word not in text for word in ("Test CPU", "power", "2026-11-21", "first", str(tmp_path)))
    assert read_shared(file) == shared_rows([step(1)])
    assert "| t4 | 1 | 1 |" in board_page(read_shared(file))


def test_another_file_is_refused(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"format": 2, "rows": []}))
    with pytest.raises(RecordError, match="format 2 instead of 1; make it again"):
        read_shared(file)
    file.write_text(json.dumps({"format": 1, "rows": [{"host": "ada"}]}))
    with pytest.raises(RecordError, match="make it again"):
        read_shared(file)
