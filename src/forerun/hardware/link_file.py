"""Reading links: TOML tables with a unit in every key and a source for every figure."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import CatalogError, UnknownDeviceError, near_matches
from forerun.hardware.link import Link, LinkKind
from forerun.hardware.names import name_key
from forerun.hardware.toml_fields import positive_figure, read_toml, refuse_unknown_keys, text_field

__all__ = ["find_link", "load_link_file", "load_links", "parse_links"]

_FOLDER = Path(__file__).parent / "link_catalog"
_TEXTS = ("name", "title", "kind")
# Key in the file -> (field of Link, SI value of one unit).
_FIGURES: Mapping[str, tuple[str, float]] = {
    "bandwidth_gb_s": ("bandwidth_bytes_per_s", 1e9),
    "usable_share": ("usable_share", 1.0),
    "latency_us": ("latency_s", 1e-6),
}
_KEYS = frozenset((*_TEXTS, *_FIGURES, "aliases", "sources"))


@cache
def load_links() -> Mapping[str, Link]:
    """All links shipped with the package by catalogue name; the mapping is shared, do not change it."""
    links = [link for path in sorted(_FOLDER.glob("*.toml")) for link in _read(path)]
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
    links = _read(Path(path).expanduser())
    if len(links) != 1:
        raise CatalogError(f"{path}: expected one link, got {len(links)}; keep one [link] table per file")
    return links[0]


def _read(path: Path) -> tuple[Link, ...]:
    return parse_links(read_toml(path, "link"), str(path))


def parse_links(document: Mapping[str, Any], where: str) -> tuple[Link, ...]:
    """All links of a parsed document; ``where`` names it in messages."""
    tables = document.get("link", [])
    tables = [tables] if isinstance(tables, dict) else tables
    if not isinstance(tables, list) or not tables or set(document) != {"link"}:
        raise CatalogError(f"{where}: expected [[link]] tables and nothing else, got {sorted(document)}")
    return tuple(_link(table, where) for table in tables)


def _link(table: Mapping[str, Any], file: str) -> Link:
    where = f"{file}, link '{table.get('name', '?')}'"
    refuse_unknown_keys(table, _KEYS, where)
    texts = {key: text_field(table, key, where) for key in _TEXTS}
    if texts["kind"] not in set(LinkKind):
        raise CatalogError(f"{where}: kind must be one of {', '.join(LinkKind)}, got '{texts['kind']}'")
    figures = {field: positive_figure(table, key, where) * unit for key, (field, unit) in _FIGURES.items()}
    if figures["usable_share"] > 1:
        raise CatalogError(f"{where}: usable_share must be at most 1, got {figures['usable_share']}")
    return Link(
        name=texts["name"],
        title=texts["title"],
        kind=LinkKind(texts["kind"]),
        aliases=tuple(str(alias) for alias in table.get("aliases", [])),
        sources=_sources(table, where),
        **figures,
    )


def _sources(table: Mapping[str, Any], where: str) -> dict[str, str]:
    given = table.get("sources")
    if not isinstance(given, dict):
        raise CatalogError(
            f"{where}: expected a table 'sources' that says where each figure is from, got {given!r}"
        )
    for key in _FIGURES:
        if not isinstance(given.get(key), str) or not given[key].strip():
            raise CatalogError(f"{where}: '{key}' has no source; add sources.{key}")
    return {field: given[key] for key, (field, _) in _FIGURES.items()}
