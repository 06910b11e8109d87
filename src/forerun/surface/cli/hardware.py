"""``forerun hardware list | show DEVICE | here`` and ``forerun prices``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.question.devices import Device, Host
    from forerun.question.devices.prices import InstancePrice

_PAGES = "forerun.surface.report.hardware_page"


@verb(
    page=f"{_PAGES}:device_table",
    as_dict=lambda devices: {"devices": [device.as_dict() for device in devices]},
)
def list_devices() -> Sequence[Device]:
    """List the devices of the catalogue."""
    from forerun.question.devices import load_catalog

    return [*load_catalog().values()]


@verb(page=f"{_PAGES}:device_page")
def show_device(
    device: Annotated[
        str,
        typer.Argument(metavar="DEVICE", help="Device: catalogue name, driver's name, TOML file or 'here'."),
    ],
) -> Device:
    """Show the figures of one device, each with its source."""
    from forerun.question.devices import find_device

    return find_device(device, prefer_sxm=True)


@verb(page=f"{_PAGES}:host_page")
def here() -> Host:
    """Show what this machine has: processor, memory, GPUs, software."""
    from forerun.question.devices import describe_host

    return describe_host()


hardware = Verbs(
    "Show the devices of the catalogue, and this machine.",
    {"list": list_devices, "show": show_device, "here": here},
)


def _row(price: InstancePrice) -> dict[str, Any]:
    return {
        "device": price.device,
        "provider": price.provider,
        "instance": price.instance,
        "num_devices": price.num_devices,
        "kind": str(price.kind),
        "region": price.region,
        "usd_per_hour": price.usd_per_hour,
        "is_community": price.is_community,
        "date": price.date.isoformat(),
        "source": price.source,
    }


@verb(
    "List prices with their dates, or update them.",
    page=f"{_PAGES}:price_table",
    as_dict=lambda prices: {"prices": [_row(price) for price in prices]},
)
def prices(
    update: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL", help="Newer prices, a TOML file or its https address; they are kept."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option("--on", metavar="DEVICE", help="Prices of this device only, such as h100-sxm."),
    ] = None,
) -> Sequence[InstancePrice]:
    """List the prices that plans go by, with their dates and sources, or take newer ones."""
    from forerun.question.devices import find_device
    from forerun.question.devices.prices import load_prices, update_prices, updated_prices_path

    if update is not None:
        taken = update_prices(update)
        typer.echo(f"{len(taken)} prices from {update} are kept in {updated_prices_path()}", err=True)
    wanted = None if device is None else find_device(device, prefer_sxm=True).name
    return sorted(
        (price for price in load_prices() if wanted in (None, price.device)),
        key=lambda price: (price.device, price.is_community, price.usd_per_hour / price.num_devices),
    )
