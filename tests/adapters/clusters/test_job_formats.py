"""Run times for SkyPilot's optimizer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import forerun
from forerun.adapters.clusters.job_formats import (
    SKYPILOT_ACCELERATORS,
    dstack_lines,
    sbatch_line,
    sky_lines,
    time_estimator,
)
from forerun.base.errors import InvalidSetupError, UnknownDeviceError, UsageError

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


def test_schedulers_are_told_nodes_and_devices_by_their_own_names():
    asked = {"inter": "infiniband-ndr", **JOB}
    several = forerun.predict(MODEL, device="2x8xa100-sxm4-80gb", **asked)
    assert sbatch_line(several).startswith("#SBATCH --nodes=2 --gres=gpu:8 --time=")
    assert sky_lines(several) == "resources: {accelerators: 'A100-80GB-SXM:8'}\nnum_nodes: 2"
    assert "nodes: 2\nresources: {gpu: 'A100:80GB:8'}\nmax_duration: " in dstack_lines(several)
    planned = forerun.plan(MODEL, devices="2x8xa100-sxm4-80gb", batch_sizes=[64], dataset="cifar10", epochs=3,
                           inter="infiniband-ndr")  # fmt: skip
    with pytest.raises(UsageError, match="a plan does not say on how many nodes its 16 devices are"):
        sbatch_line(planned)


@pytest.mark.parametrize("question", [{}, {"dataset": "cifar10"}, {"epochs": 3}, {**JOB, "device": "t4"}])
def test_a_question_without_a_job_or_with_a_device_is_refused(question):
    with pytest.raises(InvalidSetupError):
        time_estimator(MODEL, **question)
