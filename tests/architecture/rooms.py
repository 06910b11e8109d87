"""Sizes of the rooms: lines and modules of each top-level folder of the package, and of the studies as a whole."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Size", "complaints", "kept_sizes", "sizes"]

REPOSITORY = Path(__file__).parents[2]

FIGURES = Path(__file__).with_name("rooms.toml")

TOP = "top"
"""Room of the modules that lie in no folder of the package."""


class Size(NamedTuple):
    """Lines and modules of a room."""

    lines: int
    modules: int

    def __str__(self) -> str:
        return f"{{ lines = {self.lines}, modules = {self.modules} }}"


def sizes() -> dict[str, Size]:
    """The rooms as they are."""
    package = REPOSITORY / "src" / "forerun"
    folders = sorted(path for path in package.iterdir() if path.is_dir() and any(path.rglob("*.py")))
    found = {f"forerun.{folder.name}": _size(folder.rglob("*.py")) for folder in folders}
    found[f"forerun.{TOP}"] = _size(package.glob("*.py"))
    found["studies"] = _size((REPOSITORY / "studies").rglob("*.py"))
    return found


def _size(paths: Iterable[Path]) -> Size:
    counts = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    return Size(sum(counts), len(counts))


def kept_sizes() -> dict[str, Size]:
    """The rooms as large as they may be."""
    figures = tomllib.loads(FIGURES.read_text(encoding="utf-8"))
    return {room: Size(**size) for room, size in figures.items()}


def complaints(now: Mapping[str, Size], kept: Mapping[str, Size]) -> list[str]:
    """Rooms that are larger than they may be, unknown, or gone, each as one line that says what to do."""
    found = []
    for room, size in now.items():
        if room not in kept:
            found.append(f'{room} has no figure; add "{room}" = {size} to {FIGURES.name}')
        elif size.lines > kept[room].lines or size.modules > kept[room].modules:
            found.append(
                f"{room} may have {kept[room].lines} lines in {kept[room].modules} modules, and has {size.lines} in "
                f"{size.modules}; make it smaller, or raise its figure with a line in docs/decisions that says what "
                "the lines buy"
            )
    gone = [f"{room} is gone; remove its line from {FIGURES.name}" for room in kept if room not in now]
    return found + gone
