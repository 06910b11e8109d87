"""The distance from what was measured, and the widths of intervals that follow from it."""

import numpy as np
import pytest

from forerun.base.errors import CostModelError
from forerun.cost.time.evidence import Z_90, load_evidence, operation_mix, shipped_evidence, step_covariates
from forerun.question.devices import find_device
from forerun.question.setup import Precision, TrainingSetup
from op_models import ops_named

AMP = TrainingSetup(precision=Precision.AMP, batch_size_per_device=32)
MIX = operation_mix(ops_named("resnet18", "amp"))


def test_a_mix_is_shares_of_groups():
    assert MIX.sum() == pytest.approx(1.0)
    assert MIX.min() >= 0
    assert operation_mix(ops_named("vit", "amp"))[2] > MIX[2]  # more of it is linear layers


def test_disagreement_and_a_die_that_nobody_measured_widen_what_systems_differ_by():
    evidence = shipped_evidence()
    agreed, apart, unknown = evidence.log_widths(
        step_covariates(MIX, np.array([0.0, 0.2, 0.0]), [True, True, False])
    )
    assert min(apart, unknown) > agreed > Z_90 * evidence.spreads.system
    closed, learned = (
        evidence.log_widths(step_covariates(operation_mix(ops_named(name, "amp")), np.zeros(1), [True]))[0]
        for name in ("vit", "resnet18")
    )
    assert closed < learned


def test_networks_like_those_that_were_measured_are_near():
    odd = np.zeros_like(MIX)
    odd[4] = 1.0
    assert shipped_evidence().is_near(find_device("rtx-3090"), AMP, MIX)
    assert not shipped_evidence().is_near(find_device("rtx-3090"), AMP, odd)


def test_the_file_reads_back_what_was_written(tmp_path):
    path = tmp_path / "evidence.json"
    path.write_text(shipped_evidence().to_json(), encoding="utf-8")
    found = load_evidence(path)
    assert found.measured == shipped_evidence().measured
    assert (found.widths, found.spreads) == (shipped_evidence().widths, shipped_evidence().spreads)


def test_a_damaged_file_is_one_clear_error(tmp_path):
    path = tmp_path / "evidence.json"
    with pytest.raises(CostModelError, match="reinstall"):
        load_evidence(path)
    path.write_text('{"format_version": 0}')
    with pytest.raises(CostModelError, match="format 0"):
        load_evidence(path)
