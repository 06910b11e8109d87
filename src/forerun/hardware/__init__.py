"""Devices: the figures of their datasheets with sources, and the hardware of this machine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.hardware.catalogue import load_catalog
    from forerun.hardware.device import Device, DeviceKind, NumberFormat
    from forerun.hardware.device_file import load_device_file
    from forerun.hardware.finder import find_device
    from forerun.hardware.here import Host, describe_host
    from forerun.hardware.host_gpus import HostGpu

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
    "HostGpu": "host_gpus",
    "NumberFormat": "device",
    "describe_host": "here",
    "find_device": "finder",
    "load_catalog": "catalogue",
    "load_device_file": "device_file",
}


def __getattr__(name: str) -> object:
    # Loaded on first use, so that naming a device does not pay for looking at the machine.
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
