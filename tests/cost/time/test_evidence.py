"""The distance from what was measured, and the widths of intervals that follow from it."""

from dataclasses import replace

import numpy as np
import pytest

from forerun.base.errors import CostModelError
from forerun.cost.time.evidence import Z_90, load_evidence, operation_mix, shipped_evidence, step_covariates
from forerun.cost.time.features import Point
from forerun.question.devices import find_device
from forerun.question.setup import Phase, Precision, TrainingSetup
from op_models import ops_named

AMP = TrainingSetup(precision=Precision.AMP, batch_size_per_device=32)
KNOWN = Point(device=find_device("rtx-3090"), setup=AMP, era=0.7)
MIX = operation_mix(ops_named("resnet18", "amp"))


OWN = np.array([0.1, 0.0, 0.05])
"""A step of 30 ms or more that hardly waits for its host, on which the members of the ensemble agree."""


def width(point, mix=MIX, own=OWN):
    evidence = shipped_evidence()
    return float(evidence.log_widths(np.concatenate([evidence.covariates(point, mix), own])[None])[0])


def test_a_mix_is_shares_of_groups():
    assert MIX.sum() == pytest.approx(1.0)
    assert MIX.min() >= 0
    assert operation_mix(ops_named("vit", "amp"))[2] > MIX[2]  # more of it is linear layers


def test_what_was_measured_is_known_and_all_else_is_further():
    evidence = shipped_evidence()
    odd = np.zeros_like(MIX)
    odd[4] = 1.0
    assert evidence.covariates(KNOWN, MIX)[:2].tolist() == [0.0, 0.0]
    assert evidence.covariates(replace(KNOWN, setup=replace(AMP, phase=Phase.FORWARD)), MIX)[1] == 1.0
    assert evidence.covariates(replace(KNOWN, device=replace(KNOWN.device, name="rtx-3091")), MIX)[0] == 1.0
    assert evidence.covariates(KNOWN, odd)[2] > evidence.covariates(KNOWN, MIX)[2]
    assert not evidence.is_near(KNOWN.device, AMP, odd)


def test_no_interval_is_narrower_than_systems_differ_and_nothing_unknown_makes_one_narrower():
    evidence = shipped_evidence()
    assert (evidence.widths.costs >= 0).all()
    assert width(KNOWN) > Z_90 * evidence.spreads.system
    unlike = replace(KNOWN, device=replace(KNOWN.device, name="rtx-3091"))
    assert width(unlike) >= width(KNOWN)
    small = step_covariates(np.array([3e-3]), np.array([2e-3]), np.array([1e-3]), np.array([0.2]))[0]
    assert small == pytest.approx([2 / 3, 1.0, 0.2])
    assert width(KNOWN, own=small) >= width(KNOWN)


def test_rows_of_another_batch_or_release_say_less():
    spreads = shipped_evidence().spreads
    none, batch, release = spreads.apart_variance(np.array([0.0, -2.0, 0.0]), np.array([0.0, 0.0, -0.5]))
    assert none == 0.0
    assert batch == pytest.approx(2 * spreads.doubling**2)
    assert release == pytest.approx(0.5 * spreads.release**2)


def test_the_file_reads_back_what_was_written(tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text(shipped_evidence().to_json(), encoding="utf-8")
    found = load_evidence(path)
    assert found.systems == shipped_evidence().systems
    assert (found.widths, found.spreads) == (shipped_evidence().widths, shipped_evidence().spreads)
    assert found.covariates(KNOWN, MIX) == pytest.approx(shipped_evidence().covariates(KNOWN, MIX))


def test_a_damaged_file_is_one_clear_error(tmp_path):
    path = tmp_path / "evidence.json"
    with pytest.raises(CostModelError, match="reinstall"):
        load_evidence(path)
    path.write_text('{"format_version": 0}')
    with pytest.raises(CostModelError, match="format 0"):
        load_evidence(path)
