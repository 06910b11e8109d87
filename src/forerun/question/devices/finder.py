"""Find a device by a name, a file or ``here``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from forerun.base.errors import UnknownDeviceError, near_matches
from forerun.base.stages import LOGGER
from forerun.question.devices.catalogue import load_catalog, matching_devices, normalise_name
from forerun.question.devices.device import Device

__all__ = ["find_device"]


def find_device(name: str, *, prefer_sxm: bool = False) -> Device:
    """The device with this name.

    Args:
        name: A catalogue name (``a100-sxm4-40gb``), a driver's name (``NVIDIA A100-SXM4-40GB``), another
            spelling in use (``A100 SXM 40GB``; case, punctuation and vendor words do not matter), the path of
            a TOML file with one device, or ``here`` for the first GPU of this machine, or its CPU if it has
            none.
        prefer_sxm: Whether the SXM board is taken, with a warning, where it is the only one of several matches;
            tables of measurements are never guessed about.

    Raises:
        UnknownDeviceError: No device or several match the name; the message lists similar names.
        CatalogError: The file is not a usable device description.

    >>> find_device("NVIDIA GeForce RTX 3090").name
    'rtx-3090'
    """
    if name.strip().lower() == "here":
        # Imported here: looking at the machine needs libraries that naming a device does not.
        from forerun.question.devices.this_device import this_device

        return this_device()
    if name.strip().lower().endswith(".toml"):
        from forerun.question.devices.rows import load_device_file  # with its library of schemas

        path = Path(name.strip()).expanduser()
        if not path.is_file():
            raise UnknownDeviceError(
                f"expected a hardware file at '{name.strip()}', but there is none; check the path"
            )
        return load_device_file(path)
    found = matching_devices(name)
    if len(found) == 1:
        return found[0]
    boards = [device for device in found if device.bus.upper().startswith("SXM")]
    if prefer_sxm and len(boards) == 1:
        others = ", ".join(device.name for device in found if device is not boards[0])
        LOGGER.warning("'%s' is taken as %s, the SXM board; also known: %s", name, boards[0].name, others)
        return boards[0]
    raise UnknownDeviceError(_many_message(name, found) if found else _none_message(name))


def _many_message(name: str, found: Iterable[Device]) -> str:
    return f"'{name}' matches more than one device; name one of: {', '.join(device.name for device in found)}"


def _none_message(name: str) -> str:
    near = near_matches(normalise_name(name), load_catalog())
    return (
        f"expected a device of the catalogue, a hardware file or 'here', got '{name}'{near}"
        f"{'' if near else '; the catalogue lists all names'}"
    )
