"""A device, link, price or cluster by its name, with the sources of its figures; and the hardware of this machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.question.devices.catalogue import find_device, load_catalog
    from forerun.question.devices.device import Device, DeviceKind, NumberFormat
    from forerun.question.devices.here import Host, HostGpu, describe_host
    from forerun.question.devices.rows import load_device_file

__all__ = [
    "Device",
    "DeviceKind",
    "Host",
    "HostGpu",
    "NumberFormat",
    "describe_host",
    "find_device",
    "load_catalog",
    "load_device_file",
]

_MODULES = {
    "Device": "device",
    "DeviceKind": "device",
    "Host": "here",
    "HostGpu": "here",
    "NumberFormat": "device",
    "describe_host": "here",
    "find_device": "catalogue",
    "load_catalog": "catalogue",
    "load_device_file": "rows",
}


def __getattr__(name: str) -> object:
    # Loaded on first use, so that naming a device does not pay for looking at the machine.
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
