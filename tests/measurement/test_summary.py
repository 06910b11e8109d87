"""The interval of the median against published ranks, its coverage, and the reasons for instability."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.measurement.jobs import RunResult
from forerun.measurement.protocol import Protocol
from forerun.measurement.summary import median_interval_ranks, median_interval_s, summarise

# Ranks of the 95 % interval of a median as tabulated for small samples: Campbell and Gardner 1988, BMJ 296:1454,
# "Calculating confidence intervals for some non-parametric analyses".
PUBLISHED_RANKS = {
    6: (1, 6),
    7: (1, 7),
    8: (1, 8),
    9: (2, 8),
    10: (2, 9),
    11: (2, 10),
    12: (3, 10),
    15: (4, 12),
}
PUBLISHED_RANKS |= {20: (6, 15), 25: (8, 18), 30: (10, 21), 40: (14, 27), 50: (18, 33), 100: (40, 61)}


@pytest.mark.parametrize(("num_values", "ranks"), PUBLISHED_RANKS.items())
def test_ranks_are_the_published_ones(num_values, ranks):
    assert median_interval_ranks(num_values) == ranks


@pytest.mark.parametrize("num_values", [1, 2, 3, 4, 5])
def test_few_values_give_their_extremes(num_values):
    assert median_interval_ranks(num_values) == (1, num_values)


@pytest.mark.parametrize("num_values", [6, 13, 57, 200, 3001])
def test_ranks_are_the_tightest_that_reach_95_percent(num_values):
    from scipy.stats import binom

    low, high = median_interval_ranks(num_values)
    assert low + high == num_values + 1
    assert 1 - 2 * binom.cdf(low - 1, num_values, 0.5) >= 0.95
    assert 1 - 2 * binom.cdf(low, num_values, 0.5) < 0.95


@pytest.mark.parametrize("num_values", [6, 10, 20])
def test_the_interval_covers_the_median_of_a_skewed_distribution(num_values):
    source = random.Random(7)
    covered = 0
    for _ in range(2000):
        low_s, high_s = median_interval_s([source.expovariate(1) for _ in range(num_values)])
        covered += low_s <= 0.693147 <= high_s
    assert covered / 2000 >= 0.945


def test_no_values_have_no_interval():
    with pytest.raises(ValueError, match="at least one value, got 0"):
        median_interval_s([])


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60))
def test_the_interval_encloses_the_median(times_s):
    summary = summarise(RunResult(repetitions_s=tuple(times_s)), Protocol())
    assert min(times_s) <= summary.low_s <= summary.median_s <= summary.high_s <= max(times_s)


def result(times_s, **options):
    return RunResult(repetitions_s=tuple(times_s), **options)


def test_a_quiet_run_is_stable():
    summary = summarise(result([1.0, 1.01] * 10), Protocol())
    assert (summary.is_stable, summary.reason) == (True, "")


def test_a_run_without_repetitions_has_no_summary():
    assert summarise(result([]), Protocol()) is None


@pytest.mark.parametrize(
    ("unstable", "reason"),
    [
        (result([1.0] * 20, is_stationary=False), "the step time did not settle"),
        (result([1.0] * 10 + [1.08] * 10), "the second half of the repetitions is 8.0% slower"),
        (result([1.0] * 10 + [0.9] * 10), "the second half of the repetitions is 10.0% faster"),
        (result([1.0, 2.0] * 10), "the interval of the median is ±33%, more than 10%"),
    ],
)
def test_an_unstable_run_says_why(unstable, reason):
    summary = summarise(unstable, Protocol())
    assert not summary.is_stable
    assert summary.reason == reason


def test_all_reasons_are_given():
    reason = summarise(result([1.0] * 10 + [1.5] * 10, is_stationary=False), Protocol()).reason
    assert [part.split(" of ")[0] for part in reason.split("; ")] == [
        "the step time did not settle",
        "the second half",
        "the interval",
    ]
