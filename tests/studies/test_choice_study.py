"""Ranking devices: sets, medians of runs, and what counts as a right choice."""

from __future__ import annotations

import math

import pytest

from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Phase, Precision
from studies.optime.choice_study import (
    MeasuredRate,
    RepeatNoise,
    choice_results,
    choice_section,
    kind_of,
    perfect_choices,
    repeat_noise,
)

DEVICES = ("t4", "v100-sxm2-16gb", "a100-sxm4-40gb", "h100-sxm", "rtx-3090")


def rates(measured, predicted, group="set", devices=DEVICES):
    return [
        MeasuredRate(
            group=group,
            device=device,
            precision=Precision.FP32,
            measured_samples_per_s=real,
            predicted_samples_per_s=guess,
        )
        for device, real, guess in zip(devices, measured, predicted, strict=False)
    ]


def by_predictor(rows):
    return {result.predictor: result for result in choice_results("sets", rows)}


def test_the_right_order_is_a_correlation_of_one_whatever_the_scale():
    found = by_predictor(rates([1, 2, 3, 5, 4], [10, 20, 30, 90, 80]))["**forerun**"]
    assert found.median_spearman == pytest.approx(1.0)
    assert found.right_share == 1.0


def test_a_choice_within_five_per_cent_of_the_best_is_right():
    near = by_predictor(rates([1, 2, 3, 100, 96], [1, 2, 3, 4, 5]))["**forerun**"]
    far = by_predictor(rates([1, 2, 3, 100, 90], [1, 2, 3, 4, 5]))["**forerun**"]
    assert (near.right_share, far.right_share) == (1.0, 0.0)
    assert far.sets[0].loss == pytest.approx(0.1)


def test_sets_of_fewer_than_four_devices_are_left_out():
    assert choice_results("sets", rates([1, 2, 3], [1, 2, 3])) == []


def test_runs_of_one_device_count_once_by_their_median():
    twice = rates([1, 2, 3, 5, 4], [1, 2, 3, 5, 4]) + rates([9], [1]) + rates([1.2], [1])
    (found,) = by_predictor(twice)["**forerun**"].sets
    assert found.num_devices == 5
    assert found.spearman == pytest.approx(1.0)


def test_baselines_rank_by_the_peak_and_by_the_price():
    found = by_predictor(rates([1, 3, 4, 5, 2], [1, 1, 1, 1, 1.1]))
    assert found["peak FLOP/s"].right_share in (0.0, 1.0)
    assert found["price"].sets[0].num_devices >= 4


def test_half_precision_is_a_kind_of_its_own():
    assert [kind_of(p) for p in (Precision.FP32, Precision.TF32, Precision.AMP, Precision.FP16)] == [
        "full",
        "full",
        "half",
        "half",
    ]


def test_the_section_has_a_line_for_each_predictor():
    text = choice_section(choice_results("made up", rates([1, 2, 3, 5, 4], [1, 2, 3, 5, 4])))
    assert "| made up | **forerun** | 1 | 5 to 5 | 1.000 | 100 % | 0 % |" in text


def record(step_time_s, device="t4", version="1.4"):
    return StepRecord(
        source="gpu_benchmarks",
        row_id="1",
        model="torchvision:resnet18",
        family="resnet",
        device=device,
        batch_size_per_device=12,
        step_time_s=step_time_s,
        precision=Precision.FP32,
        phase=Phase.TRAIN,
        framework_version=version,
    )


def test_noise_is_that_of_runs_which_repeat_each_other():
    apart = math.exp(0.1)
    pairs = [record(1.0), record(apart), record(2.0, "v100-sxm2-16gb"), record(2 * apart, "v100-sxm2-16gb")]
    found = repeat_noise([*pairs, record(9.0, version="1.7")])
    assert found.num_runs == 4
    assert found.log_deviation == pytest.approx(0.1 / math.sqrt(2))


def test_a_perfect_chooser_is_as_good_as_the_measurements():
    rows = rates([1, 2, 3, 3.1, 3.2], [5, 4, 3, 2, 1])
    exact = perfect_choices("sets", rows, RepeatNoise(log_deviation=0.0, num_runs=0))
    assert (exact.median_spearman, exact.right_share) == (pytest.approx(1.0), 1.0)
    noisy = perfect_choices("sets", rows, RepeatNoise(log_deviation=0.2, num_runs=9))
    assert 0.5 < noisy.median_spearman < 1.0
    assert 0.2 < noisy.right_share < 1.0
    often = perfect_choices("sets", rows * 25, RepeatNoise(log_deviation=0.2, num_runs=9))
    assert often.right_share > noisy.right_share
