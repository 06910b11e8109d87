"""The price table, files of one's own, and the price of an hour of one's own hardware.

Amounts in other currencies than the dollar, at dated rates.
"""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import CatalogError, InvalidSetupError, UnknownDeviceError
from forerun.question.devices import find_device
from forerun.question.devices.device import PriceKind
from forerun.question.devices.prices import (
    OLD_PRICE_DAYS,
    amount_in_usd,
    cheapest_rental,
    find_currency,
    load_prices,
    owned_price_usd_per_hour,
    price_age_note,
    read_price_file,
    update_prices,
)
from forerun.search.search import parse_limits

ENTRY = """
[[price]]
provider = "Ours"
instance = "box"
device = "t4"
num_devices = 4
link = "none"
region = "basement"
usd_per_hour = { on-demand = 2.0, spot = 0.5 }
date = 2026-10-01
source = "a bill"
"""
OWNED = """
[[owned]]
device = "rtx-3090"
num_devices = 2
purchase_usd = 1500
years = 3
utilisation = 0.5
usd_per_kwh = 0.3
"""


def read(tmp_path, text):
    path = tmp_path / "prices.toml"
    path.write_text(text)
    return read_price_file(path)


def test_every_shipped_price_has_a_date_a_source_and_a_device_of_the_catalogue():
    prices = load_prices()
    assert len(prices) > 60
    for price in prices:
        assert find_device(price.device).name == price.device
        assert datetime.date(2025, 1, 1) <= price.date <= datetime.date.today()
        assert price.source
        assert 0.02 < price.usd_per_hour / price.num_devices < 20
        assert price.most_devices >= price.num_devices >= 1


def test_the_large_providers_are_all_there():
    assert {price.provider for price in load_prices()} >= {"aws", "google", "azure", "lambda", "runpod"}
    assert {price.kind for price in load_prices()} >= {
        PriceKind.ON_DEMAND,
        PriceKind.SPOT,
        PriceKind.RESERVED_1Y,
        PriceKind.RESERVED_3Y,
    }


@pytest.mark.parametrize(
    ("instance", "usd"),
    # Published list prices, us-east, Linux, on demand.
    [("g4dn.xlarge", 0.526), ("g5.xlarge", 1.006), ("g6.xlarge", 0.8048)],
)
def test_published_prices(instance, usd):
    (found,) = [p for p in load_prices() if p.instance == instance and p.kind is PriceKind.ON_DEMAND]
    assert found.usd_per_hour == pytest.approx(usd, rel=1e-3)


def test_spot_and_reserved_are_cheaper_than_on_demand():
    on_demand = {
        (p.provider, p.instance): p.usd_per_hour for p in load_prices() if p.kind is PriceKind.ON_DEMAND
    }
    others = [
        p for p in load_prices() if p.kind in (PriceKind.SPOT, PriceKind.RESERVED_1Y, PriceKind.RESERVED_3Y)
    ]
    assert others
    assert all(p.usd_per_hour < on_demand[p.provider, p.instance] * 1.001 for p in others)


def test_a_file_has_a_price_per_way_of_paying(tmp_path):
    on_demand, spot = read(tmp_path, ENTRY)
    assert (on_demand.kind, on_demand.usd_per_hour) == (PriceKind.ON_DEMAND, 2.0)
    assert (spot.kind, spot.usd_per_hour, spot.provider) == (PriceKind.SPOT, 0.5, "ours")


def test_whole_instances_are_paid(tmp_path):
    prices = read(tmp_path, ENTRY)
    one = cheapest_rental(prices, "t4", 1)
    five = cheapest_rental(prices, "t4", 5)
    assert (one.num_instances, one.usd_per_hour) == (1, 2.0)
    assert (five.num_instances, five.usd_per_hour) == (2, 4.0)
    assert cheapest_rental(prices, "t4", kinds=(PriceKind.SPOT,)).usd_per_hour == 0.5
    assert cheapest_rental(prices, "t4", providers=("aws",)) is None
    assert cheapest_rental(prices, "l4") is None


def test_devices_of_one_instance_go_before_a_lower_price(tmp_path):
    text = ENTRY + ENTRY.replace('"box"', '"small"').replace("num_devices = 4", "num_devices = 1").replace(
        "on-demand = 2.0", "on-demand = 0.4"
    )
    prices = read(tmp_path, text)
    assert cheapest_rental(prices, "t4", 1).price.instance == "small"
    assert cheapest_rental(prices, "t4", 4).price.instance == "box"


def test_owned_hardware_costs_its_purchase_over_its_hours_and_its_energy(tmp_path):
    (owned,) = read(tmp_path, OWNED)
    hourly = 1500 / (3 * 8766 * 0.5) + 0.350 * 0.3
    assert owned.usd_per_hour == pytest.approx(2 * hourly)
    assert owned.kind is PriceKind.OWNED


@given(
    purchase=st.floats(0, 1e6),
    years=st.floats(0.1, 20),
    share=st.floats(0.01, 1),
    power=st.floats(0, 2000),
    energy=st.floats(0, 2),
)
def test_laws_of_the_price_of_owned_hardware(purchase, years, share, power, energy):
    def hourly(**changes):
        figures = {
            "purchase_usd": purchase,
            "years": years,
            "utilisation": share,
            "power_w": power,
            "usd_per_kwh": energy,
        }
        return owned_price_usd_per_hour(**{**figures, **changes})

    assert hourly() >= hourly(purchase_usd=0.0) == pytest.approx(power / 1000 * energy)
    assert hourly(years=years * 2) <= hourly()
    assert hourly(utilisation=share / 2) >= hourly()
    hours = years * 8766 * share
    assert hourly(power_w=0.0) * hours == pytest.approx(purchase)


