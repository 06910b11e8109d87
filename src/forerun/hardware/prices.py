"""What devices cost: instances of clouds at dated prices, hardware of one's own, and the cheapest way to a device.

A price is that of a whole instance, since a cloud sells no half instance: one device of an eight-device instance
costs the instance. Prices leave out tax, discounts, disks and network traffic.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from forerun.errors import InvalidSetupError

__all__ = [
    "OLD_PRICE_DAYS",
    "InstancePrice",
    "PriceKind",
    "Rental",
    "cheapest_rental",
    "owned_price_usd_per_hour",
    "price_age_note",
]

_HOURS_PER_YEAR = 365.25 * 24

OLD_PRICE_DAYS = 183
"""Prices of GPU instances moved by 40 % within half a year more than once (AWS in June 2025, for one)."""


class PriceKind(StrEnum):
    """How an instance is paid for; ``OWNED`` is one's own hardware."""

    ON_DEMAND = "on-demand"
    SPOT = "spot"
    RESERVED_1Y = "reserved-1y"
    RESERVED_3Y = "reserved-3y"
    OWNED = "owned"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstancePrice:
    """Price of one instance under one way of paying.

    Attributes:
        provider: aws, google, azure, lambda, runpod, or what a user's file says.
        instance: The provider's name of the instance.
        device: Catalogue name of its devices.
        num_devices: Devices of the instance that the price is for.
        most_devices: Devices it can be had with at the same price each.
        link: What joins them, such as ``NVSwitch``; ``none`` for one device.
        region: Class of region, such as ``us-east``; ``any`` where the price is the same everywhere.
        kind: Way of paying.
        usd_per_hour: Price of the whole instance [USD/h].
        date: Day the price was read.
        source: Where.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rental:
    """The instances that give a number of devices.

    Attributes:
        price: The instance and its price.
        num_instances: Instances needed.
        usd_per_hour: Price of all of them [USD/h].
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
    """The fewest and then cheapest instances with at least ``num_devices`` of a device; None if nobody sells it.

    price = ceil(devices wanted / devices of the price) * price of the instance

    Fewest first, because devices of one instance share its fast links.
    """
    found = [
        Rental(
            price=price,
            num_instances=math.ceil(num_devices / price.most_devices),
            usd_per_hour=math.ceil(num_devices / price.num_devices) * price.usd_per_hour,
        )
        for price in prices
        if price.device == device and price.kind in kinds and (not providers or price.provider in providers)
    ]
    return min(found, key=lambda rental: (rental.num_instances, rental.usd_per_hour), default=None)


def owned_price_usd_per_hour(
    *,
    purchase_usd: float,
    years: float,
    utilisation: float,
    power_w: float,
    usd_per_kwh: float,
) -> float:
    """Price of an hour of use of one's own device [USD/h].

    price = purchase / (years * 8766 h * utilisation) + power * price of energy

    Space, staff, cooling and the rest of the host are in the price of purchase if the user puts them there.

    Args:
        purchase_usd: Price of purchase [USD].
        years: Years of use.
        utilisation: Share of these years in which the device works, above 0 and up to 1.
        power_w: Power while it works [W].
        usd_per_kwh: Price of energy [USD/kWh].

    Raises:
        InvalidSetupError: A figure cannot be meant.
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
