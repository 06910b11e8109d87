"""Prices of devices: dated prices of cloud instances, owned hardware, the files that say them, and the cheapest rental.

A price is for a whole instance, since a cloud sells no half instance: one device of an eight-device instance
costs the instance. Prices leave out tax, discounts, disks and network traffic.
All prices of the catalogue are in US dollars; other currencies have dated rates.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from forerun.base.errors import CatalogError, ForerunError, InvalidSetupError, near_matches
from forerun.base.kept import whole_file
from forerun.base.tables import checked_table, own_table, read_toml
from forerun.question.devices.catalogue import find_device
from forerun.question.devices.device import PriceKind

_HOURS_PER_YEAR = 365.25 * 24

OLD_PRICE_DAYS = 90
"""Age at which a price is reported as old [days].

Prices of GPU instances moved by 40 % within half a year more than once, for example at AWS in June 2025."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePrice:
    """Price of one instance for one way of paying.

    Attributes:
        provider: aws, google, azure, lambda, runpod, or the name in a user's file.
        instance: The provider's name of the instance.
        device: Catalogue name of the instance's devices.
        num_devices: Number of devices of the instance.
        most_devices: Largest number of devices the instance is sold with at the same price per device.
        link: Link between the devices, such as ``NVSwitch``; ``none`` for one device.
        region: Class of region, such as ``us-east``; ``any`` if the price is the same everywhere.
        kind: Way of paying.
        usd_per_hour: Price of the whole instance [USD/h].
        date: Day on which the price was read.
        source: Page from which the price was read.
    """

    provider: str
    instance: str
    device: str
    num_devices: int
    most_devices: int
    link: str
    region: str
    kind: PriceKind
    usd_per_hour: float
    date: datetime.date
    source: str

    @property
    def is_community(self) -> bool:
        """True for a machine of a private person that a provider passes on, without its guarantees."""
        return self.instance.lower().startswith("community")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The instances that give a number of devices.

    Attributes:
        price: The instance and its price.
        num_instances: Number of instances needed.
        usd_per_hour: Price of all these instances [USD/h].
    """

    price: InstancePrice
    num_instances: int
    usd_per_hour: float


def cheapest_rental(
    prices: Iterable[InstancePrice],
    device: str,
    num_devices: int = 1,
    *,
    kinds: Sequence[PriceKind] = (PriceKind.ON_DEMAND, PriceKind.OWNED),
    providers: Sequence[str] = (),
) -> Rental | None:
    """Fewest, then cheapest instances with at least ``num_devices`` of a device; None if nobody sells it.

    Offers of a community market are taken only where no provider sells the device itself.

    price = ceil(devices wanted / devices of the price) * price of the instance

    The fewest instances come first, because devices of one instance share its fast links.
    """
    found = [
        Rental(
            price=price,
            num_instances=math.ceil(num_devices / price.most_devices),
            # Instances are rented whole: the unused part of the last one is paid for, too.
            usd_per_hour=math.ceil(num_devices / price.num_devices) * price.usd_per_hour,
        )
        for price in prices
        if price.device == device and price.kind in kinds and (not providers or price.provider in providers)
    ]
    rank = attrgetter("num_instances", "price.is_community", "usd_per_hour")
    return min(found, key=rank, default=None)


def known_rental(device: str, num_devices: int) -> Rental | None:
    """The cheapest rental on demand in the table of prices; None if nobody sells the device."""
    kept = updated_prices_path()
    return _known_rental(device, num_devices, kept.stat().st_mtime_ns if kept.exists() else 0)


@cache
def _known_rental(device: str, num_devices: int, updated: int) -> Rental | None:
    # The time of the user's own table is in the key: a server notices new prices.
    return cheapest_rental(load_prices(), device, num_devices, kinds=(PriceKind.ON_DEMAND,))


def owned_price_usd_per_hour(
    *,
    purchase_usd: float,
    years: float,
    utilisation: float,
    power_w: float,
    usd_per_kwh: float,
) -> float:
    """Price of one hour of use of an owned device [USD/h].

    price = purchase / (years * 8766 h * utilisation) + power * price of energy

    Space, staff, cooling and the rest of the host count only if the user adds them to the purchase price.

    Args:
        purchase_usd: Purchase price [USD].
        years: Years of use.
        utilisation: Share of these years in which the device is in use, above 0 and up to 1.
        power_w: Power of the device while it is in use [W].
        usd_per_kwh: Price of energy [USD/kWh].

    Raises:
        InvalidSetupError: A figure is negative, not finite or out of its range.
    """
    for name, value in {
        "purchase price": purchase_usd,
        "power": power_w,
        "price of energy": usd_per_kwh,
    }.items():
        if not 0 <= value < math.inf:
            raise InvalidSetupError(f"{name} must be zero or more and finite, got {value}")
    if not 0 < years < math.inf:
        raise InvalidSetupError(f"years of use must be above zero and finite, got {years}")
    if not 0 < utilisation <= 1:
        raise InvalidSetupError(f"utilisation must be above 0 and at most 1, got {utilisation}")
    return purchase_usd / (years * _HOURS_PER_YEAR * utilisation) + power_w / 1000 * usd_per_kwh


def price_age_note(prices: Iterable[InstancePrice], today: datetime.date) -> str | None:
    """A warning that names the prices older than ``OLD_PRICE_DAYS``; None if there are none."""
    oldest: Mapping[str, datetime.date] = {
        f"{price.provider} {price.instance}": price.date
        for price in prices
        if price.kind is not PriceKind.OWNED and (today - price.date).days > OLD_PRICE_DAYS
    }
    if not oldest:
        return None
    names = ", ".join(f"{name} ({date})" for name, date in sorted(oldest.items()))
    return f"prices older than {OLD_PRICE_DAYS} days: {names}; check them, or give your own with --price or --prices"


_PRICE_FOLDER = Path(__file__).parent / "catalog" / "prices"
_FETCH_TIMEOUT_S = 30.0
_MOST_BYTES = 5_000_000


def read_price_file(path: Path) -> tuple[InstancePrice, ...]:
    """All prices of a TOML file with tables ``[[price]]`` and ``[[owned]]``.

    Raises:
        CatalogError: The file cannot be read, or an entry lacks a figure, its date or its source.
        UnknownDeviceError: A device is not in the catalogue.
    """
    document = read_toml(path, "price")
    unknown = sorted(set(document) - {"price", "owned"})
    if unknown:
        raise CatalogError(f"{path}: unknown key '{unknown[0]}'; expected [[price]] and [[owned]] tables")
    rented = [price for table in _tables(document, "price", path) for price in _rented(table, path)]
    owned = [_owned(table, path) for table in _tables(document, "owned", path)]
    if not rented and not owned:
        raise CatalogError(f"{path}: expected at least one [[price]] or [[owned]] table, got none")
    return (*rented, *owned)


@cache
def load_prices() -> tuple[InstancePrice, ...]:
    """Prices of all providers: those shipped with the package, and newer ones that ``update_prices`` kept.

    Raises:
        CatalogError: A file is damaged or missing.
    """
    shipped = [price for path in sorted(_PRICE_FOLDER.glob("*.toml")) for price in read_price_file(path)]
    kept = updated_prices_path()
    newer = read_price_file(kept) if kept.exists() else ()
    replaced = {_sold(price) for price in newer}
    return (*newer, *(price for price in shipped if _sold(price) not in replaced))


def _sold(price: InstancePrice) -> tuple[str, ...]:
    return price.provider, price.instance, price.device, price.region, price.kind


def updated_prices_path() -> Path:
    """The file of prices that this user updated."""
    from platformdirs import user_data_path

    return user_data_path("forerun") / "prices.toml"


def update_prices(source: str) -> tuple[InstancePrice, ...]:
    """Takes newer prices from a file or an https address; they replace those of the same instances from now on.

    Args:
        source: A TOML file of tables ``[[price]]``, each with its date and its source.

    Raises:
        CatalogError: The file cannot be read or fetched, or an entry lacks a figure, its date or its source.
        UnknownDeviceError: A device is not in the catalogue.
    """
    content = _fetched(source) if source.startswith("https://") else _read(source)
    path = updated_prices_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        partial.write_bytes(content)
        try:
            # Read before it takes the place of the old one: a damaged file would stop every later question of prices.
            found = read_price_file(partial)
        except CatalogError as error:
            raise CatalogError(str(error).replace(str(partial), source)) from error
    load_prices.cache_clear()
    return found


def _fetched(address: str) -> bytes:
    import urllib.request  # brings HTTP and TLS along, which no other question needs

    try:
        with urllib.request.urlopen(address, timeout=_FETCH_TIMEOUT_S) as response:
            found: bytes = response.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise CatalogError(
            f"the prices at {address} cannot be fetched: {error}; check the address"
        ) from error
    if len(found) > _MOST_BYTES:
        raise CatalogError(f"expected prices of at most {_MOST_BYTES:,} bytes at {address}, got more")
    return found


def _read(source: str) -> bytes:
    try:
        return Path(source).expanduser().read_bytes()
    except OSError as error:
        raise CatalogError(
            f"expected a file of prices or an https address, got '{source}': {error.strerror}"
        ) from error


def _tables(document: Mapping[str, Any], key: str, path: Path) -> list[Mapping[str, Any]]:
    tables = document.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise CatalogError(f"{path}: '{key}' must be tables, written [[{key}]]")
    return tables


def _rented(table: Mapping[str, Any], path: Path) -> Iterable[InstancePrice]:
    from forerun.question.devices.rows import PriceRow

    where = f"{path}, instance '{table.get('instance', '?')}'"
    row = checked_table(table, PriceRow, where)
    prices = row.usd_per_hour.model_dump(exclude_none=True)
    if not prices:
        raise CatalogError(f"{where}: 'usd_per_hour' must be a table such as {{ on-demand = 1.2 }}, got none")
    for kind, price in prices.items():
        yield InstancePrice(
            provider=row.provider.lower(),
            instance=row.instance,
            device=find_device(row.device).name,
            num_devices=row.num_devices,
            most_devices=row.most_devices or row.num_devices,
            link=row.link,
            region=row.region,
            kind=PriceKind(kind),
            usd_per_hour=price,
            date=row.date,
            source=row.source,
        )


def _owned(table: Mapping[str, Any], path: Path) -> InstancePrice:
    from forerun.question.devices.rows import OwnedRow

    where = f"{path}, owned device '{table.get('device', '?')}'"
    row = checked_table(table, OwnedRow, where)
    device, count = find_device(row.device), row.num_devices
    try:
        hourly_usd = owned_price_usd_per_hour(
            purchase_usd=row.purchase_usd,
            years=row.years,
            utilisation=row.utilisation,
            power_w=device.power_limit_w if row.power_w is None else row.power_w,
            usd_per_kwh=row.usd_per_kwh,
        )
    except ForerunError as error:
        raise CatalogError(f"{where}: {error}") from error
    return InstancePrice(
        provider="own",
        instance=f"{count} x {device.name}",
        device=device.name,
        num_devices=count,
        most_devices=count,
        link="none",
        region="any",
        kind=PriceKind.OWNED,
        usd_per_hour=count * hourly_usd,
        date=datetime.date.today(),
        source=f"{path.name}: purchase, years of use and energy",
    )


_PRICE = re.compile(r"\$?\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:\$|usd)?\s*(?:/\s*(?:h|hr|hour))?", re.IGNORECASE)


def parse_price_usd_per_hour(text: str) -> float:
    """Price of a device per hour [USD/h].

    >>> parse_price_usd_per_hour("1.89/h")
    1.89

    Raises:
        InvalidSetupError: The text is not a price per hour.
    """
    amount, slash, hour = text.partition("/")
    found = _PRICE.fullmatch(amount_in_usd(amount.strip()) + slash + hour.strip())
    if found is None:
        raise InvalidSetupError(
            "a price must be an amount per hour, zero or more, such as 1.89/h in US dollars or 1.75eur/h, got "
            f"'{text.strip()}'"
        )
    return float(found[1])


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
        if amount >= 1 or amount == 0:
            return f"{self.sign}{amount:.2f}"
        # Three digits without an exponent, which the smallest amounts have otherwise.
        return f"{self.sign}{amount:.{2 - math.floor(math.log10(amount))}f}"

    def format_price(self, price_usd: float) -> str:
        """A price of dollars to the hundredth: '$0.50'."""
        return f"{self.sign}{price_usd / self.usd:.2f}"


DOLLAR = Currency(code="USD", usd=1.0, source="")


@cache
def currencies() -> dict[str, Currency]:
    """The currencies of the catalogue by code, through the euro, for which the rates are published."""
    file = own_table(__file__, "currencies.toml")
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
    if code not in currencies():
        raise InvalidSetupError(
            f"unknown currency '{word}'{near_matches(code, currencies())}; expected one of "
            f"{', '.join(currencies()).lower()}, or a rate of your own, such as eur=1.08 (dollars)"
        )
    return currencies()[code]


def amount_in_usd(text: str) -> str:
    """An amount with a currency of the catalogue as one of US dollars; any other text as it is.

    >>> amount_in_usd("20 usd"), amount_in_usd("$20"), amount_in_usd("50eur")
    ('20 usd', '$20', '52.055')
    """
    found = _AMOUNT.fullmatch(text.strip())
    word = (found[1] or found[3] or "").upper() if found else ""
    code = _SIGNS.get(word, word)
    if found is None or code in ("", "USD") or code not in currencies():
        return text
    return f"{float(found[2].replace('_', '')) * currencies()[code].usd:.10g}"
