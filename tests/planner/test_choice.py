"""Choice, binding limit, relaxations and sensitivity on tables whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from made_candidates import table

from forerun.planner.candidates import HIGH
from forerun.planner.choice import (
    DEVICE_MEMORY,
    best_row,
    excesses,
    keeps,
    nearest_miss,
    pareto_rows,
    relaxations,
    sensitivity,
)
from forerun.planner.limits import parse_limits

NAN = float("nan")


def chosen(found, limits="", minimize="time"):
    return best_row(found, minimize, excesses(found, parse_limits(limits)))


def test_an_excess_is_the_share_beyond_the_limit():
    found = table([3600.0, 9000.0], [10.0, 30.0], [5.0, 12.0], accuracy=[0.9, 0.8])
    excess = excesses(found, parse_limits("time<=2h,cost<=20,accuracy>=88%"))
    assert excess[:, 1] == pytest.approx([0.25, 0.5, 0.1, 0.2])
    assert keeps(excess).tolist() == [True, False]


def test_what_is_not_known_breaks_its_limit_without_bound():
    excess = excesses(table([1.0], [NAN]), parse_limits("cost<=20"))
    assert np.isinf(excess[0, 0])


def test_the_bad_end_of_what_should_be_large_is_its_low_end():
    found = table([10.0], [1.0])
    (upper, lower) = parse_limits("time<=11s,throughput>=0.095")
    at_worst = excesses(found, [upper, lower], HIGH)
    assert at_worst[0, 0] == pytest.approx(0.0)
    assert at_worst[1, 0] == pytest.approx(0.095 / (0.1 / 1.1) - 1)


def test_the_least_objective_among_those_that_keep_the_limits_is_chosen():
    found = table([1.0, 2.0, 3.0], [9.0, 5.0, 1.0])
    assert chosen(found) == 0
    assert chosen(found, minimize="cost") == 2
    assert chosen(found, "cost<=6") == 1
    assert chosen(found, "cost<=0.5") is None


def test_what_does_not_fit_is_never_chosen_although_nobody_limited_memory():
    assert chosen(table([1.0, 2.0], [1.0, 1.0], [11.0, 9.0])) == 1


def test_of_equals_the_faster_and_then_the_cheaper_is_taken():
    assert chosen(table([2.0, 1.0], [5.0, 5.0]), minimize="cost") == 1
    assert chosen(table([1.0, 1.0], [6.0, 5.0])) == 1


def test_a_price_that_is_not_known_is_never_the_cheapest():
    assert chosen(table([1.0, 2.0], [NAN, 5.0]), minimize="cost") == 1


def test_the_nearest_miss_breaks_its_worst_limit_by_least():
    found = table([4.0, 2.2, 3.0], [1.0, 30.0, 11.0])
    assert nearest_miss(excesses(found, parse_limits("time<=2s,cost<=10"))) == 2


def test_the_front_runs_from_fast_to_cheap():
    found = table([1.0, 2.0, 3.0, 2.5], [9.0, 5.0, 1.0, 7.0])
    assert pareto_rows(found, np.ones(4, dtype=bool)).tolist() == [0, 1, 2]
    assert pareto_rows(found, np.asarray([False, True, True, True])).tolist() == [1, 2]


def test_without_prices_the_front_is_of_time_and_energy():
    found = table([1.0, 2.0, 3.0], [NAN] * 3, energy_j=[4.0, 5.0, 1.0])
    assert pareto_rows(found, np.ones(3, dtype=bool)).tolist() == [0, 2]


def test_known_accuracies_are_a_third_side_of_the_front():
    found = table([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], accuracy=[0.8, 0.7, 0.9])
    assert pareto_rows(found, np.ones(3, dtype=bool)).tolist() == [0, 2]


def test_a_relaxation_is_the_least_change_of_one_limit_that_helps():
    found = table([1.0, 2.0, 3.0], [30.0, 12.0, 5.0])
    limits = parse_limits("time<=10s,cost<=10")
    (only,) = relaxations(found, limits, "time", excesses(found, limits))
    assert (only.limit, only.row) == ("cost<=10", 1)
    assert only.factor == pytest.approx(1.2)
    assert only.bound == pytest.approx(12.0)
    assert only.gain == pytest.approx(1 / 3)


def test_a_lower_limit_is_relaxed_downwards():
    found = table([1.0, 2.0], [1.0, 2.0], accuracy=[0.88, 0.93])
    limits = parse_limits("accuracy>=92%")
    (only,) = relaxations(found, limits, "time", excesses(found, limits))
    assert only.row == 0
    assert only.bound == pytest.approx(0.88)


def test_two_broken_limits_are_not_mended_by_one():
    found = table([3.0], [30.0])
    limits = parse_limits("time<=2s,cost<=10")
    assert relaxations(found, limits, "time", excesses(found, limits)) == ()


def test_a_choice_with_room_on_all_sides_holds():
    found = sensitivity(table([1.0, 2.0], [1.0, 1.0], options=[0, 1]), parse_limits("time<=2s"), "time", 0)
    assert (found.keeps_limits, found.stays_best, found.regret) == (True, True, 0.0)


def test_a_choice_on_the_edge_of_a_limit_does_not_hold():
    found = sensitivity(table([1.0], [1.0], [9.5]), parse_limits("time<=1.05s"), "time", 0)
    assert found.broken == ("time<=1.05s", DEVICE_MEMORY)
    assert not found.keeps_limits


def test_a_rival_within_the_interval_is_named_with_the_regret():
    found = sensitivity(table([1.0, 1.02, 1.05], [1.0] * 3, options=[0, 1, 2]), (), "time", 0)
    assert (found.stays_best, found.rivals) == (False, (1, 2))
    assert found.regret == pytest.approx(1.1 / 1.02 - 1)


def test_the_same_device_at_another_batch_errs_together_and_is_no_rival():
    assert sensitivity(table([1.0, 1.02], [1.0, 1.0]), (), "time", 0).stays_best


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
    limits = parse_limits(f"time<={time_s}s,cost<={usd}")
    excess = excesses(found, limits)
    best = best_row(found, "time", excess)
    allowed = [i for i, (t, c, m) in enumerate(rows) if t <= time_s and c <= usd and m <= 10]
    assert keeps(excess).nonzero()[0].tolist() == allowed
    if best is None:
        assert not allowed
        assert excess[:, nearest_miss(excess)].max() > 0
        return
    assert rows[best][0] == min(rows[i][0] for i in allowed)
    # The choice is on the front, and relaxing a limit by what is said does admit something better.
    times = [rows[i][0] for i in pareto_rows(found, keeps(excess))]
    assert times[0] == rows[best][0]
    for item in relaxations(found, limits, "time", excess):
        wider = parse_limits(
            [
                f"{item.limit.partition('<')[0]}<={item.bound * (1 + 1e-9)}{'s' if 'time' in item.limit else ''}"
            ]
            + [limit.text for limit in limits if limit.text != item.limit]
        )
        better = best_row(found, "time", excesses(found, wider))
        assert better is not None
        assert rows[better][0] < rows[best][0]
