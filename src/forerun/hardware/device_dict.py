"""A device as plain data for JSON."""

from __future__ import annotations

from dataclasses import fields

from forerun.hardware.device import Device

__all__ = ["device_as_dict"]


def device_as_dict(device: Device) -> dict[str, object]:
    """Every field of a device in SI units, as JSON types; keys are the field names of ``Device``."""
    plain: dict[str, object] = {field.name: getattr(device, field.name) for field in fields(device)}
    plain["kind"] = device.kind.value
    plain["peak_flops_per_s"] = {peak.value: rate for peak, rate in device.peak_flops_per_s.items()}
    plain["aliases"] = list(device.aliases)
    plain["sources"] = dict(device.sources)
    return plain
