"""Energy from the power limit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.hardware import find_device
from forerun.prediction.estimate import Interval
from forerun.prediction.power import TRAINING_SHARE, training_energy_j


def test_energy_is_power_share_and_time():
    device = find_device("v100-pcie-16gb")
    energy = training_energy_j(device, Interval(100.0, 100.0, 100.0))
    assert energy.value == pytest.approx(device.power_limit_w * TRAINING_SHARE.value * 100)
    # A time known exactly leaves the uncertainty of the power.
    assert energy.low == pytest.approx(device.power_limit_w * TRAINING_SHARE.low * 100)
    assert energy.high == pytest.approx(device.power_limit_w * TRAINING_SHARE.high * 100)


def test_an_uncertain_time_widens_the_interval():
    device = find_device("v100-pcie-16gb")
    narrow = training_energy_j(device, Interval(100.0, 95.0, 105.0))
    wide = training_energy_j(device, Interval(100.0, 50.0, 200.0))
    assert wide.low < narrow.low <= narrow.value == wide.value <= narrow.high < wide.high
    # Independent unknowns: less than both at their ends together, more than either alone.
    assert wide.high < device.power_limit_w * TRAINING_SHARE.high * 200
    assert wide.high > device.power_limit_w * TRAINING_SHARE.value * 200


def test_energy_is_never_negative():
    energy = training_energy_j(find_device("t4"), Interval(100.0, 1e-3, 1e5))
    assert energy.low == 0.0


def test_energy_grows_with_time():
    device = find_device("t4")
    short, long = (training_energy_j(device, Interval(1.0, 0.5, 2.0).scaled(n)) for n in (1, 10))
    assert long.value == pytest.approx(10 * short.value)
    assert long.high == pytest.approx(10 * short.high)


def test_no_energy_where_no_measurement_stands_behind_it():
    assert training_energy_j(find_device("cpu"), Interval(1.0, 1.0, 1.0)) is None
    unknown = replace(find_device("t4"), power_limit_w=0.0)
    assert training_energy_j(unknown, Interval(1.0, 1.0, 1.0)) is None
