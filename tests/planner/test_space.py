"""Ranges, lists and members of families."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidSetupError
from forerun.planner.space import (
    MAX_CANDIDATES,
    check_count,
    expand_models,
    expand_range,
    parse_batch_sizes,
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
