"""Regression gates on the public tables: a small fixed sample, so that a fault in trace, memory or time shows."""

import numpy as np
import pytest

from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.evaluate import evaluate_records
from forerun.evidence.fitting.evaluation import configuration_of
from forerun.evidence.fitting.measured_steps import measured_steps
from studies.memory.study import bracket_shares, bracket_study
from studies.tables.public import reference_folder
from studies.tables.published import read_timm_train

pytestmark = pytest.mark.reference


@pytest.fixture(scope="module")
def sample():
    folder = reference_folder()
    if folder is None:
        pytest.skip("the public measurement tables are absent: set FORERUN_REFERENCE_DATA to their folder")
    records = read_timm_train(folder)
    distinct = {configuration_of(record): record for record in reversed(records)}  # the first of each
    return list(distinct.values())[::-48]


def test_sample_spans_families_and_layouts(sample):
    assert len(sample) >= 20
    assert len({record.family for record in sample}) >= 12
    assert {str(record.layout) for record in sample} == {"nchw", "nhwc"}


def test_memory_brackets_are_hit(sample):
    brackets = bracket_study(sample)
    shares = bracket_shares(brackets, "replay", num_folds=3)
    few = [bracket for bracket in brackets if bracket.record in sample[:6]]
    rule = bracket_shares(few, "16 bytes per parameter", num_folds=2)
    assert shares.verdicts_right >= 0.9
    assert rule.bracket_hit == 0.0


def test_shipped_model_describes_the_rows_it_was_fitted_to(sample):
    evaluation = evaluate_records(sample, load_weights(shipped_weights_path()))
    assert evaluation.metrics.median_ape < 0.08
    assert evaluation.metrics.coverage_90 > 0.85
    assert set(evaluation.baselines) >= {
        "roofline",
        "roofline x constant",
        "linear on FLOPs",
        "ann",
        "gradient boosting",
    }
    assert any("used to fit" in note for note in evaluation.notes)


def test_every_step_of_the_sample_has_kernels_and_a_general_graph(sample):
    steps, skipped = measured_steps(sample)
    assert len(steps) + len(skipped) >= len(sample) - 2
    assert all(np.all(step.ops.count > 0) for step in steps)
