"""Replay of the records that forerun ships: what they hold, and what is made of them."""

import numpy as np
import pytest

from forerun.evidence.records.measurement import JobKind, Outcome
from studies.own.records import (
    composition_rows,
    grid_study,
    layer_errors,
    own_device,
    own_measurements,
    own_record_folders,
)

CAMPAIGNS = ("grid", "layers", "calibration", "unseen", "composition")
CPU = "cpu-epyc-2-cores"


def folder_of(name):
    return {folder.name: folder for folder in own_record_folders()}[name]


def test_every_machine_has_a_device():
    assert CPU in [folder.name for folder in own_record_folders()]
    for folder in own_record_folders():
        assert own_device(folder).title


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_records_hold_repetitions_and_circumstances(name):
    records = own_measurements(folder_of(CPU), name)
    assert len({m.key for m in records}) == len(records)
    for m in records:
        if m.outcome is not Outcome.DONE:
            assert m.reason
            continue
        around = m.circumstances
        assert all((around.device_title, around.num_threads, around.framework_version, around.started_at))
        assert len(m.repetitions_s) >= 3
        assert m.summary.low_s <= m.summary.median_s <= m.summary.high_s
        assert m.summary.median_s == pytest.approx(float(np.median(m.repetitions_s)))


def test_the_grid_is_that_of_system_a_on_two_occasions():
    trainings = [m for m in own_measurements(folder_of(CPU), "grid") if m.kind is JobKind.TRAINING]
    sizes = {tuple(m.parameters[k] for k in ("depth", "base_filters", "batch_size")) for m in trainings}
    assert len(sizes) == 18
    assert len({m.circumstances.occasion for m in trainings}) >= 2


def test_a_configuration_is_predicted_from_the_others():
    study = grid_study(folder_of(CPU), kinds=("op", "linear"))
    assert study.num_configurations == 18
    op = study.metrics["op, calibrated and fitted"]
    assert op.r2 >= 0.95
    assert op.mape <= 0.11
    assert op.mape < 0.7 * study.metrics["op, nothing measured"].mape
    # The laws need no calibration of this machine to learn its grid.
    assert study.metrics["op"].mape <= 0.09
    assert study.metrics["op"].r2 >= 0.98


def test_layers_never_seen():
    metrics = layer_errors(folder_of(CPU))
    assert metrics["layers"].median_ape < 0.5 * metrics["linear on FLOPs"].median_ape


def test_the_overshoot_of_sums_is_explained():
    rows = composition_rows(folder_of(CPU))
    assert len({row.network for row in rows}) >= 5
    before = np.mean([row.overshoot_before for row in rows])
    after = np.mean([row.overshoot_after for row in rows])
    assert abs(after) < 0.12
    assert np.mean([abs(row.overshoot_after) for row in rows]) < np.mean(
        [abs(row.overshoot_before) for row in rows]
    )
    assert before > after
