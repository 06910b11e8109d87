"""From steps to epochs and jobs."""

from __future__ import annotations

from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.prediction.estimate import Interval
from forerun.prediction.estimate_run import job_times
from forerun.question.job import DATASETS, Job, find_dataset

STEP, LAST, VALIDATION = Interval(2.0, 1.0, 4.0), Interval(1.0, 0.5, 2.0), Interval(0.5, 0.25, 1.0)


def test_an_epoch_of_whole_steps():
    times = job_times(Job(num_samples=320), 32, STEP, STEP, None)
    assert (times.num_steps_per_epoch, times.epoch_time_s, times.job_time_s) == (
        10,
        Interval(20, 10, 40),
        None,
    )


def test_the_last_partial_batch_takes_its_own_time():
    times = job_times(Job(num_samples=325), 32, STEP, LAST, None)
    assert (times.num_steps_per_epoch, times.epoch_time_s) == (11, Interval(21, 10.5, 42))


def test_the_last_partial_batch_can_be_dropped():
    times = job_times(Job(num_samples=325, drop_last=True), 32, STEP, LAST, None)
    assert (times.num_steps_per_epoch, times.epoch_time_s.value) == (10, 20)


def test_a_dataset_smaller_than_a_batch_is_one_partial_step():
    assert job_times(Job(num_samples=5), 32, STEP, LAST, None).epoch_time_s == LAST


def test_a_dropped_batch_that_was_the_only_one():
    with pytest.raises(InvalidSetupError, match="no step: 5 samples at a global batch of 32"):
        job_times(Job(num_samples=5, drop_last=True), 32, STEP, LAST, None)


def test_validation_adds_forward_passes():
    times = job_times(Job(num_samples=320, num_validation_samples=65), 32, STEP, STEP, VALIDATION)
    assert times.epoch_time_s == Interval(20 + 3 * 0.5, 10 + 3 * 0.25, 40 + 3 * 1.0)
    assert times.num_steps_per_epoch == 10


def test_a_job_adds_startup_once_and_a_checkpoint_per_epoch():
    job = Job(num_samples=320, num_epochs=3, startup_s=100, checkpoint_s=7)
    times = job_times(job, 32, STEP, STEP, None)
    assert times.epoch_time_s.value == 27
    assert times.job_time_s == Interval(100 + 3 * 27, 100 + 3 * 17, 100 + 3 * 47)


def test_part_of_an_epoch():
    times = job_times(Job(num_samples=320, num_epochs=0.5), 32, STEP, STEP, None)
    assert times.job_time_s == Interval(10, 5, 20)


@given(
    st.integers(1, 10**6), st.integers(1, 5000), st.floats(0.1, 100), st.integers(0, 10**5), st.floats(0, 1e4)
)
def test_the_interval_holds_the_value(num_samples, batch_size, epochs, num_validation, startup_s):
    job = Job(
        num_samples=num_samples,
        num_epochs=epochs,
        num_validation_samples=num_validation,
        startup_s=startup_s,
    )
    times = job_times(job, batch_size, STEP, LAST, VALIDATION)
    assert times.num_steps_per_epoch == -(-num_samples // batch_size)
    assert times.job_time_s.low <= times.job_time_s.value <= times.job_time_s.high
    assert times.job_time_s.value >= startup_s


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_samples", 0, "dataset size must be at least 1"),
        ("num_samples", -5, "dataset size must be at least 1"),
        ("num_epochs", 0, "number of epochs must be above zero"),
        ("num_epochs", -1, "number of epochs"),
        ("num_epochs", inf, "number of epochs"),
        ("num_epochs", nan, "number of epochs"),
        ("num_validation_samples", -1, "validation size must be zero or more"),
        ("startup_s", -1.0, "start-up time must be zero or more"),
        ("startup_s", nan, "start-up time"),
        ("checkpoint_s", inf, "checkpoint time must be a finite number, got inf"),
    ],
)
def test_numbers_that_cannot_be_meant(field, value, message):
    with pytest.raises(InvalidSetupError, match=message):
        Job(**{"num_samples": 10, field: value})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cifar10", "cifar10"),
        ("CIFAR-10", "cifar10"),
        ("fashion_mnist", "fashion-mnist"),
        ("ImageNet", "imagenet"),
    ],
)
def test_spellings_of_a_dataset(name, expected):
    assert find_dataset(name).name == expected


def test_an_unknown_dataset_lists_near_matches():
    with pytest.raises(
        InvalidSetupError, match=r"unknown dataset 'imagnet'; did you mean imagenet.*--dataset-size"
    ):
        find_dataset("imagnet")


def test_every_dataset_has_samples_and_a_source():
    for name, dataset in DATASETS.items():
        assert dataset.name == name
        assert dataset.num_training_samples > 0
        assert dataset.num_validation_samples >= 0
        assert dataset.source
