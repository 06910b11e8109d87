"""Horizontal bars made of characters, as wide as the terminal leaves room for."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.style import Style

__all__ = ["Bar", "bar_cells", "bar_text", "merge_small"]


def bar_cells(start: float, end: float, width: int) -> tuple[int, int]:
    """First cell of a bar and the cell after its last, on a line of ``width`` cells for 0 to 1.

    Anything above zero keeps one cell, so that no part vanishes; what lies beyond 1 is cut off.
    """
    if end <= start or width < 1:
        return 0, 0
    first = min(max(0, round(start * width)), width - 1)
    return first, min(width, max(first + 1, round(end * width)))


def bar_text(start: float, end: float, width: int, fill: str) -> str:
    """A bar from ``start`` to ``end`` as text of exactly ``width`` characters."""
    first, last = bar_cells(start, end, width)
    return " " * first + fill * (last - first) + " " * (width - last)


def merge_small(parts: tuple[tuple[str, float], ...], share: float = 0.02) -> list[tuple[str, float]]:
    """Largest parts first; those below ``share`` of the sum become one 'other', so the sum stays."""
    total = sum(size for _, size in parts)
    ordered = sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
    large = [part for part in ordered if part[1] >= share * total]
    small = [part for part in ordered if part[1] < share * total]
    if len(small) < 2:
        return ordered
    return [*large, (f"other ({len(small)} parts)", sum(size for _, size in small))]


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar from ``start`` to ``end`` on a line from 0 to 1, drawn over the width of its cell."""

    start: float
    end: float
    fill: str = "█"
    ascii_fill: str = "#"
    colour: str = "cyan"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        fill = self.ascii_fill if options.ascii_only else self.fill
        yield Segment(bar_text(self.start, self.end, options.max_width, fill), Style.parse(self.colour))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(10, options.max_width), options.max_width)
