"""A tiny network really learns synthetic images, and the two times of an epoch fit together."""

import math

import pytest
import torch

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol
from forerun.evidence.measurement.runners.table import run_job
from forerun.evidence.measurement.runners.training_runner import EpochFigures, epoch_results
from forerun.evidence.records.measurement import JobKind

torch.set_num_threads(1)

QUICK = Protocol(num_repetitions=3, min_warm_up=1, max_seconds=0.02, num_threads=1)


def train(**parameters):
    asked = {"batch_size": 64, "optimizer": "adam", "dataset": "synthetic", "num_epochs": 1, "num_steps": 4}
    job = MeasurementJob(
        kind=JobKind.TRAINING,
        subject="cnn:depth=1,base_filters=8",
        family="cnn",
        parameters={**asked, **parameters},
    )
    return run_job(job, "cpu", QUICK)


@pytest.fixture(scope="module")
def learned():
    return train(num_epochs=4, num_steps=40, image_size=16).results


def test_accuracy_rises_and_loss_falls_on_images_it_has_not_seen(learned):
    assert learned["val_accuracy_4"] > max(0.3, learned["val_accuracy_1"])
    assert learned["val_loss_4"] < learned["val_loss_1"]
    assert learned["accuracy_4"] > learned["accuracy_1"]
    assert learned["loss_4"] < learned["loss_1"]


def test_an_epoch_that_was_cut_is_extrapolated_and_compared(learned):
    steps = math.ceil(50_000 / 64)
    assert learned["is_extrapolated"] is True
    assert learned["steps_per_epoch"] == steps
    per_step = sorted(learned[f"epoch_time_{n}_s"] / 40 for n in (1, 2, 3, 4))
    assert learned["epoch_time_s"] == pytest.approx((per_step[1] + per_step[2]) / 2 * steps)
    assert learned["epoch_time_from_steps_s"] == pytest.approx(learned["step_time_s"] * steps)
    ratio = learned["epoch_time_s"] / learned["epoch_time_from_steps_s"]
    assert learned["epoch_time_difference"] == pytest.approx(ratio - 1)
    assert learned["images_per_second"] == pytest.approx(50_000 / learned["epoch_time_s"])


def test_the_same_seed_learns_the_same():
    first, second = (train(image_size=8).results for _ in range(2))
    assert first["loss_1"] == pytest.approx(second["loss_1"], rel=1e-5)


def test_batches_prepared_by_another_process_are_as_good():
    assert train(num_workers=1, num_steps=2, image_size=8).results["accuracy_1"] >= 0


def test_no_epochs_leave_the_answer_from_steps():
    results = train(num_epochs=0).results
    assert results["epoch_time_s"] == results["epoch_time_from_steps_s"]
    assert "epoch_time_difference" not in results
    assert "accuracy_1" not in results


def figures(**changed):
    known = {"time_s": 2.0, "num_steps": 10, "loss": 1.0, "accuracy": 0.5}
    return EpochFigures(**{**known, "held_out_loss": 1.5, "held_out_accuracy": 0.4, **changed})


def test_whole_epochs_are_no_extrapolation_and_a_lost_loss_is_no_number():
    results = epoch_results(
        [figures(), figures(loss=float("nan"), held_out_loss=float("inf"))],
        median_step_s=0.1,
        batch_size=10,
        num_images=100,
    )
    assert results["is_extrapolated"] is False
    assert results["epoch_time_s"] == pytest.approx(2.0)
    assert results["epoch_time_difference"] == pytest.approx(1.0)
    assert (results["loss_1"], results["loss_2"], results["val_loss_2"]) == (1.0, None, None)


def test_what_is_no_training_is_refused():
    with pytest.raises(InvalidSetupError, match="an optimizer"):
        train(optimizer="none")
    with pytest.raises(InvalidSetupError, match="phase train"):
        train(phase="inference")
    with pytest.raises(InvalidSetupError, match="fp16 weights"):
        train(precision="fp16")
    with pytest.raises(InvalidSetupError, match="unknown dataset"):
        train(dataset="cifar")
