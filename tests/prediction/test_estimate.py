"""Values with intervals, and the estimate as plain JSON."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

import forerun
from forerun.prediction.estimate import (
    BreakdownPart,
    ErrorSources,
    Estimate,
    Interval,
    LayerTime,
    MemoryShare,
    Provenance,
)
from forerun.prediction.memory import shown_memory
from forerun.question.run import Run

POSITIVE = st.floats(1e-6, 1e6)
INTERVALS = st.tuples(POSITIVE, POSITIVE, POSITIVE).map(sorted).map(lambda v: Interval(v[1], v[0], v[2]))


@pytest.mark.parametrize("values", [(1.0, 2.0, 3.0), (3.0, 1.0, 2.0), (float("nan"), 0.0, 1.0)])
def test_an_interval_holds_its_value(values):
    with pytest.raises(AssertionError, match="low <= value <= high"):
        Interval(*values)


@given(INTERVALS, POSITIVE)
def test_scaling_and_shifting_keep_the_order(interval, number):
    for made in (interval.scaled(number), interval.shifted(number), interval.inverse(number)):
        assert made.low <= made.value <= made.high
    assert interval.scaled(2).value == 2 * interval.value
    assert interval.shifted(number).low == interval.low + number


@given(INTERVALS)
def test_the_inverse_turns_the_ends_around(interval):
    inverse = interval.inverse(10.0)
    assert inverse.low == pytest.approx(10 / interval.high)
    assert inverse.high == pytest.approx(10 / interval.low)
    assert inverse.inverse(10.0).value == pytest.approx(interval.value)


def some_estimate():
    interval = Interval(2.0, 1.0, 3.0)
    given_values = {
        "run": Run.of("gpt2", device="a100-sxm4-80gb"),
        "phase": "train",
        "device_memory_bytes": 79.0,
        "breakdown": (BreakdownPart("convolution", 1.5), BreakdownPart("linear", 0.5)),
        "top_layers": (LayerTime("layer1", 1.0, 0.5),),
        "memory_parts": (MemoryShare("weights", 10.0),),
        "provenance": Provenance.DATASHEET_ONLY,
        "error_sources": ErrorSources(unknown_system=0.1, cost_model=0.2),
        "unsupported_ops": ("strange",),
        "notes": ("a note",),
        "epoch_time_s": None,
        "job_time_s": None,
        "fits": "yes",
        "num_steps_per_epoch": None,
        "num_steps": None,
        "tokens_per_s": interval,
        "tokens_per_s_per_device": interval,
        "mfu": interval,
        "hfu": interval,
    }
    numbers = ("batch_size_per_device", "num_devices", "num_parameters", "num_trainable_parameters")
    values = {
        field.name: interval
        if field.name.endswith(("_s", "_bytes", "_usd", "_j", "max_batch_size"))
        else 1
        if field.name in numbers
        else "text"
        for field in fields(Estimate)
    }
    return Estimate(**values | given_values)


def test_an_estimate_becomes_plain_json():
    plain = some_estimate().as_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {field.name for field in fields(Estimate)}
    assert plain["step_time_s"] == {"value": 2.0, "low": 1.0, "high": 3.0}
    assert plain["epoch_time_s"] is None
    assert plain["provenance"] == "datasheet only"
    assert plain["breakdown"] == [{"name": "convolution", "time_s": 1.5}, {"name": "linear", "time_s": 0.5}]
    assert plain["top_layers"] == [{"module": "layer1", "time_s": 1.0, "share": 0.5}]
    assert plain["unsupported_ops"] == ["strange"]


# GiB that forerun says are needed, that a replay with all of the device holds, and that nvidia-smi showed: Qwen2.5-14B
# on eight A800 with ZeRO-2, ZeRO-3 and Megatron's tp 4 (ms-swift, docs/source_en/GetStarted/Quick-start.md),
# Qwen2.5-VL 7B on H100 (EasyR1, README); LoRA of Qwen-7B with 8,192 tokens and of Qwen-14B with 4,096 on one A100
# (QwenLM/Qwen, README).
@pytest.mark.parametrize(
    ("needed", "held", "shown"),
    [
        ((57.7, 50.3, 67.7), None, 74.5),
        ((38.2, 33.3, 44.7), None, 54.0),
        ((44.5, 38.8, 52.2), None, 59.6),
        ((38.6, 33.7, 45.3), None, 60.0),
        ((36.3, 27.4, 47.0), 37.5, 35.7),
        ((41.8, 32.2, 54.1), 42.0, 41.5),
    ],
)
def test_nvidia_smi_shows_more_than_a_step_needs_and_no_more_than_the_device_has(needed, held, shown):
    run, replays = Run.of("gpt2", device="a100-sxm4-80gb"), None if held is None else lambda: held
    told = shown_memory(run, Interval(*needed), 79.0, replays)
    assert told.low <= shown <= told.high <= 79.0
    assert held is None or abs(told.value / shown - 1) < 0.1


@pytest.mark.parametrize(
    ("change", "most"), [({"phase": "inference"}, 79.0), ({"device": "mi300x"}, 79.0), ({}, 1.9)]
)
def test_what_nvidia_smi_shows_is_not_said_where_nobody_measured_it(change, most):
    assert shown_memory(Run.of("gpt2", **{"device": "l4"} | change), Interval(2.0, 1.5, 2.5), most) is None


def test_the_json_has_the_promised_names():
    promised = """step_time_s throughput_samples_per_s epoch_time_s job_time_s peak_memory_bytes cost_usd energy_j
    max_batch_size fits notes breakdown bound_by provenance error_sources published unsupported_ops"""
    assert set(promised.split()) <= set(some_estimate().as_dict())


def test_an_answer_says_a_size_of_images_that_is_not_the_usual_one():
    def sizes_said(**options):
        found = forerun.predict("timm:test_vit", device="t4", batch_size=8, **options)
        return [note for note in found.notes if note.startswith("a sample is")]

    (note,) = sizes_said()
    assert "3 x 160 x 160" in note
    assert sizes_said(image_size=160) == []
