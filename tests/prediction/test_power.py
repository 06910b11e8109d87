"""Energy of a duration from the power at an activity."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.cost.time.power import device_power
from forerun.prediction.estimate import Interval
from forerun.prediction.estimate_run import training_energy_j
from forerun.question.devices import find_device

ACTIVITY, COMPUTE_FRACTION = 0.4, 0.6


def energy_j(device, duration_s):
    return training_energy_j(device, duration_s, ACTIVITY, COMPUTE_FRACTION)


def power_of(device):
    return device_power(device, np.asarray([ACTIVITY]), np.asarray([COMPUTE_FRACTION]))


def test_energy_is_power_times_time():
    device = find_device("v100-pcie-16gb")
    energy, power = energy_j(device, Interval(100.0, 100.0, 100.0)), power_of(device)
    assert energy.value == pytest.approx(power.value_w[0] * 100)
    # A time known exactly leaves the uncertainty of the power.
    assert energy.low == pytest.approx(power.low_w[0] * 100)
    assert energy.high == pytest.approx(power.high_w[0] * 100)
    assert energy.high <= device.power_limit_w * 100 * (1 + 1e-9)


def test_an_uncertain_time_widens_the_interval():
    device = find_device("v100-pcie-16gb")
    narrow = energy_j(device, Interval(100.0, 95.0, 105.0))
    wide = energy_j(device, Interval(100.0, 50.0, 200.0))
    assert wide.low < narrow.low <= narrow.value == wide.value <= narrow.high < wide.high
    # Independent unknowns: less than both at their ends together, more than either alone.
    power = power_of(device)
    assert power.value_w[0] * 200 < wide.high < power.high_w[0] * 200


def test_energy_is_never_negative():
    assert energy_j(find_device("t4"), Interval(100.0, 1e-3, 1e5)).low == 0.0


def test_energy_grows_with_time():
    device = find_device("t4")
    short, long = (energy_j(device, Interval(1.0, 0.5, 2.0).scaled(n)) for n in (1, 10))
    assert long.value == pytest.approx(10 * short.value)
    assert long.high == pytest.approx(10 * short.high)


def test_a_busier_device_takes_more_power():
    device, second = find_device("t4"), Interval(1.0, 1.0, 1.0)
    watts = [
        training_energy_j(device, second, activity, COMPUTE_FRACTION).value
        for activity in (0.0, 0.1, 0.3, 0.9)
    ]
    assert watts == sorted(watts)
    assert watts[0] < watts[-1] <= device.power_limit_w


def test_no_energy_where_no_measurement_stands_behind_it():
    assert energy_j(find_device("cpu"), Interval(1.0, 1.0, 1.0)) is None
    unknown = replace(find_device("t4"), power_limit_w=0.0)
    assert energy_j(unknown, Interval(1.0, 1.0, 1.0)) is None
