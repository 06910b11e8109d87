"""The devices of a plan: catalogue names, numbers of devices, and prices per hour."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.base.errors import InvalidSetupError
from forerun.question.devices.catalogue import find_device, load_catalog, matching_devices
from forerun.question.devices.cluster import Cluster, check_num_devices, cluster_of, parse_cluster, split_spec
from forerun.question.devices.device import Device, PriceKind
from forerun.question.devices.prices import (
    InstancePrice,
    Rental,
    cheapest_rental,
    load_prices,
    parse_price_usd_per_hour,
    price_age_note,
    read_price_file,
)
from forerun.question.setup import choice
from forerun.search.search import split_list, words_of

_MOST_NAMED = 12
"""Devices without a price that a note names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOption:
    """Devices that a plan may use.

    Attributes:
        cluster: The devices.
        name: Name of one device in the question; ``here`` takes this machine's calibration.
        usd_per_hour: Price of all devices [USD/h], None if no price is known.
        rental: The instances behind the price, None for a price that was given.
    """

    cluster: Cluster
    name: str
    usd_per_hour: float | None = None
    rental: Rental | None = None

    @property
    def device(self) -> Device:
        """One of the devices."""
        return self.cluster.device

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.cluster.num_devices

    @property
    def label(self) -> str:
        """Name of the option in tables: ``t4``, ``t4 x4`` or, on several nodes, ``2x4xt4``."""
        if self.cluster.num_nodes > 1:
            return self.cluster.spec
        return self.device.name if self.num_devices == 1 else f"{self.device.name} x{self.num_devices}"


def parse_devices(
    text: str, *, intra: str | None = None, inter: str | None = None
) -> tuple[DeviceOption, ...]:
    """Devices of a list, several as ``4xt4`` or, on nodes, ``2x4xt4``: ``l4,4xt4``.

    A name that fits several devices, such as ``a100-80gb``, stands for all of them.

    Args:
        text: The list, separated by commas.
        intra: Link inside a node, for options of several devices.
        inter: Link between nodes, for options of several nodes.

    Raises:
        InvalidSetupError: The list is empty or a number is zero.
        UnknownDeviceError: A name fits no device.
    """
    options = [option for word in split_list(text, "device") for option in _options(word, intra, inter)]
    # Reversed, so that of several options with one cluster the one named first stays.
    distinct = {option.cluster.spec: option for option in reversed(options)}
    return tuple(reversed(distinct.values()))


def _options(word: str, intra: str | None, inter: str | None) -> Sequence[DeviceOption]:
    if word.lower().endswith(".toml"):
        return [DeviceOption(cluster=parse_cluster(word, intra=intra, inter=inter), name=word)]
    nodes, devices, name = split_spec(word)
    if nodes < 1 or devices < 1:
        raise InvalidSetupError(f"a number of devices must be at least 1, got '{word}'")
    check_num_devices(nodes * devices)
    found = matching_devices(name) or (find_device(name),)
    return [
        DeviceOption(
            cluster=cluster_of(
                device,
                nodes,
                devices,
                intra=intra if nodes * devices > 1 else None,
                inter=inter if nodes > 1 else None,
            ),
            name=name,
        )
        for device in found
    ]


def parse_prices(text: str) -> float | dict[str, float]:
    """A price for every device, ``1.89/h``, or one for each, ``t4=0.35/h,l4=0.80/h`` [USD/h of one device].

    Raises:
        InvalidSetupError: The text is not a price, or the price is below zero.
        UnknownDeviceError: A name fits no device.
    """
    if "=" not in text:
        return parse_price_usd_per_hour(text)
    prices = {}
    for part in split_list(text, "price"):
        name, equals, amount = part.partition("=")
        if not equals:
            raise InvalidSetupError(
                f"prices of several devices are written t4=0.35/h,l4=0.80/h, got '{part}'"
            )
        for device in matching_devices(name.strip()) or (find_device(name.strip()),):
            prices[device.name] = parse_price_usd_per_hour(amount)
    return prices


