"""Reading hardware files: TOML tables with a unit in every key and a source for every figure.

The same strict check serves the shipped catalogue and a user's own file. It is written out by hand because
every command reads the catalogue, and a schema library alone would take longer to import than the whole
catalogue takes to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import CatalogError
from forerun.hardware.device import Device, DeviceKind, NumberFormat
from forerun.hardware.toml_fields import positive_figure, read_toml, refuse_unknown_keys, text_field

__all__ = ["load_device_file", "parse_devices", "read_device_file"]

# Key in the file -> (field of Device, SI value of one unit). Vendors' GB of memory, MB of cache are binary.
_FIGURES: Mapping[str, tuple[str, float]] = {
    "num_compute_units": ("num_compute_units", 1),
    "boost_clock_mhz": ("boost_clock_hz", 1e6),
    "l2_cache_mb": ("l2_cache_bytes", 1024**2),
    "memory_gb": ("memory_bytes", 1024**3),
    "memory_bandwidth_gb_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "power_limit_w": ("power_limit_w", 1),
}
_TEXTS = ("name", "title", "vendor", "kind", "architecture", "segment", "release", "memory_type", "bus")
_OTHER_KEYS = ("aliases", "notes", "peak_tflops", "sources")
_KEYS = frozenset((*_FIGURES, *_TEXTS, *_OTHER_KEYS))
_PEAKS_FIELD = "peak_flops_per_s"
_FORMATS = frozenset(NumberFormat)
# One source may cover a group; a figure named on its own overrides its group.
_SOURCE_GROUPS: Mapping[str, str] = {
    "num_compute_units": "compute",
    "boost_clock_mhz": "compute",
    "l2_cache_mb": "compute",
    "memory_gb": "memory",
    "memory_bandwidth_gb_s": "memory",
    "memory_type": "memory",
    "bus": "board",
    "power_limit_w": "board",
    "release": "board",
}
_SOURCE_KEYS = frozenset((*_SOURCE_GROUPS, *_SOURCE_GROUPS.values(), "peak_tflops"))
_RELEASE = re.compile(r"(19|20)\d\d-(0[1-9]|1[0-2])")
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


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
    document = read_toml(path, "hardware")
    return parse_devices(document, str(path))


def parse_devices(document: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    """All devices of one parsed document; ``where`` names it in messages."""
    refuse_unknown_keys(document, ("device",), where)
    tables = document.get("device", [])
    tables = [tables] if isinstance(tables, dict) else tables
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise CatalogError(f"{where}: expected at least one [[device]] table, got none")
    return tuple(_device(table, where) for table in tables)


def _device(table: Mapping[str, Any], file: str) -> Device:
    where = f"{file}, device '{table.get('name', '?')}'"
    refuse_unknown_keys(table, _KEYS, where)
    texts = {key: text_field(table, key, where) for key in _TEXTS}
    _check_spelling(texts, where)
    figures = {field: positive_figure(table, key, where) * unit for key, (field, unit) in _FIGURES.items()}
    peaks = _peaks(table, where)
    return Device(
        name=texts["name"],
        title=texts["title"],
        vendor=texts["vendor"],
        kind=DeviceKind(texts["kind"]),
        architecture=texts["architecture"],
        segment=texts["segment"],
        release=texts["release"],
        num_compute_units=_whole(figures["num_compute_units"], where),
        boost_clock_hz=figures["boost_clock_hz"],
        l2_cache_bytes=figures["l2_cache_bytes"],
        memory_bytes=figures["memory_bytes"],
        memory_bandwidth_bytes_per_s=figures["memory_bandwidth_bytes_per_s"],
        memory_type=texts["memory_type"],
        bus=texts["bus"],
        power_limit_w=figures["power_limit_w"],
        peak_flops_per_s=peaks,
        aliases=_aliases(table, where),
        sources=_sources(table, peaks, where),
        notes=text_field(table, "notes", where) if "notes" in table else "",
    )


def _check_spelling(texts: Mapping[str, str], where: str) -> None:
    if texts["kind"] not in set(DeviceKind):
        raise CatalogError(f"{where}: kind must be one of {', '.join(DeviceKind)}, got '{texts['kind']}'")
    if not _RELEASE.fullmatch(texts["release"]):
        raise CatalogError(
            f"{where}: release must be a year and month like 2020-05, got '{texts['release']}'"
        )
    if not _NAME.fullmatch(texts["name"]):
        raise CatalogError(f"{where}: name must be lower-case words joined by hyphens, got '{texts['name']}'")


def _whole(value: float, where: str) -> int:
    if value != int(value):
        raise CatalogError(f"{where}: 'num_compute_units' must be a whole number, got {value}")
    return int(value)


def _aliases(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    aliases = table.get("aliases", [])
    if not isinstance(aliases, list) or not all(
        isinstance(alias, str) and alias.strip() for alias in aliases
    ):
        raise CatalogError(f"{where}: 'aliases' must be a list of names, got {aliases!r}")
    return tuple(aliases)


def _peaks(table: Mapping[str, Any], where: str) -> dict[NumberFormat, float]:
    rates = table.get("peak_tflops")
    if not isinstance(rates, dict):
        raise CatalogError(
            f"{where}: expected a table 'peak_tflops' with a dense rate per number format, got {rates!r}"
        )
    refuse_unknown_keys(rates, _FORMATS, f"{where}, peak_tflops")
    if "fp32" not in rates:
        raise CatalogError(f"{where}: 'peak_tflops' must give fp32; add the dense rate and its source")
    return {NumberFormat(key): positive_figure(rates, key, f"{where}, peak_tflops") * 1e12 for key in rates}


def _sources(table: Mapping[str, Any], peaks: Iterable[NumberFormat], where: str) -> dict[str, str]:
    given = table.get("sources")
    if not isinstance(given, dict):
        raise CatalogError(
            f"{where}: expected a table 'sources' that says where each figure is from, got {given!r}"
        )
    refuse_unknown_keys(given, _SOURCE_KEYS, f"{where}, sources")
    found: dict[str, str] = {}
    for key, group in _SOURCE_GROUPS.items():
        if key not in given and group not in given:
            raise CatalogError(f"{where}: '{key}' has no source; add sources.{key} or sources.{group}")
        field = _FIGURES[key][0] if key in _FIGURES else key
        found[field] = text_field(given, key if key in given else group, f"{where}, sources")
    return found | _peak_sources(given, frozenset(peaks), where)


def _peak_sources(given: Mapping[str, Any], peaks: frozenset[NumberFormat], where: str) -> dict[str, str]:
    """The source of the rates, either one text for all or a table with a text per number format."""
    source = given.get("peak_tflops")
    if not isinstance(source, dict):
        return {_PEAKS_FIELD: text_field(given, "peak_tflops", f"{where}, sources")}
    refuse_unknown_keys(source, peaks, f"{where}, sources.peak_tflops")
    return {
        f"{_PEAKS_FIELD}.{peak}": text_field(source, peak, f"{where}, sources.peak_tflops")
        for peak in sorted(peaks)
    }
