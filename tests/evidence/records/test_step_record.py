import dataclasses

import pytest
from record_cases import record

from forerun.base.errors import RecordError
from forerun.evidence.records.measured_run import (
    default_optimizer_implementation,
    framework_release,
    is_pytorch_2,
)
from forerun.evidence.records.measurement import ANCHOR_FAMILY
from forerun.evidence.records.step_record import as_step_record
from forerun.question.setup import OptimizerImplementation
from made_measurements import measurement


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"step_time_s": 0.0}, "step_time_s"),
        ({"step_time_s": -1.0}, "step_time_s"),
        ({"step_time_s": float("nan")}, "step_time_s"),
        ({"step_time_s": float("inf")}, "step_time_s"),
        ({"batch_size_per_device": 0}, "batch_size_per_device"),
        ({"num_devices": 0}, "num_devices"),
        ({"image_size": 0}, "image_size"),
        ({"sequence_length": -4}, "sequence_length"),
        ({"num_parameters": -1}, "num_parameters"),
        ({"step_time_std_s": float("nan")}, "step_time_std_s"),
        ({"peak_memory_bytes": -1.0}, "peak_memory_bytes"),
        ({"next_larger_batch_failed": 64}, "next_larger_batch_failed"),
        ({"model": ""}, "model"),
        ({"device": ""}, "device"),
    ],
)
def test_an_impossible_value_is_refused_by_column_and_row(changes, named):
    with pytest.raises(RecordError, match=rf"cases, row 1.*'{named}'"):
        record(**changes)


def test_a_record_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        record().step_time_s = 1.0


def test_throughput_counts_all_devices():
    assert record(num_devices=4).throughput_samples_per_s == 4 * 64 / 0.25


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("1.12", (1, 12)),
        ("2.5.0a0+b465a58", (2, 5)),
        ("2.0rc1", (2, 0)),
        ("", None),
        ("unknown", None),
        ("2", None),
    ],
)
def test_framework_release(text, release):
    assert framework_release(text) == release


def test_defaults_of_pytorch_changed_with_2_0():
    assert not is_pytorch_2("1.13")
    assert is_pytorch_2("2.0.1")
    assert is_pytorch_2("")
    assert default_optimizer_implementation("1.13") is OptimizerImplementation.FOR_LOOP
    assert default_optimizer_implementation("2.1.0") is OptimizerImplementation.FOREACH


def test_setup_repeats_the_circumstances():
    setup = record(
        framework_version="1.12", optimizer="sgd", includes_optimizer=True, compile=True
    ).training_setup()
    assert (setup.batch_size_per_device, setup.optimizer, setup.compile) == (64, "sgd", True)
    assert not setup.zero_grad_to_none
    assert record(framework_version="2.4").training_setup().zero_grad_to_none


def test_setup_leaves_out_an_update_that_was_not_timed():
    assert record(optimizer="adam", includes_optimizer=False).training_setup().optimizer == "none"


def test_anchors_are_no_steps_of_a_model():
    assert as_step_record(measurement(1)) is not None
    assert as_step_record(measurement(1, family=ANCHOR_FAMILY)) is None