def with_prices(
    options: Sequence[DeviceOption],
    prices: Sequence[InstancePrice],
    given: float | Mapping[str, float] | None,
    *,
    kinds: Sequence[PriceKind],
    providers: Sequence[str] = (),
) -> tuple[DeviceOption, ...]:
    """The options with their prices per hour: the given price, or else the cheapest in the table.

    Args:
        options: Devices.
        prices: Table of prices.
        given: Price of one device [USD/h], for all or by catalogue name; it replaces the table.
        kinds: Ways of paying to choose from.
        providers: Providers to choose from, all if empty.

    Raises:
        InvalidSetupError: A given price is negative or not finite.
    """

    def priced(option: DeviceOption) -> DeviceOption:
        own = given.get(option.device.name) if isinstance(given, Mapping) else given
        if own is not None:
            if not 0 <= own < math.inf:
                raise InvalidSetupError(f"a price must be zero or more US dollars per hour, got {own}")
            return replace(option, usd_per_hour=own * option.num_devices, rental=None)
        rental = cheapest_rental(
            prices, option.device.name, option.num_devices, kinds=kinds, providers=providers
        )
        hourly_usd = None if rental is None else rental.usd_per_hour
        return replace(option, usd_per_hour=hourly_usd, rental=rental)

    return tuple(map(priced, options))


def priced_options(names: str, given: Mapping[str, Any]) -> tuple[DeviceOption, ...]:
    """The devices of a plan with their prices.

    Args:
        names: Devices, separated by commas; ``all`` is every GPU, ``priced`` every device with a price.
        given: Options of the plan.

    Raises:
        InvalidSetupError: A name, a way of paying or a price cannot be read.
    """
    prices = _prices(given.get("prices_file"))
    choices = parse_devices(_spelled_out(names, prices), intra=given.get("intra"), inter=given.get("inter"))
    kinds = [
        choice(PriceKind, kind, "way of paying")
        for kind in words_of(given.get("price_kinds", ("on-demand",)))
    ]
    return with_prices(
        choices,
        prices,
        given.get("price_usd_per_hour"),
        kinds=(*kinds, PriceKind.OWNED),
        providers=tuple(name.lower() for name in words_of(given.get("providers", ()))),
    )


def _prices(path: str | Path | None) -> tuple[InstancePrice, ...]:
    """The shipped prices; a user's own prices replace those of the same devices."""
    if path is None:
        return load_prices()
    own = read_price_file(Path(path))
    theirs = {price.device for price in own}
    return (*own, *(price for price in load_prices() if price.device not in theirs))


def _spelled_out(names: str, prices: Sequence[InstancePrice]) -> str:
    """The list of devices with ``all`` (GPUs of the catalogue) and ``priced`` (those with a price) spelled out."""

    def of(word: str) -> Sequence[str]:
        if word.strip().lower() == "all":
            return [device.name for device in load_catalog().values() if device.kind == "gpu"]
        if word.strip().lower() == "priced":
            return sorted({price.device for price in prices})
        return [word]

    return ",".join(name for word in names.split(",") for name in of(word))


def option_notes(options: Sequence[DeviceOption]) -> Iterator[str]:
    """Notes for the reader on prices and energy of devices."""
    without = [option.label for option in options if option.usd_per_hour is None]
    if without and len(without) < len(options):
        named = ", ".join(without[:_MOST_NAMED])
        more = f" and {len(without) - _MOST_NAMED} more" if len(without) > _MOST_NAMED else ""
        yield f"no price is known for {named}{more}: give --price NAME=0.50/h or --prices FILE.toml"
    elif without:
        yield (
            "no price of this kind is known for any of these devices, so cost is left out; 'forerun prices' lists "
            "those that are known, --price 0.50/h gives your own"
        )
    used = [option.rental.price for option in options if option.rental is not None]
    if old := price_age_note(used, datetime.date.today()):
        yield old
    if others := [option.label for option in options if option.device.kind != "gpu"]:
        yield f"energy is known for GPUs only, not for {', '.join(others)}"
