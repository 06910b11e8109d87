"""The devices shipped with the package, and a search for them by the words of a name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

from forerun.errors import CatalogError
from forerun.hardware.device import Device
from forerun.hardware.device_file import read_device_file
from forerun.hardware.names import name_key, name_tokens

__all__ = ["index_by_key", "load_catalog", "matching_devices"]

_CATALOG_FOLDER = Path(__file__).parent / "catalog"


@cache
def load_catalog() -> Mapping[str, Device]:
    """All devices shipped with the package by catalogue name, in the order of the files.

    The mapping is read once and shared: do not change it.
    """
    devices = [device for path in sorted(_CATALOG_FOLDER.glob("*.toml")) for device in read_device_file(path)]
    if not devices:
        raise CatalogError("the hardware catalogue is missing from this installation; reinstall forerun")
    index_by_key(devices)
    return {device.name: device for device in devices}


def index_by_key(devices: Iterable[Device]) -> dict[str, Device]:
    """Devices by every spelling of their names; two devices that share one are an error."""
    index: dict[str, Device] = {}
    for device in devices:
        for spelling in (device.name, device.title, *device.aliases):
            other = index.setdefault(name_key(spelling), device)
            if other is not device:
                raise CatalogError(
                    f"'{spelling}' names both {other.name} and {device.name}; remove it from one of the two"
                )
    return index


@cache
def _catalogue_index() -> dict[str, Device]:
    return index_by_key(load_catalog().values())


@lru_cache(maxsize=4096)
def matching_devices(name: str) -> tuple[Device, ...]:
    """The device with this name; without one, every device with a name that contains all its words."""
    exact = _catalogue_index().get(name_key(name))
    if exact is not None:
        return (exact,)
    words = frozenset(name_tokens(name))
    if not words:
        return ()
    return tuple(
        device
        for device, spellings in zip(load_catalog().values(), _words_of_names(), strict=True)
        if any(words <= spelling for spelling in spellings)
    )


@cache
def _words_of_names() -> tuple[tuple[frozenset[str], ...], ...]:
    """The words of every spelling of every device, in the order of the catalogue."""
    return tuple(
        tuple(frozenset(name_tokens(spelling)) for spelling in (device.name, *device.aliases))
        for device in load_catalog().values()
    )
