"""The front against its definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from forerun.planner.pareto import pareto_front

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
