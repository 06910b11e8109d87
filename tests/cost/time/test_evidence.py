"""The distance from what was measured, and the widths of intervals that follow from it."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.base.errors import CostModelError
from forerun.cost.time.evidence import load_evidence, operation_mix, shipped_evidence
from forerun.cost.time.features import Point
from forerun.question.devices import find_device
from forerun.question.setup import Phase, Precision, TrainingSetup
from op_models import ops_named

AMP = TrainingSetup(precision=Precision.AMP, batch_size_per_device=32)
KNOWN = Point(device=find_device("rtx-3090"), setup=AMP, era=0.7)
MIX = operation_mix(ops_named("resnet18", "amp"))


def width(point, mix=MIX):
    return shipped_evidence().log_width(point, mix)


def test_a_mix_is_shares_of_groups():
    assert MIX.sum() == pytest.approx(1.0)
    assert MIX.min() >= 0
    assert operation_mix(ops_named("vit", "amp"))[2] > MIX[2]  # more of it is linear layers


@pytest.mark.parametrize(
    "further",
    [
        replace(KNOWN, setup=replace(AMP, phase=Phase.FORWARD)),
        replace(KNOWN, setup=replace(AMP, compile=True)),
        replace(KNOWN, era=3.0),
        replace(KNOWN, device=replace(KNOWN.device, name="rtx-3091", architecture="other", vendor="other")),
    ],
)
def test_what_differs_makes_the_interval_wider(further):
    assert width(further) > width(KNOWN) > 0


def test_operations_that_nobody_measured_make_it_wider():
    odd = np.zeros_like(MIX)
    odd[4] = 1.0
    assert width(KNOWN, odd) > width(KNOWN)
    assert not shipped_evidence().is_near(KNOWN.device, AMP, odd)


def test_no_difference_costs_less_than_nothing():
    assert (shipped_evidence().widths.of_differences >= 0).all()


def test_the_file_reads_back_what_was_written(tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text(shipped_evidence().to_json(), encoding="utf-8")
    found = load_evidence(path)
    assert found.systems == shipped_evidence().systems
    assert found.log_width(KNOWN, MIX) == pytest.approx(width(KNOWN))


def test_a_damaged_file_is_one_clear_error(tmp_path):
    path = tmp_path / "evidence.json"
    with pytest.raises(CostModelError, match="reinstall"):
        load_evidence(path)
    path.write_text('{"format_version": 0}')
    with pytest.raises(CostModelError, match="format 0"):
        load_evidence(path)