@pytest.mark.parametrize(
    "changes",
    [
        {"purchase_usd": -1.0},
        {"years": 0.0},
        {"utilisation": 0.0},
        {"utilisation": 1.5},
        {"usd_per_kwh": -0.1},
    ],
)
def test_figures_that_cannot_be_meant_are_refused(changes):
    figures = {"purchase_usd": 1.0, "years": 1.0, "utilisation": 1.0, "power_w": 1.0, "usd_per_kwh": 1.0}
    with pytest.raises(InvalidSetupError, match="must be"):
        owned_price_usd_per_hour(**{**figures, **changes})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"expected at least one \[\[price\]\] or \[\[owned\]\]"),
        ("[[price", "expected a TOML file"),
        (ENTRY.replace('source = "a bill"', ""), "'source' must be a text"),
        (ENTRY.replace("date = 2026-10-01", ""), "'date' must be the day the price was read"),
        (ENTRY.replace("2.0", "-2.0"), "'on-demand' must be a number, zero or more"),
        (ENTRY.replace("{ on-demand = 2.0, spot = 0.5 }", "2.0"), "'usd_per_hour' must be a table"),
        (ENTRY.replace("num_devices = 4", "num_devices = 0"), "must be a whole number above zero"),
        (ENTRY.replace("provider", "provder"), "unknown key 'provder'; did you mean provider"),
        (OWNED.replace("years = 3", "years = 0"), "years of use must be above zero"),
        (OWNED.replace("usd_per_kwh = 0.3", ""), "'usd_per_kwh' must be a number"),
    ],
)
def test_a_damaged_file_is_refused_with_the_place(tmp_path, text, words):
    with pytest.raises(CatalogError, match=words):
        read(tmp_path, text)


def test_an_entry_without_a_count_is_refused_as_such(tmp_path):
    with pytest.raises(CatalogError, match="'num_devices' must be a whole number above zero, got None"):
        read(tmp_path, ENTRY.replace("num_devices = 4\n", ""))


def test_an_unknown_device_and_a_missing_file_are_refused(tmp_path):
    with pytest.raises(UnknownDeviceError, match="t40"):
        read(tmp_path, ENTRY.replace('"t4"', '"t40"'))
    with pytest.raises(CatalogError, match="expected a readable price file"):
        read_price_file(tmp_path / "none.toml")


def test_old_prices_are_named(tmp_path):
    prices = read(tmp_path, ENTRY)
    fresh = datetime.date(2026, 10, 1) + datetime.timedelta(days=OLD_PRICE_DAYS)
    assert price_age_note(prices, fresh) is None
    note = price_age_note(prices, fresh + datetime.timedelta(days=1))
    assert "ours box (2026-10-01)" in note


def test_a_community_offer_comes_after_every_other():
    found = cheapest_rental(load_prices(), "rtx-4090")
    assert found is not None
    assert not found.price.is_community
    offers = [price for price in load_prices() if price.device == "rtx-4090" and price.is_community]
    assert min(price.usd_per_hour for price in offers) < found.usd_per_hour
    assert cheapest_rental(offers, "rtx-4090") is not None


def test_updated_prices_replace_those_of_the_same_instances(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    newer = tmp_path / "newer.toml"
    newer.write_text(
        '[[price]]\nprovider = "runpod"\ninstance = "secure RTX 4090"\ndevice = "rtx-4090"\nnum_devices = 1\n'
        'link = "none"\nregion = "any"\nusd_per_hour = { on-demand = 0.5 }\ndate = 2026-11-20\nsource = "a page"\n'
    )
    num_before = len(load_prices())
    try:
        update_prices(str(newer))
        assert len(load_prices()) == num_before
        assert cheapest_rental(load_prices(), "rtx-4090").usd_per_hour == 0.5
        with pytest.raises(CatalogError, match=r"or an https address, got 'http://none': No such file"):
            update_prices("http://none")
        newer.write_text("[[price]]\nprovider = 3\n")
        with pytest.raises(CatalogError, match=r"newer\.toml"):
            update_prices(str(newer))
        assert cheapest_rental(load_prices(), "rtx-4090").usd_per_hour == 0.5
    finally:
        load_prices.cache_clear()


def test_a_rate_has_its_day_and_its_source_and_goes_through_the_euro():
    euro, pound = find_currency("eur"), find_currency("£")
    assert euro.usd == 1.0411
    assert pound.usd == pytest.approx(1.0411 / 0.82608)
    assert "European Central Bank" in euro.words
    assert "2025-02-28" in euro.words
    assert find_currency("usd").format(4.2) == "$4.20"


def test_a_rate_of_the_user_goes_before_the_catalogue():
    assert find_currency("eur=2").format(100) == "€50.00"
    with pytest.raises(InvalidSetupError, match="unknown currency 'eru'"):
        find_currency("eru")


@pytest.mark.parametrize("text", ["50eur", "50 EUR", "€50", "eur 50"])
def test_an_amount_with_a_currency_becomes_one_of_dollars(text):
    assert float(amount_in_usd(text)) == pytest.approx(52.055)


@pytest.mark.parametrize("text", ["20", "$20", "20usd", "20 kWh", "-5eur", "1.2.3eur", "x"])
def test_any_other_text_stays_as_it_is(text):
    assert amount_in_usd(text) == text


def test_a_limit_on_cost_may_be_in_another_currency():
    (limit,) = parse_limits("cost<=50eur")
    assert limit.bound == pytest.approx(52.055)
    assert limit.text == "cost<=50eur"
    with pytest.raises(InvalidSetupError, match="unknown unit"):
        parse_limits("memory<=50eur")
