"""Links between devices: usable bandwidth and latency, each figure with its source, and the files that say them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.errors import CatalogError, UnknownDeviceError, near_matches
from forerun.base.tables import checked_table, read_toml
from forerun.question.devices.catalogue import name_key
from forerun.question.devices.device import LinkKind

__all__ = ["Link", "LinkKind", "find_link", "load_link_file", "load_links", "parse_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link as one device sees it: the rate at which it can send while it receives at the same rate.

    Attributes:
        name: Catalogue name, such as ``nvlink-3``.
        title: Name as people write it.
        kind: Sort of link.
        bandwidth_bytes_per_s: Datasheet rate of one direction [bytes/s].
        usable_share: Share of the datasheet rate that a ring reaches with large messages, in (0, 1].
        latency_s: Time of one hop for a small message [s].
        aliases: Other spellings of the name.
        sources: Source of each figure by field name.
    """

    name: str
    title: str
    kind: LinkKind
    bandwidth_bytes_per_s: float
    usable_share: float
    latency_s: float
    aliases: tuple[str, ...] = ()
    sources: Mapping[str, str]

    @property
    def usable_bytes_per_s(self) -> float:
        """Rate that large messages reach [bytes/s]."""
        return self.bandwidth_bytes_per_s * self.usable_share


_FOLDER = Path(__file__).parent / "link_catalog"
# Key in the file -> (field of Link, SI value of one unit).
_FIGURES: Mapping[str, tuple[str, float]] = {
    "bandwidth_gb_s": ("bandwidth_bytes_per_s", 1e9),
    "usable_share": ("usable_share", 1.0),
    "latency_us": ("latency_s", 1e-6),
}


@cache
def load_links() -> Mapping[str, Link]:
    """All links shipped with the package by catalogue name; the mapping is shared, do not change it."""
    links = [
        _link(table) for path in sorted(_FOLDER.glob("*.toml")) for table in read_toml(path, "link")["link"]
    ]
    if not links:
        raise CatalogError("the catalogue of links is missing from this installation; reinstall forerun")
    return {link.name: link for link in links}


def find_link(name: str) -> Link:
    """The link with this name: a catalogue name, another spelling of it, or the path of a TOML file with one link.

    Raises:
        UnknownDeviceError: No link has this name; the message lists similar names.
        CatalogError: The file is not a usable description.

    >>> find_link("NVLink 3").name
    'nvlink-3'
    """
    if name.strip().lower().endswith(".toml"):
        return load_link_file(name.strip())
    found = _by_spelling().get(name_key(name))
    if found is None:
        near = near_matches(name, load_links())
        raise UnknownDeviceError(
            f"expected a link of the catalogue or a TOML file, got '{name}'"
            f"{near or '; known are ' + ', '.join(load_links())}"
        )
    return found


@cache
def _by_spelling() -> Mapping[str, Link]:
    index: dict[str, Link] = {}
    for link in load_links().values():
        for spelling in (link.name, *link.aliases):
            if index.setdefault(name_key(spelling), link) is not link:
                raise CatalogError(f"'{spelling}' names two links; remove it from one of them")
    return index


def load_link_file(path: str | Path) -> Link:
    """The one link of a user's TOML file, in a ``[link]`` or ``[[link]]`` table."""
    if not Path(path).expanduser().is_file():
        raise UnknownDeviceError(f"expected a link file at '{path}', but there is none; check the path")
    links = parse_links(read_toml(Path(path).expanduser(), "link"), str(path))
    if len(links) != 1:
        raise CatalogError(f"{path}: expected one link, got {len(links)}; keep one [link] table per file")
    return links[0]


def parse_links(document: Mapping[str, Any], where: str) -> tuple[Link, ...]:
    """All links of a parsed document, each checked; ``where`` names it in messages."""
    from forerun.question.devices.rows import LinkRow

    tables = document.get("link", [])
    tables = [tables] if isinstance(tables, dict) else tables
    is_list = isinstance(tables, list) and all(isinstance(table, dict) for table in tables)
    if not is_list or not tables or set(document) != {"link"}:
        raise CatalogError(f"{where}: expected [[link]] tables and nothing else, got {sorted(document)}")
    for table in tables:
        place = f"{where}, link '{table.get('name', '?')}'"
        checked_table(table, LinkRow, place)
        for key in _FIGURES:
            if key not in table["sources"]:
                raise CatalogError(f"{place}: '{key}' has no source; add sources.{key}")
    return tuple(map(_link, tables))


def _link(table: Mapping[str, Any]) -> Link:
    """A link from a table that was checked, its figures in SI units."""
    figures: dict[str, Any] = {field: float(table[key]) * unit for key, (field, unit) in _FIGURES.items()}
    return Link(
        name=table["name"],
        title=table["title"],
        kind=LinkKind(table["kind"]),
        aliases=tuple(table.get("aliases", ())),
        sources={field: table["sources"][key] for key, (field, _) in _FIGURES.items()},
        **figures,
    )
