"""Choice, front, binding limit, relaxations and sensitivity on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_candidates import table

from forerun.search.choice import DEVICE_MEMORY, HIGH, Choice, pareto_front
from forerun.search.search import parse_limits

NAN = float("nan")


def choice(found, limits="", goal="time"):
    return Choice(found, parse_limits(limits), goal)


def chosen(found, limits="", goal="time"):
    return choice(found, limits, goal).best


def test_an_excess_is_the_share_beyond_the_limit():
    found = table([3600.0, 9000.0], [10.0, 30.0], [5.0, 12.0], accuracy=[0.9, 0.8])
    asked = choice(found, "time<=2h,cost<=20,accuracy>=88%")
    assert asked.excess[:, 1] == pytest.approx([0.25, 0.5, 0.1, 0.2])
    assert asked.kept.tolist() == [True, False]


def test_what_is_not_known_breaks_its_limit_without_bound():
    assert np.isinf(choice(table([1.0], [NAN]), "cost<=20").excess[0, 0])


def test_the_bad_end_of_what_should_be_large_is_its_low_end():
    found = table([10.0], [1.0])
    at_worst = choice(found, "time<=11s,throughput>=0.095").excess_at(HIGH)
    assert at_worst[0, 0] == pytest.approx(0.0)
    assert at_worst[1, 0] == pytest.approx(0.095 / (0.1 / 1.1) - 1)


def test_the_least_objective_among_those_that_keep_the_limits_is_chosen():
    found = table([1.0, 2.0, 3.0], [9.0, 5.0, 1.0])
    assert chosen(found) == 0
    assert chosen(found, goal="cost") == 2
    assert chosen(found, "cost<=6") == 1
    assert chosen(found, "cost<=0.5") is None


def test_what_does_not_fit_is_never_chosen_although_nobody_limited_memory():
    assert chosen(table([1.0, 2.0], [1.0, 1.0], [11.0, 9.0])) == 1


def test_what_surely_fits_comes_before_what_may_not():
    found = choice(
        table([1.0, 3.0, 2.0, 4.0], [1.0] * 4, [9.5, 8.0, 8.5, 11.0])
    )  # at the bad end 10.45, 8.8, 9.35
    assert found.best_first(4).tolist() == [2, 1, 0]
    assert (found.best, found.sure.tolist()) == (2, [False, True, True, False])
    assert found.rivals()[0].tolist() == []  # the first may not fit
    assert chosen(table([1.0, 2.0], [1.0, 1.0], [9.5, 9.6])) == 0  # nothing is sure
    assert choice(table([3.0, 1.0], [1.0, 1.0], [8.0, 9.5]), "time<=4s").relaxations() == []


def test_of_equals_the_faster_and_then_the_cheaper_is_taken():
    assert chosen(table([2.0, 1.0], [5.0, 5.0]), goal="cost") == 1
    assert chosen(table([1.0, 1.0], [6.0, 5.0])) == 1


def test_a_price_that_is_not_known_is_never_the_cheapest():
    assert chosen(table([1.0, 2.0], [NAN, 5.0]), goal="cost") == 1


def test_the_nearest_miss_breaks_its_worst_limit_by_least():
    found = table([4.0, 2.2, 3.0], [1.0, 30.0, 11.0])
    assert choice(found, "time<=2s,cost<=10").nearest_first()[0] == 2
    # What exceeds its device cannot run, however near it is.
    assert choice(table([4.0, 2.2], [1.0, 1.0], [1.0, 99.0]), "time<=2s").nearest_first().tolist() == [0, 1]


def test_the_front_runs_from_fast_to_cheap():
    found = table([1.0, 2.0, 3.0, 2.5], [9.0, 5.0, 1.0, 7.0])
    assert choice(found).front().tolist() == [0, 1, 2]
    assert choice(found, "cost<=8").front().tolist() == [1, 2]


def test_without_prices_the_front_is_of_time_and_energy():
    found = table([1.0, 2.0, 3.0], [NAN] * 3, energy_j=[4.0, 5.0, 1.0])
    assert choice(found).front().tolist() == [0, 2]


def test_known_accuracies_are_a_third_side_of_the_front():
    found = table([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], accuracy=[0.8, 0.7, 0.9])
    assert choice(found).front().tolist() == [0, 2]


def test_a_relaxation_is_the_least_change_of_one_limit_that_helps():
    found = table([1.0, 2.0, 3.0], [30.0, 12.0, 5.0])
    asked = choice(found, "time<=10s,cost<=10")
    (only,) = asked.relaxations()
    assert only == (1, 1)
    assert asked.excess[only] == pytest.approx(0.2)


def test_a_lower_limit_is_relaxed_downwards():
    found = table([1.0, 2.0], [1.0, 2.0], accuracy=[0.88, 0.93])
    asked = choice(found, "accuracy>=92%")
    (only,) = asked.relaxations()
    assert only == (0, 0)
    assert asked.excess[only] == pytest.approx(0.92 / 0.88 - 1)


def test_two_broken_limits_are_not_mended_by_one():
    found = table([3.0], [30.0])
    assert choice(found, "time<=2s,cost<=10").relaxations() == []


def test_a_choice_with_room_on_all_sides_holds():
    found = choice(table([1.0, 2.0], [1.0, 1.0], options=[0, 1]), "time<=2s")
    rivals, regret = found.rivals()
    assert (found.broken_at_worst(), rivals.tolist(), regret) == ((), [], 0.0)


def test_a_choice_on_the_edge_of_a_limit_does_not_hold():
    found = choice(table([1.0], [1.0], [9.5]), "time<=1.05s")
    assert found.broken_at_worst() == ("time<=1.05s", DEVICE_MEMORY)


def test_a_rival_within_the_interval_is_named_with_the_regret():
    rivals, regret = choice(table([1.0, 1.02, 1.05], [1.0] * 3, options=[0, 1, 2])).rivals()
    assert rivals.tolist() == [1, 2]
    assert regret == pytest.approx(1.1 / 1.02 - 1)


def test_the_same_device_at_another_batch_errs_together_and_is_no_rival():
    assert not choice(table([1.0, 1.02], [1.0, 1.0])).rivals()[0].size


@given(
    rows=st.lists(
        st.tuples(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(0.1, 20)), min_size=1, max_size=30
    ),
    time_s=st.floats(0.1, 100),
    usd=st.floats(0.1, 100),
)
def test_laws_of_the_choice(rows, time_s, usd):
    # An excess is a quotient: what is beyond a limit by less than its rounding keeps it.
    bounds = (time_s, usd, 10.0)
    assume(
        not any(
            value > bound and value / bound - 1 < 1e-9
            for row in rows
            for value, bound in zip(row, bounds, strict=True)
        )
    )
    found = table(*(list(column) for column in zip(*rows, strict=True)))
    asked = choice(found, f"time<={time_s}s,cost<={usd}")
    allowed = [i for i, (t, c, m) in enumerate(rows) if t <= time_s and c <= usd and m <= 10]
    assert asked.kept.nonzero()[0].tolist() == allowed
    if asked.best is None:
        assert not allowed
        assert asked.excess[:, asked.nearest_first()[0]].max() > 0
        return
    assert rows[asked.best][0] == min(rows[i][0] for i in allowed)
    # The choice is on the front, and relaxing a limit by what is said does admit something better.
    assert rows[asked.front()[0]][0] == rows[asked.best][0]
    for index, row in asked.relaxations():
        wider = [time_s, usd]
        wider[index] *= (1 + asked.excess[index, row]) * (1 + 1e-9)
        better = chosen(found, f"time<={wider[0]}s,cost<={wider[1]}")
        assert better is not None
        assert rows[better][0] < rows[asked.best][0]


# Few distinct values, so that ties and equal points are common.
VALUES = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0, np.inf, np.nan])


def by_definition(costs):
    found = []
    for i, point in enumerate(costs):
        beaten = any((other <= point).all() and (other < point).any() for other in costs)
        repeated = any((other == point).all() for other in costs[:i])
        found.append(bool(np.isfinite(point).all()) and not beaten and not repeated)
    return found


@given(
    st.integers(2, 4).flatmap(
        lambda width: st.integers(0, 30).flatmap(lambda n: arrays(float, (n, width), elements=VALUES))
    )
)
def test_the_front_is_what_nothing_dominates(costs):
    finite = costs[np.isfinite(costs).all(axis=1)]
    expected = iter(by_definition(finite))
    wanted = [bool(np.isfinite(row).all()) and next(expected) for row in costs]
    assert pareto_front(costs).tolist() == wanted


@pytest.mark.parametrize("width", [2, 3])
def test_a_front_of_many_points_holds_the_best_of_each_column(width):
    costs = np.random.default_rng(0).random((2000, width))
    front = pareto_front(costs)
    assert 1 < front.sum() < 400
    assert front[costs.argmin(axis=0)].all()
