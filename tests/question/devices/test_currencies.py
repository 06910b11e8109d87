"""Amounts in other currencies than the dollar, at dated rates."""

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.question.devices.currencies import amount_in_usd, find_currency
from forerun.search.search import parse_limits


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
