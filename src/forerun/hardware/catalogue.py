"""The shipped devices, and finding one by any of its names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

from forerun.errors import CatalogError, UnknownDeviceError, near_matches
from forerun.hardware.device import Device
from forerun.hardware.device_file import load_device_file, read_device_file
from forerun.hardware.names import name_key, name_tokens, normalise_name

__all__ = ["find_device", "index_by_key", "load_catalog", "matching_devices"]

_CATALOG_FOLDER = Path(__file__).parent / "catalog"


@cache
def load_catalog() -> Mapping[str, Device]:
    """All shipped devices by catalogue name, in the order of the files.

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
    """The device of this name, or else all devices one of whose names has every word of it."""
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


def find_device(name: str) -> Device:
    """The device meant by a name.

    Args:
        name: A catalogue name (``a100-sxm4-40gb``), a driver's name (``NVIDIA A100-SXM4-40GB``), another
            spelling in use (``A100 SXM 40GB``; case, punctuation and vendor words do not matter), the path of
            a TOML file with one device, or ``here`` for the first GPU of this machine, or its CPU if it has
            none.

    Raises:
        UnknownDeviceError: No device or several fit the name; the message lists what is near.
        CatalogError: The file is not a usable device description.

    >>> find_device("NVIDIA GeForce RTX 3090").name
    'rtx-3090'
    """
    if name.strip().lower() == "here":
        # Imported here: looking at the machine needs libraries that naming a device does not.
        from forerun.hardware.this_device import this_device

        return this_device()
    if name.strip().lower().endswith(".toml"):
        return _device_of_file(name.strip())
    found = matching_devices(name)
    if len(found) == 1:
        return found[0]
    raise UnknownDeviceError(_many_message(name, found) if found else _none_message(name))


def _device_of_file(name: str) -> Device:
    path = Path(name).expanduser()
    if not path.is_file():
        raise UnknownDeviceError(f"expected a hardware file at '{name}', but there is none; check the path")
    return load_device_file(path)


def _many_message(name: str, found: Iterable[Device]) -> str:
    return f"'{name}' fits more than one device; name one of: {', '.join(device.name for device in found)}"


def _none_message(name: str) -> str:
    near = near_matches(normalise_name(name), load_catalog())
    return (
        f"expected a device of the catalogue, a hardware file or 'here', got '{name}'{near}"
        f"{'' if near else '; the catalogue lists all names'}"
    )
