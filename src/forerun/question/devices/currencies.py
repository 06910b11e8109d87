"""Currencies other than the US dollar, in which all prices of the catalogue are: dated rates, amounts and words."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.base.errors import InvalidSetupError, near_matches

__all__ = ["Currency", "amount_in_usd", "find_currency"]

_SIGNS = {"€": "EUR", "£": "GBP", "¥": "JPY", "$": "USD"}
_OWN_RATE = re.compile(r"([a-z]{3})\s*=\s*(\d+(?:\.\d+)?(?:e-?\d+)?)", re.IGNORECASE)
_AMOUNT = re.compile(r"([€£¥]|[a-z]{3})?\s*(\d[\d_]*(?:\.\d*)?)\s*([€£¥]|[a-z]{3})?", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Currency:
    """A currency with its rate.

    Attributes:
        code: Its code of three letters, such as EUR.
        usd: Price of one unit [USD].
        source: Where the rate is from, and its day.
    """

    code: str
    usd: float
    source: str

    @property
    def words(self) -> str:
        """The rate as a sentence for a page."""
        return f"amounts in {self.code}: 1 {self.code} = {self.usd:.5g} USD ({self.source})"

    @property
    def sign(self) -> str:
        """Sign before an amount: "€", or the code and a space."""
        return next((sign for sign, code in _SIGNS.items() if code == self.code), f"{self.code} ")

    def format(self, amount_usd: float) -> str:
        """An amount of US dollars in this currency: '€46.20', 'CHF 1,234'."""
        amount = amount_usd / self.usd
        if amount >= 1000:
            return f"{self.sign}{amount:,.0f}"
        return f"{self.sign}{amount:.2f}" if amount >= 1 or amount == 0 else f"{self.sign}{amount:.3g}"

    def format_price(self, price_usd: float) -> str:
        """A price of dollars to the hundredth: '$0.50'."""
        return f"{self.sign}{price_usd / self.usd:.2f}"


@cache
def _rates() -> dict[str, Currency]:
    """The currencies of the catalogue by code, through the euro, for which the rates are published."""
    file = tomllib.loads(Path(__file__).with_name("currencies.toml").read_text(encoding="utf-8"))
    per_euro, source = file["per_euro"], f"{file['source']} of {file['date']}"
    return {
        code: Currency(code=code, usd=per_euro["USD"] / units, source=source)
        for code, units in per_euro.items()
    }


def find_currency(word: str) -> Currency:
    """A currency by its code or sign, or with a rate of the user's, ``eur=1.08`` dollars.

    >>> find_currency("eur=1.08").format(108)
    '€100.00'

    Raises:
        InvalidSetupError: The currency is not in the catalogue.
    """
    own = _OWN_RATE.fullmatch(word.strip())
    if own is not None and float(own[2]) > 0:
        return Currency(code=own[1].upper(), usd=float(own[2]), source="the rate that was given")
    code = _SIGNS.get(word.strip(), word.strip().upper())
    if code not in _rates():
        raise InvalidSetupError(
            f"unknown currency '{word}'{near_matches(code, _rates())}; expected one of "
            f"{', '.join(_rates()).lower()}, or a rate of your own, such as eur=1.08 (dollars)"
        )
    return _rates()[code]


def amount_in_usd(text: str) -> str:
    """An amount with a currency of the catalogue as one of US dollars; any other text as it is.

    >>> amount_in_usd("20 usd"), amount_in_usd("$20"), amount_in_usd("50eur")
    ('20 usd', '$20', '52.055')
    """
    found = _AMOUNT.fullmatch(text.strip())
    word = (found[1] or found[3] or "").upper() if found else ""
    code = _SIGNS.get(word, word)
    if found is None or code in ("", "USD") or code not in _rates():
        return text
    return f"{float(found[2].replace('_', '')) * _rates()[code].usd:.10g}"
