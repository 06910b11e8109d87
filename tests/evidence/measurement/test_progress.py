"""The remaining time: a pure function of what was expected and what was seen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.evidence.measurement.session import remaining_time_s

TIMES = st.lists(st.floats(0.01, 1e4), min_size=1, max_size=20)


def test_before_the_first_job_the_expectation_stands():
    assert remaining_time_s([], [2.0, 3.0]) == 5.0


def test_jobs_that_took_twice_as_long_double_the_rest():
    assert remaining_time_s([(1.0, 3.0), (3.0, 5.0)], [2.0, 3.0]) == 10.0


def test_nothing_known_gives_nothing():
    assert remaining_time_s([], []) is None
    assert remaining_time_s([(0.0, 5.0)], [0.0]) is None


def test_nothing_left_takes_no_time():
    assert remaining_time_s([(1.0, 2.0)], []) == 0.0


@given(TIMES, TIMES, st.floats(0.01, 100))
def test_only_the_ratio_of_the_expectations_matters(real_s, left_s, factor):
    finished = [(1.0 + index, seconds) for index, seconds in enumerate(real_s)]
    scaled = [(factor * expected, seconds) for expected, seconds in finished]
    assert remaining_time_s(scaled, [factor * s for s in left_s]) == pytest.approx(
        remaining_time_s(finished, left_s)
    )


@given(TIMES)
def test_equal_shares_give_the_mean(real_s):
    finished = [(1.0, seconds) for seconds in real_s]
    assert remaining_time_s(finished, [1.0, 1.0]) == pytest.approx(2 * sum(real_s) / len(real_s))
