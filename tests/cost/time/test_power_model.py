"""Laws of the power model: what a limit does, and what no board does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.cost.time.power import (
    POWER_LAW,
    POWER_LAWS,
    check_power_limit_w,
    demand_share,
    device_power,
    limited_share,
    power_law_of,
    power_slowdown,
)
from forerun.question.devices import find_device

V100 = find_device("v100-pcie-16gb")
SHARES = st.floats(0.0, 1.5)
FRACTIONS = st.floats(0.0, 1.0)


def power(activity, fraction=0.5, limit_w=None):
    return device_power(V100, np.asarray([activity]), np.asarray([fraction]), limit_w)


def test_a_device_that_waits_draws_its_idle_power_and_a_busy_one_more():
    assert demand_share(np.zeros(1))[0] == POWER_LAW.idle_share
    shares = demand_share(np.linspace(0, 1.2, 50))
    assert (np.diff(shares) > 0).all()
    assert shares[-1] <= POWER_LAW.full_share


def test_every_law_is_of_a_device_of_the_catalogue_and_others_have_the_mean():
    for name, law in POWER_LAWS.items():
        assert power_law_of(find_device(name)) is law
        assert find_device(name).name == name
        assert 0 < law.idle_share < law.full_share < 1
        assert law.log_width < POWER_LAW.log_width
    assert power_law_of(find_device("t4")) is POWER_LAW


def test_mean_power_under_a_limit_is_below_limit_and_demand():
    demand, limit = np.linspace(0.1, 1.0, 40), 0.5
    mean = limited_share(demand, limit)
    assert (mean <= np.minimum(demand, limit)).all()
    assert mean[0] == pytest.approx(demand[0], rel=1e-6)
    assert mean[-1] == pytest.approx(limit, rel=1e-3)
    assert (np.diff(mean) > 0).all()


def test_a_limit_above_the_demand_changes_nothing():
    free, limited = power(0.5), power(0.5, limit_w=V100.power_limit_w)
    assert free.value_w == limited.value_w
    assert limited.slowdown == 1.0


@given(activity=SHARES, fraction=FRACTIONS, low=st.floats(0.3, 1.0), high=st.floats(0.3, 1.0))
def test_a_lower_limit_never_draws_more_and_is_never_faster(activity, fraction, low, high):
    low, high = sorted((low, high))
    tight = power(activity, fraction, low * V100.power_limit_w)
    wide = power(activity, fraction, high * V100.power_limit_w)
    assert tight.value_w <= wide.value_w + 1e-9
    assert tight.slowdown >= wide.slowdown - 1e-12
    assert tight.slowdown >= 1.0
    assert tight.low_w <= tight.value_w <= tight.high_w
    assert tight.value_w <= low * V100.power_limit_w + 1e-9


@given(activity=st.floats(0.3, 1.0), limit=st.floats(0.3, 0.7))
def test_arithmetic_suffers_more_from_a_limit_than_traffic(activity, limit):
    demand = demand_share(np.asarray([activity]))
    slow = [power_slowdown(demand, limit, np.asarray([fraction]))[0] for fraction in (0.0, 0.5, 1.0)]
    assert slow == sorted(slow)


def test_below_the_knee_the_clock_falls_in_proportion_to_the_power():
    law, demand = replace(POWER_LAW, compute_weight=0.0), np.asarray([0.8])

    def slowdown(left):
        limit = law.idle_share + left * (demand[0] - law.idle_share)
        return power_slowdown(demand, limit, np.asarray([0.5]), law)[0]

    knee = law.knee_share
    assert slowdown(0.8) == pytest.approx(0.8**-law.slowdown_exponent)
    assert slowdown(knee) == pytest.approx(knee**-law.slowdown_exponent)
    assert slowdown(knee / 2) == pytest.approx(2 * slowdown(knee))


def test_a_moderate_limit_saves_energy_as_the_source_of_the_constants_found():
    # You, Chung and Chowdhury (NSDI 2023): the most thrifty limit lies below the largest one for every job.
    limits = np.arange(100, 251, 25)
    energies = [
        float(p.value_w[0] * p.slowdown[0]) for limit in limits for p in [power(0.5, 0.7, float(limit))]
    ]
    assert energies[0] < energies[-1]


@pytest.mark.parametrize("limit", [0.0, -50.0, float("nan"), float("inf"), 400.0])
def test_limits_that_no_board_takes_are_refused(limit):
    with pytest.raises(InvalidSetupError, match="power limit"):
        check_power_limit_w(limit, V100)


def test_what_was_never_measured_has_no_power():
    assert device_power(find_device("cpu"), np.ones(1), np.ones(1)) is None
    assert device_power(replace(V100, power_limit_w=0.0), np.ones(1), np.ones(1)) is None
