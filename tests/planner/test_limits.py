"""Limits as they are written, and every way to write them wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import InvalidSetupError
from forerun.planner.limits import QUANTITIES, parse_limits
from forerun.units import GIB, UNITS


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        ("time<=2h", 7200.0),
        ("time <= 90 min", 5400.0),
        ("epoch<=30s", 30.0),
        ("cost<=$20", 20.0),
        ("cost<=20usd", 20.0),
        ("memory<=24GB", 24 * GIB),
        ("energy<=1.5kWh", 5.4e6),
        ("co2<=2kg", 2000.0),
        ("throughput>=1500", 1500.0),
        ("accuracy>=92%", 0.92),
        ("TIME≤1d", 86400.0),
    ],
)
def test_a_limit_is_read_in_the_unit_used_inside(text, bound):
    (limit,) = parse_limits(text)
    assert limit.bound == pytest.approx(bound)
    assert limit.text == text.replace(" ", "")
    assert limit.is_upper == ("<" in text or "≤" in text)


def test_limits_come_as_one_text_or_as_several():
    assert parse_limits("time<=2h, cost<=20") == parse_limits(["time<=2h", "cost<=20"])
    assert parse_limits("") == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time", "a limit is a quantity, <= or >=, and an amount"),
        ("time<2h", "a limit needs <= or >=, got '<'"),
        ("time=2h", "a limit needs <= or >=, got '='"),
        ("tme<=2h", "unknown quantity 'tme'; did you mean time"),
        ("time<=2", "the unit is missing"),
        ("time<=2 parsecs", "unknown unit 'parsecs'"),
        ("memory<=24s", "unknown unit 's'"),
        ("time<=soon", "expected a number with a unit"),
        ("cost<=-5", "an amount must be zero or more, got '-5'"),
        ("time<=0s", "an upper limit must be above zero"),
        ("accuracy>=95", "a share is at most 1 (or 100%)"),
        ("time<=1h, time<=2h", "time is limited twice: 'time<=1h' and 'time<=2h'"),
        ("time<=1h, time>=2h", "the limits contradict each other"),
        ("cost>=30, cost<=20", "the limits contradict each other"),
    ],
)
def test_a_limit_that_cannot_be_meant_is_refused_in_one_sentence(text, words):
    with pytest.raises(InvalidSetupError) as error:
        parse_limits(text)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_both_ends_of_one_quantity_are_no_contradiction():
    lower, upper = parse_limits("throughput>=100, throughput<=500")
    assert lower.bound < upper.bound


@given(
    name=st.sampled_from(sorted(QUANTITIES)),
    amount=st.floats(min_value=1e-3, max_value=1.0),
    is_upper=st.booleans(),
    data=st.data(),
)
def test_every_unit_of_every_quantity_is_read_back(name, amount, is_upper, data):
    units = UNITS[QUANTITIES[name].kind]
    unit = data.draw(st.sampled_from(sorted(units)))
    (limit,) = parse_limits(f"{name}{'<=' if is_upper else '>='}{amount!r}{unit}")
    assert limit.bound == pytest.approx(amount * units[unit])
    assert limit.is_upper is is_upper
