"""Devices of a plan: names with counts, and what an hour of each costs."""

from __future__ import annotations

import datetime

import pytest

from forerun.base.errors import InvalidSetupError, UnknownDeviceError
from forerun.question.devices.device import PriceKind
from forerun.question.devices.prices import InstancePrice
from forerun.search.devices import parse_devices, parse_prices, with_prices


def price(device="t4", usd_per_hour=0.5, **changes):
    options = {
        "provider": "aws",
        "instance": "one",
        "num_devices": 1,
        "most_devices": 1,
        "link": "none",
        "region": "any",
        "kind": PriceKind.ON_DEMAND,
        "date": datetime.date(2026, 10, 1),
        "source": "a test",
    }
    return InstancePrice(device=device, usd_per_hour=usd_per_hour, **{**options, **changes})


def hourly(options, table, given=None, **choice):
    priced = with_prices(options, table, given, **{"kinds": (PriceKind.ON_DEMAND,), **choice})
    return [option.usd_per_hour for option in priced]


def test_counts_stand_behind_an_x():
    options = parse_devices("l4,t4x4, t4 x 2,NVIDIA A100-SXM4-40GB*8")
    assert [(o.device.name, o.num_devices) for o in options] == [
        ("l4", 1),
        ("t4", 4),
        ("t4", 2),
        ("a100-sxm4-40gb", 8),
    ]
    assert [o.label for o in options[:2]] == ["l4", "t4 x4"]


def test_a_name_for_several_devices_stands_for_all_of_them():
    names = {option.device.name for option in parse_devices("a100-80gb")}
    assert {"a100-sxm4-80gb", "a100-pcie-80gb"} <= names


def test_the_same_device_twice_is_one_candidate():
    assert len(parse_devices("t4,t4x1,t4")) == 1


@pytest.mark.parametrize("text", ["", " , "])
def test_an_empty_list_is_refused(text):
    with pytest.raises(InvalidSetupError, match="expected at least one device"):
        parse_devices(text)


def test_no_device_at_all_and_unknown_devices_are_refused():
    with pytest.raises(InvalidSetupError, match="a number of devices must be at least 1, got 't4x0'"):
        parse_devices("t4x0")
    with pytest.raises(UnknownDeviceError, match="a100-sxm4"):
        parse_devices("a100-sxm9-40gb")


@pytest.mark.parametrize(
    ("text", "usd"), [("1.89/h", 1.89), ("$2", 2.0), ("0.5 usd/hour", 0.5), (".35", 0.35), ("0", 0.0)]
)
def test_one_price_for_all(text, usd):
    assert parse_prices(text) == usd


def test_a_price_for_each():
    assert parse_prices("t4=0.35/h, l4=0.80/h") == {"t4": 0.35, "l4": 0.8}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("-1/h", "a price must be an amount per hour, zero or more"),
        ("1.89 XYZ/h", "such as 1.89/h in US dollars"),
        ("1.89/month", "must be an amount per hour"),
        ("t4=0.35/h,0.80/h", "prices of several devices are written t4=0.35/h,l4=0.80/h"),
    ],
)
def test_other_prices_are_refused(text, words):
    with pytest.raises(InvalidSetupError) as error:
        parse_prices(text)
    assert words in str(error.value)


def test_a_given_price_goes_before_the_table_and_counts_devices():
    options = parse_devices("t4x4,l4")
    table = [price(), price("l4", 0.8)]
    assert hourly(options, table) == [2.0, 0.8]
    assert hourly(options, table, 1.0) == [4.0, 1.0]
    assert hourly(options, table, {"t4": 0.25}) == [1.0, 0.8]
    assert hourly(options, []) == [None, None]


@pytest.mark.parametrize("given", [-0.1, float("nan"), float("inf")])
def test_a_negative_price_is_refused(given):
    with pytest.raises(InvalidSetupError, match="a price must be zero or more"):
        hourly(parse_devices("t4"), [], given)


def test_providers_and_ways_of_paying_choose_from_the_table():
    table = [
        price(usd_per_hour=0.5),
        price(usd_per_hour=0.2, kind=PriceKind.SPOT),
        price(usd_per_hour=0.4, provider="lambda"),
    ]
    options = parse_devices("t4")
    assert hourly(options, table) == [0.4]
    assert hourly(options, table, kinds=(PriceKind.ON_DEMAND, PriceKind.SPOT)) == [0.2]
    assert hourly(options, table, providers=("aws",)) == [0.5]
