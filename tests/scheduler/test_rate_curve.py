"""Curves of useful rates, hulls, and what a larger batch is worth."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_cases import speed

from forerun.errors import InvalidSetupError
from forerun.scheduler.rate_curve import BatchEfficiency, rate_curve, upper_hull

RATES = st.lists(st.floats(0, 1e3), min_size=1, max_size=30).map(lambda values: [0.0, *values])


@given(rates=RATES)
def test_a_hull_is_concave_and_above_all_rates(rates):
    corners = upper_hull(rates)
    assert corners[0] == 0
    assert rates[corners[-1]] == max(rates)
    slopes = [(rates[b] - rates[a]) / (b - a) for a, b in itertools.pairwise(corners)]
    assert slopes == sorted(slopes, reverse=True)
    for a, b in itertools.pairwise(corners):
        for n in range(a, b):
            line = rates[a] + (rates[b] - rates[a]) * (n - a) / (b - a)
            assert rates[n] <= line + 1e-9


def test_efficiency_is_one_at_the_base_and_halves_where_noise_runs_out():
    worth = BatchEfficiency(noise_scale=1000.0, base_batch_size=100.0)
    assert worth(100.0, 0.0) == 1.0
    assert worth(1200.0, 0.5) == pytest.approx(1100 / 2200)
    with pytest.raises(InvalidSetupError):
        BatchEfficiency(noise_scale=-1.0, base_batch_size=100.0)


def test_a_range_of_batches_never_makes_it_slower():
    worth = BatchEfficiency(noise_scale=500.0, base_batch_size=64.0)
    fixed = rate_curve(speed(), None, (64.0, 64.0), 4, 16, 0.0)
    free = rate_curve(speed(), worth, (64.0, 2048.0), 4, 16, 0.0)
    assert all(a >= b - 1e-9 for a, b in zip(free.rates, fixed.rates, strict=True))
    assert list(free.batch_sizes[1:]) == sorted(free.batch_sizes[1:])


def test_the_fewest_and_the_best():
    curve = rate_curve(speed(sync_s=5.0), None, (64.0, 64.0), 4, 8, 0.0)
    assert (curve.fewest, curve.best, curve.best_within(8)) == (1, 1, 1)
    assert curve.scaled([1.0, 1.0, 99.0] + [1.0] * 6).best == 2
