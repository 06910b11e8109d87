"""Conformal quantiles cover what they claim, by rows and by groups, and laws of intervals follow from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import RecordError
from forerun.evidence.fitting.evaluation import (
    conformal_quantile,
    coverage,
    fit_law,
    group_weights,
)

scores_lists = st.lists(st.floats(0, 10), min_size=1, max_size=60)


@pytest.mark.parametrize(("n", "rank"), [(9, 9), (10, 10), (19, 18), (99, 90), (100, 91)])
def test_rank_of_the_quantile_is_corrected_for_the_sample(n, rank):
    """ceil((n + 1) * 0.9), Lei et al. 2018."""
    assert conformal_quantile(np.arange(1, n + 1)) == rank


def test_too_few_scores_cannot_promise_anything():
    assert conformal_quantile(np.arange(8.0)) == float("inf")


@given(scores_lists, st.floats(0.05, 0.95))
def test_equal_weights_change_nothing(scores, target):
    weights = np.full(len(scores), 3.7)
    assert conformal_quantile(scores, target, weights) == conformal_quantile(scores, target)


@given(scores_lists, st.floats(0.05, 0.9))
def test_quantile_grows_with_the_wanted_coverage(scores, target):
    assert conformal_quantile(scores, target) <= conformal_quantile(scores, target + 0.05)


@given(scores_lists)
def test_order_of_the_scores_does_not_matter(scores):
    assert conformal_quantile(scores) == conformal_quantile(scores[::-1])


def test_a_weight_of_two_is_two_rows():
    once = conformal_quantile([1.0, 2.0, 3.0, 4.0, 5.0], 0.6, [2, 1, 1, 1, 1])
    # Six rows at total weight five: mass 5/3 of the first, 5/6 of the others; 0.6 * 6 = 3.6 is reached at 4.
    assert once == 4.0


def test_groups_count_alike():
    groups = ["big"] * 90 + ["small"] * 10
    weights = group_weights(groups)
    assert weights.sum() == pytest.approx(100)
    assert weights[:90].sum() == pytest.approx(weights[90:].sum())
    scores = np.concatenate([np.full(90, 0.1), np.full(10, 0.5)])
    assert conformal_quantile(scores) == 0.5
    assert conformal_quantile(scores, 0.8) == 0.1
    assert conformal_quantile(scores, 0.8, weights) == 0.5


def test_coverage_on_fresh_rows_is_what_was_asked_for():
    """400 draws of calibration and test rows: mean coverage between 0.90 and 0.90 + 1/(n + 1)."""
    draw = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        actual = np.exp(draw.normal(0, 0.3, 99 + 50))
        quantile = conformal_quantile(np.abs(np.log(actual[:99])))
        bounds = np.exp(-quantile) * np.ones(50), np.exp(quantile) * np.ones(50)
        covered.append(coverage(actual[99:], *bounds))
    assert np.mean(covered) == pytest.approx(0.905, abs=0.01)


def test_borders_are_inside():
    assert coverage([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], [1.0, 2.0, 2.5]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conformal_quantile([]), "at least one score"),
        (lambda: conformal_quantile([float("nan")]), "no NaN"),
        (lambda: conformal_quantile([1.0], 1.0), "between 0 and 1"),
        (lambda: conformal_quantile([1.0, 2.0], 0.9, [1.0]), "one weight per score"),
        (lambda: conformal_quantile([1.0], 0.9, [-1.0]), "weights"),
        (lambda: coverage([1.0], [2.0], [1.0]), "low <= high"),
        (lambda: coverage([1.0], [1.0, 1.0], [2.0, 2.0]), "one interval per measurement"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RecordError, match=message):
        call()


def test_quantile_of_known_residuals():
    residuals = np.linspace(0.0, 1.0, 999)
    law = fit_law(residuals, np.zeros(999), ["a"] * 999)
    assert law.quantile * law.base == pytest.approx(0.9, abs=0.01)


def test_spread_is_used_when_it_tells_the_error():
    random = np.random.default_rng(0)
    spread = random.uniform(0.0, 0.5, 4000)
    residuals = random.normal(size=4000) * (0.02 + spread)
    law = fit_law(residuals, spread, ["a"] * 4000)
    assert law.slope > 0
    inside = np.abs(residuals) <= law.half_widths(spread)
    assert inside.mean() == pytest.approx(0.9, abs=0.01)
