"""Run times for SkyPilot's optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import forerun
from forerun.adapters.clusters.job_formats import SKYPILOT_ACCELERATORS, time_estimator
from forerun.base.errors import InvalidSetupError, UnknownDeviceError

MODEL = "cnn:depth=2,base_filters=32"
JOB = {"dataset": "cifar10", "epochs": 3, "batch_size": 64}


def on(**accelerators):
    return SimpleNamespace(
        accelerators={name.replace("_", "-"): count for name, count in accelerators.items()}
    )


def test_every_accelerator_is_a_device_of_the_catalogue():
    for device in SKYPILOT_ACCELERATORS.values():
        assert forerun.find_device(device).name == device


def test_the_time_is_that_of_the_prediction():
    estimate = forerun.time_estimator(MODEL, **JOB)
    own = forerun.predict(MODEL, device="a100-sxm4-40gb", **JOB)
    assert estimate(on(A100=1)) == own.job_time_s.value == estimate(on(a100=1.0))


def test_several_accelerators_share_the_job():
    estimate = time_estimator(MODEL, **JOB)
    assert estimate(on(A100=1)) / 4 <= estimate(on(A100=4)) < estimate(on(A100=1))


@pytest.mark.parametrize(
    ("resources", "error", "words"),
    [
        (SimpleNamespace(accelerators=None), InvalidSetupError, "one kind of accelerator, got None"),
        (on(A100=1, T4=1), InvalidSetupError, "one kind of accelerator"),
        (on(A100=0.5), InvalidSetupError, "whole devices, got 0.5 x A100"),
        (on(A1000=1), UnknownDeviceError, "no device of the catalogue for the accelerator 'A1000'"),
    ],
)
def test_resources_that_cannot_be_meant_are_refused(resources, error, words):
    with pytest.raises(error, match=words):
        time_estimator(MODEL, **JOB)(resources)


@pytest.mark.parametrize("question", [{}, {"dataset": "cifar10"}, {"epochs": 3}, {**JOB, "device": "t4"}])
def test_a_question_without_a_job_or_with_a_device_is_refused(question):
    with pytest.raises(InvalidSetupError):
        time_estimator(MODEL, **question)
