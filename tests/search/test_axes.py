"""Ranges, lists, members of families, and settings that a plan searches, each combination once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forerun
from forerun.base.errors import InvalidSetupError
from forerun.search.search import (
    MAX_CANDIDATES,
    SEARCHED,
    changes_of,
    check_count,
    expand_models,
    expand_range,
    parse_batch_sizes,
    searched_values,
    split_list,
)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("64", (64,)),
        ("2..4", (2, 3, 4)),
        ("32..64", (32, 64)),
        ("32:1024", (32, 64, 128, 256, 512, 1024)),
        ("32:100", (32, 64)),
        ("32..64..8", (32, 40, 48, 56, 64)),
        ("7:7", (7,)),
    ],
)
def test_a_range_counts_small_numbers_and_doubles_large_ones(text, values):
    assert expand_range(text, "depth") == values


@given(low=st.integers(1, 500), length=st.integers(0, 400), step=st.integers(1, 50))
def test_a_range_with_a_step_is_that_of_python(low, length, step):
    assert expand_range(f"{low}:{low + length}:{step}", "size") == tuple(range(low, low + length + 1, step))


@settings(deadline=None)
@given(low=st.integers(1, 5000), high=st.integers(1, 100_000))
def test_a_range_without_a_step_rises_from_its_low_end_and_stays_inside(low, high):
    if low > high:
        with pytest.raises(InvalidSetupError):
            expand_range(f"{low}:{high}", "size")
        return
    values = expand_range(f"{low}:{high}", "size")
    assert values[0] == low
    assert values[-1] <= high < max(values[-1] + 1, 2 * values[-1])
    assert list(values) == sorted(set(values))


def test_lists_of_batch_sizes_are_sorted_and_each_is_there_once():
    assert parse_batch_sizes("128, 32:128, 48") == (32, 48, 64, 128)


def test_members_of_a_family_are_all_combinations():
    assert expand_models("cnn:depth=2..4,base_filters=32..64") == tuple(
        f"cnn:depth={depth},base_filters={filters}" for depth in (2, 3, 4) for filters in (32, 64)
    )
    assert expand_models("cifar-resnet:20|56; torchvision:resnet50") == (
        "cifar-resnet:20",
        "cifar-resnet:56",
        "torchvision:resnet50",
    )


@pytest.mark.parametrize("spec", ["timm:convnext_tiny", "my/model..2.py:make", "hf:../config.json", "resnet"])
def test_other_models_stay_as_they_are(spec):
    assert expand_models(spec) == (spec,)


@pytest.mark.parametrize(
    ("call", "text", "words"),
    [
        (parse_batch_sizes, "", "expected at least one batch size"),
        (parse_batch_sizes, " , ", "expected at least one batch size"),
        (parse_batch_sizes, "big", "must be a whole number or a range such as 32:1024"),
        (parse_batch_sizes, "1.5", "must be a whole number or a range"),
        (parse_batch_sizes, "64:32", "must rise from at least 1, got '64:32'"),
        (parse_batch_sizes, "0:32", "must rise from at least 1"),
        (parse_batch_sizes, "1:9:0", "the step of a range of batch size must be at least 1"),
        (parse_batch_sizes, "1:9000000:1", "9,000,000 are too many, at most 200,000"),
        (expand_models, " ; ", "expected at least one model"),
        (expand_models, "cnn:depth=4..2", "a range of depth must rise"),
        (expand_models, "cnn:depth=1..999..1,base_filters=1..999..1", "998,001 are too many"),
        (lambda text: split_list(text, "device"), "", "expected at least one device"),
    ],
)
def test_what_cannot_be_meant_is_refused(call, text, words):
    with pytest.raises(InvalidSetupError) as error:
        call(text)
    assert words in str(error.value)


def test_too_many_candidates_are_refused_with_their_count():
    check_count(MAX_CANDIDATES)
    with pytest.raises(InvalidSetupError, match="200,001 are too many, at most 200,000 are compared"):
        check_count(MAX_CANDIDATES + 1)


MODEL = "cifar-resnet:8"


@pytest.fixture(scope="module")
def found():
    return forerun.plan(
        MODEL, devices="t4,2xt4", batch_sizes=[64], precisions=["fp32"], dataset="cifar10", num_points=50,
        search="layout,compile,recompute,strategy",
    )  # fmt: skip


def test_each_combination_is_compared_once(found):
    alone = [point for point in found.points if point.num_devices == 1]
    several = [point for point in found.points if point.num_devices == 2]
    assert len(alone) == 2 * 2 * 3
    assert len(several) == 2 * 2 * 3 * 3
    assert found.num_candidates == len(alone) + len(several)
    assert all("strategy" not in point.settings for point in alone)
    assert {point.settings["strategy"] for point in several} == set(SEARCHED["strategy"])
    asked = {(point.num_devices, point.layout, *map(str, point.settings.values())) for point in found.points}
    assert len(asked) == found.num_candidates


@pytest.mark.parametrize("rank", [0, 1, 5, 20, 40])
def test_a_candidate_is_what_predict_says(found, rank):
    point = found.points[rank]
    several = {"num_devices": point.num_devices} if point.num_devices > 1 else {}
    asked = forerun.predict(
        MODEL, device="t4", batch_size=64, layout=point.layout, **several, **point.settings
    )
    assert point.step_time_s.value == pytest.approx(asked.step_time_s.value, rel=1e-6)
    assert point.peak_memory_bytes.value == pytest.approx(asked.peak_memory_bytes.value, rel=1e-6)


def test_all_leaves_given_settings_and_those_of_other_frameworks_alone():
    assert set(searched_values("all", {}, [MODEL])) == set(SEARCHED)
    assert "precision" not in searched_values("all", {"precisions": "amp"}, [MODEL])
    assert set(searched_values("all", {}, ["keras:mnist-cnn"])) == {"precision", "compile"}


@pytest.mark.parametrize(
    ("words", "given", "said"),
    [
        ("compil", {}, "did you mean compile"),
        ("layout", {"layouts": "nchw"}, "layout is given and searched"),
        ("recompute", {"recompute": "full"}, "recompute is given and searched"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused(words, given, said):
    with pytest.raises(InvalidSetupError, match=said):
        searched_values(words, given, [MODEL])


def test_a_device_without_a_price_is_listed_apart_where_cost_is_asked_about():
    asked = {"devices": "t4,rtx-3090", "batch_sizes": [64, 256], "precisions": ["fp32"], "dataset": "cifar10"}
    found = forerun.plan(MODEL, within="cost<=5, time<=1h", **asked)
    (point,) = found.unpriced
    rivals = [one for one in found.candidates if one.device == "rtx-3090"]
    assert point.device == "rtx-3090"
    assert point.cost_usd is None
    assert point.job_time_s.value == pytest.approx(min(one.job_time_s for one in rivals), rel=0.01)
    assert found.chosen.device == "t4"
    assert forerun.plan(MODEL, within="time<=1h", **asked).unpriced == ()


def test_language_models_are_planned_in_their_own_precision():
    assert {change["precision"] for change in changes_of(["llama-3.2-1b"], {})} == {"bf16"}
    assert {change["precision"] for change in changes_of(["llama-3.2-1b", "cnn"], {})} == {"fp32", "amp"}
    assert {change["precision"] for change in changes_of(["llama-3.2-1b"], {"precisions": ["fp32"]})} == {
        "fp32"
    }
