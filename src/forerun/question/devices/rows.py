"""Tables of a user's TOML files of devices, links, prices and clusters, with a unit in every key; devices from them.

The shipped catalogue was checked against these models when it was packed (``tests/question/devices``), so that naming a
device of it needs no schema library, which takes longer to import than the device to read.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, create_model

from forerun.base.errors import CatalogError
from forerun.base.tables import checked_table, read_toml
from forerun.question.devices.device import (
    PEAKS,
    SOURCE_GROUPS,
    SOURCE_KEYS,
    Device,
    DeviceKind,
    LinkKind,
    NumberFormat,
    PriceKind,
    device_of,
)

Text = Annotated[str, Field(pattern=r"\S", description="a text that is not empty")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=True, description="a positive number")]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True, description="a number, zero or more")]
Count = Annotated[int, Field(ge=1, strict=True, description="a whole number above zero")]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _tables(name: str, keys: Any, needed: str = "", kind: Any = Positive) -> Any:
    """A nested table with a value for each of some keys, all of them optional but ``needed``."""
    fields: dict[str, Any] = {str(key): (kind, ... if key == needed else None) for key in keys}
    return create_model(name, __base__=_Table, **fields)


if TYPE_CHECKING:
    _Peaks = _Table
    _Hourly = _Table
    _Sources = _Table
    _LinkSources = _Table
else:  # made from the enumerations and the keys of figures
    _Peaks = _tables("_Peaks", NumberFormat, needed="fp32")
    _Hourly = _tables("_Hourly", [kind for kind in PriceKind if kind is not PriceKind.OWNED], kind=Amount)
    _Sources = create_model(
        "_Sources",
        __base__=_tables("_FigureSources", (key for key in SOURCE_KEYS if key != "peak_tflops"), kind=Text),
        peak_tflops=(
            Text | dict[NumberFormat, Text] | None,
            Field(default=None, description="a text, or a text for each rate"),
        ),
    )
    _LinkSources = _tables("_LinkSources", ("bandwidth_gb_s", "usable_share", "latency_us"), kind=Text)


def _choice(kind: Any) -> Any:
    return Field(description=f"one of {', '.join(kind)}")


class DeviceRow(_Table):
    """A table ``[[device]]``; vendors' GB of memory and MB of cache are binary."""

    name: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", description="lower-case words joined by hyphens")
    title: Text
    vendor: Text
    kind: DeviceKind = _choice(DeviceKind)
    architecture: Text
    segment: Text
    release: str = Field(
        pattern=r"^(19|20)\d\d-(0[1-9]|1[0-2])$", description="a year and month like 2020-05"
    )
    num_compute_units: Count
    boost_clock_mhz: Positive
    l2_cache_mb: Positive
    memory_gb: Positive
    memory_bandwidth_gb_s: Positive
    memory_type: Text
    bus: Text
    power_limit_w: Positive
    aliases: list[Text] = Field(default=[], description="a list of names")
    notes: Text = ""
    peak_tflops: _Peaks = Field(description="a table with a dense rate for each number format, fp32 at least")
    sources: _Sources = Field(description="a table that says where each figure is from")


class LinkRow(_Table):
    """A table ``[[link]]``."""

    name: Text
    title: Text
    kind: LinkKind = _choice(LinkKind)
    bandwidth_gb_s: Positive
    usable_share: float = Field(gt=0, le=1, strict=True, description="a number above 0 and at most 1")
    latency_us: Positive
    aliases: list[Text] = Field(default=[], description="a list of names")
    sources: _LinkSources = Field(description="a table that says where each figure is from")


class PriceRow(_Table):
    """A table ``[[price]]`` of an instance that is rented."""

    provider: Text
    instance: Text
    device: Text
    num_devices: Count
    most_devices: Count | None = Field(default=None, description="a whole number above zero")
    link: Text
    region: Text
    usd_per_hour: _Hourly = Field(description="a table such as { on-demand = 1.2 }")
    date: datetime.date = Field(strict=True, description="the day the price was read, such as 2026-05-31")
    source: Text


class OwnedRow(_Table):
    """A table ``[[owned]]`` of hardware that was bought."""

    device: Text
    num_devices: Count = 1
    purchase_usd: Amount
    years: Amount
    usd_per_kwh: Amount
    utilisation: Amount = 1.0
    power_w: Amount | None = Field(default=None, description="a number, zero or more")


class ClusterRow(_Table):
    """A table ``[cluster]``."""

    device: Text
    num_nodes: int = Field(default=1, strict=True, description="a whole number")
    num_devices_per_node: int = Field(default=1, strict=True, description="a whole number")
    intra_link: Text | None = None
    inter_link: Text | None = None


def named_tables(document: Mapping[str, Any], key: str, where: str) -> list[tuple[Mapping[str, Any], str]]:
    """The tables ``[[key]]`` or ``[key]`` of a document that has nothing else, each with its place for messages.

    Raises:
        CatalogError: There is none, or something else.
    """
    tables = document.get(key, [])
    tables = [tables] if isinstance(tables, dict) else tables
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if set(document) - {key} or not is_list or not tables:
        raise CatalogError(
            f"{where}: expected at least one [[{key}]] table and nothing else, got {sorted(document)}"
        )
    return [(table, f"{where}, {key} '{table.get('name', '?')}'") for table in tables]


def load_device_file(path: str | Path) -> Device:
    """The one device of a user's TOML file; its table may be ``[device]`` or ``[[device]]``."""
    devices = parse_devices(read_toml(Path(path), "hardware"), str(path))
    if len(devices) != 1:
        raise CatalogError(
            f"{path}: expected one device, got {len(devices)}; keep one [device] table per file"
        )
    return devices[0]


def parse_devices(document: Mapping[str, Any], where: str) -> tuple[Device, ...]:
    """All devices of one parsed document, each checked; ``where`` names it in messages.

    Raises:
        CatalogError: A figure or its source is missing or impossible, or a key is unknown.
    """
    found = []
    for table, place in named_tables(document, "device", where):
        checked_table(table, DeviceRow, place)
        _check_sources(table, place)
        found.append(device_of(table))
    return tuple(found)


def _check_sources(table: Mapping[str, Any], where: str) -> None:
    """Every figure has a source of its own or that of its group, every rate too."""
    given, rates = table["sources"], table["sources"].get(PEAKS)
    for key, group in {**SOURCE_GROUPS, PEAKS: PEAKS}.items():
        if key not in given and group not in given:
            raise CatalogError(f"{where}: '{key}' has no source; add sources.{key} or sources.{group}")
    unlike = {} if isinstance(rates, str) else set(rates) ^ set(table[PEAKS])
    if unlike:
        raise CatalogError(
            f"{where}, sources.{PEAKS}: expected a source for each rate and no other, got one without the other for "
            f"{', '.join(sorted(unlike))}; add or remove it"
        )
