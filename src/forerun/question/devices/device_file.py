"""Reading hardware files: TOML tables with a unit in every key and a source for every figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.base.errors import CatalogError
from forerun.base.tables import checked_table, read_toml
from forerun.question.devices.device import SOURCE_GROUPS, Device, DeviceKind, NumberFormat

__all__ = ["device_of", "load_device_file", "parse_devices", "read_device_file"]

# Key in the file -> (field of Device, SI value of one unit). Vendors' GB of memory, MB of cache are binary.
_FIGURES: Mapping[str, tuple[str, float]] = {
    "boost_clock_mhz": ("boost_clock_hz", 1e6),
    "l2_cache_mb": ("l2_cache_bytes", 1024**2),
    "memory_gb": ("memory_bytes", 1024**3),
    "memory_bandwidth_gb_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "power_limit_w": ("power_limit_w", 1.0),
}
_TEXTS = ("name", "title", "vendor", "architecture", "segment", "release", "memory_type", "bus")
_PEAKS = "peak_tflops"


def load_device_file(path: str | Path) -> Device:
    """The one device of a user's TOML file; its table may be ``[device]`` or ``[[device]]``."""
    devices = read_device_file(Path(path))
    if len(devices) != 1:
        raise CatalogError(
            f"{path}: expected one device, got {len(devices)}; keep one [device] table per file"
        )
    return devices[0]


def read_device_file(path: Path) -> tuple[Device, ...]:
    """All devices of one TOML file."""
    return parse_devices(read_toml(path, "hardware"), str(path))


def parse_devices(document: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    """All devices of one parsed document, each checked; ``where`` names it in messages.

    Raises:
        CatalogError: A figure or its source is missing or impossible, or a key is unknown.
    """
    from forerun.question.devices.rows import DeviceRow

    tables = document.get("device", [])
    tables = [tables] if isinstance(tables, dict) else tables
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if set(document) - {"device"} or not is_list or not tables:
        raise CatalogError(
            f"{where}: expected at least one [[device]] table and nothing else, got {sorted(document)}"
        )
    found = []
    for table in tables:
        place = f"{where}, device '{table.get('name', '?')}'"
        checked_table(table, DeviceRow, place)
        _check_sources(table, place)
        found.append(device_of(table))
    return tuple(found)


def device_of(table: Mapping[str, Any]) -> Device:
    """A device from a table that was checked, its figures in SI units."""
    figures: dict[str, Any] = {field: float(table[key]) * unit for key, (field, unit) in _FIGURES.items()}
    texts: dict[str, Any] = {key: table[key] for key in _TEXTS}
    return Device(
        **texts,
        **figures,
        kind=DeviceKind(table["kind"]),
        num_compute_units=table["num_compute_units"],
        peak_flops_per_s={NumberFormat(key): float(rate) * 1e12 for key, rate in table[_PEAKS].items()},
        aliases=tuple(table.get("aliases", ())),
        sources=_sources(table["sources"]),
        notes=table.get("notes", ""),
    )


def _sources(given: Mapping[str, Any]) -> dict[str, str]:
    found = {
        _FIGURES[key][0] if key in _FIGURES else key: given[key if key in given else group]
        for key, group in SOURCE_GROUPS.items()
    }
    rates = given[_PEAKS]
    field = "peak_flops_per_s"
    if isinstance(rates, str):
        return found | {field: rates}
    return found | {f"{field}.{rate}": rates[rate] for rate in sorted(rates)}


def _check_sources(table: Mapping[str, Any], where: str) -> None:
    """Every figure has a source of its own or that of its group, every rate too."""
    given, rates = table["sources"], table["sources"].get(_PEAKS)
    for key, group in {**SOURCE_GROUPS, _PEAKS: _PEAKS}.items():
        if key not in given and group not in given:
            raise CatalogError(f"{where}: '{key}' has no source; add sources.{key} or sources.{group}")
    unlike = {} if isinstance(rates, str) else set(rates) ^ set(table[_PEAKS])
    if unlike:
        raise CatalogError(
            f"{where}, sources.{_PEAKS}: expected a source for each rate, unlike are {', '.join(sorted(unlike))}"
        )
