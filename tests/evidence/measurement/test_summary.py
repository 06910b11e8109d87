"""The stationarity test on series whose truth is known, and the warm-up and summary that rest on it."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.evidence.measurement.jobs import Protocol, RunResult
from forerun.evidence.measurement.runners.timing import (
    has_settled,
    median_interval_ranks,
    median_interval_s,
    noise_s,
    relative_shift,
    summarise,
    windows_agree,
)

NOISES = {
    "normal": lambda source: source.gauss(0, 1),
    "exponential": lambda source: source.expovariate(1),
    "rare outliers": lambda source: source.gauss(0, 1) + (20 if source.random() < 0.05 else 0),
}


def share_refused(series, num_series=1500, window=5, tolerance=0.0):
    source = random.Random(20261121)
    refused = sum(
        not has_settled(series(source), window=window, tolerance=tolerance) for _ in range(num_series)
    )
    return refused / num_series


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("window", [3, 5, 10, 20])
def test_noise_alone_is_seldom_refused_even_without_a_floor(noise, window):
    draw = NOISES[noise]
    rate = share_refused(lambda source: [1 + 0.05 * draw(source) for _ in range(2 * window)], window=window)
    assert rate < 0.05


def test_the_floor_forgives_small_noise_altogether():
    quiet = share_refused(lambda source: [1 + 0.01 * source.gauss(0, 1) for _ in range(10)], tolerance=0.03)
    assert quiet < 0.001


@pytest.mark.parametrize(("change", "least"), [(0.05, 0.55), (0.10, 0.97), (0.30, 0.999)])
def test_a_step_change_is_found(change, least):
    def series(source):
        return [1 + (change if i >= 5 else 0) + 0.02 * source.gauss(0, 1) for i in range(10)]

    assert share_refused(series, tolerance=0.02) >= least


@pytest.mark.parametrize("sign", [1, -1])
def test_a_trend_is_found_though_it_widens_the_windows(sign):
    def series(source):
        return [1 + sign * 0.015 * i + 0.01 * source.gauss(0, 1) for i in range(10)]

    assert share_refused(series, tolerance=0.02) > 0.98
    assert not has_settled([1 + sign * 0.01 * i for i in range(10)], window=5, tolerance=0.02)


def test_a_warm_up_decay_is_refused_until_what_is_left_is_below_the_tolerance():
    times_s = [1 + 3 * math.exp(-i / 4) for i in range(40)]
    settled = [n for n in range(41) if has_settled(times_s[:n], window=5, tolerance=0.02)]
    first = settled[0]
    assert settled == list(range(first, 41))
    # What comes after the first accepted window is within the tolerance of the limit, and what came before is not.
    assert times_s[first] - 1 < 0.02
    assert times_s[first - 8] - 1 > 0.02


def test_one_outlier_in_each_window_changes_nothing():
    times_s = [1.0, 1.01, 9.0, 0.99, 1.0, 1.0, 1.0, 7.0, 1.01, 0.99]
    assert has_settled(times_s, window=5, tolerance=0.02)


def test_a_short_series_has_not_settled():
    assert not has_settled([1.0] * 9, window=5, tolerance=0.02)
    assert has_settled([1.0] * 10, window=5, tolerance=0.02)


def test_only_the_last_two_windows_count():
    assert has_settled([50.0, 20.0, *[1.0] * 6], window=3, tolerance=0.0)


def test_windows_of_two_are_refused():
    with pytest.raises(ValueError, match="at least 3 values, got 2 and 3"):
        windows_agree([1.0, 1.0], [1.0, 1.0, 1.0], tolerance=0.1)


def test_noise_is_the_standard_deviation_and_blind_to_trend_and_step():
    source = random.Random(3)
    noise = [0.1 * source.gauss(0, 1) for _ in range(4000)]
    assert noise_s(noise) == pytest.approx(0.1, rel=0.05)
    assert noise_s([n + 0.001 * i for i, n in enumerate(noise)]) == pytest.approx(0.1, rel=0.05)
    assert noise_s([n + (5 if i > 2000 else 0) for i, n in enumerate(noise)]) == pytest.approx(0.1, rel=0.05)
    assert noise_s([1.0]) == 0.0


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=6, max_size=40),
    st.floats(1e-3, 1e3),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_the_unit_of_time_does_not_matter(times_s, factor, tolerance):
    half = len(times_s) // 2
    before, after = times_s[:half], times_s[half:]
    bound = max(tolerance * median(before), 0.0)
    difference = abs(median(after) - median(before))
    if any(math.isclose(difference, limit, rel_tol=1e-6) for limit in (bound, _error_bound(before, after))):
        return  # on the edge rounding decides
    scaled = windows_agree([factor * t for t in before], [factor * t for t in after], tolerance=tolerance)
    assert scaled == windows_agree(before, after, tolerance=tolerance)


def _error_bound(before, after):
    sigma_s = max(noise_s(before), noise_s(after))
    return 2 * sigma_s * math.sqrt(math.pi / 2 * (1 / len(before) + 1 / len(after)))


def test_relative_shift_has_the_sign_of_the_change():
    assert relative_shift([1.0, 1.0, 1.0], [1.1, 1.2, 1.0]) == pytest.approx(0.1)
    assert relative_shift([2.0], [1.0]) == -0.5


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
