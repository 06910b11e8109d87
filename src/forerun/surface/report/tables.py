"""The one look of all tables: no lines, a bold head, numbers to the right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import measure_renderables
from rich.table import Table
from rich.text import Text

_Row = TypeVar("_Row")

Columns = Mapping[str, Callable[[_Row], "str | Text | None"]]
"""Columns by title, each with the cell that it makes of a row; None where the row has nothing to say."""


_GAP = 2
_MOST_FOLDED = 24
"""Width that a column whose text may fold asks for before the table is cut into blocks."""


class _Blocks(Table):
    """A table that is cut into blocks where it is wider than the screen, each after the columns that tell rows apart.

    A figure that lost its end, or stands on two lines, would be read as another one.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        endless = options.update(max_width=10_000)
        widths = [
            min(
                measure_renderables(console, endless, [column.header, *column.cells]).maximum,
                options.max_width if column.no_wrap else _MOST_FOLDED,
            )
            for column in self.columns
        ]
        if sum(widths) + _GAP * (len(widths) - 1) <= options.max_width or len(widths) < 3:
            yield from super().__rich_console__(console, options)
            return
        kept = self._num_telling()
        while kept > 1 and 2 * (sum(widths[:kept]) + _GAP * kept) > options.max_width:
            kept -= 1
        blocks = [[*range(kept)]]
        for index, width in enumerate(widths[kept:], start=kept):
            taken = sum(widths[each] + _GAP for each in blocks[-1])
            if taken + width > options.max_width and len(blocks[-1]) > kept:
                blocks.append([*range(kept)])
            blocks[-1].append(index)
        for number, block in enumerate(blocks):
            yield from [""] if number else []
            part = bare_table()
            for column in (self.columns[index] for index in block):
                part.add_column(
                    column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow
                )
            for cells in zip(*(self.columns[index].cells for index in block), strict=True):
                part.add_row(*cells)
            yield part

    def _num_telling(self) -> int:
        """Columns from the first on that no two rows share."""
        cells = [[str(cell) for cell in column.cells] for column in self.columns]
        numbers = range(1, len(cells))
        return next((n for n in numbers if len({*zip(*cells[:n], strict=True)}) == self.row_count), 1)


def bare_table() -> Table:
    """A table without columns, which is cut into blocks where it is too wide."""
    return _Blocks(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")


def table(
    titles: Iterable[str],
    rows: Iterable[Sequence[str | Text]] = (),
    *,
    left: Collection[str] = (),
    fold: Collection[str] = (),
) -> Table:
    """A table of texts.

    Args:
        titles: Titles of the columns.
        rows: Cells of each row; text is never read as markup.
        left: Columns of words, which begin at the left; the others are numbers and end at the right.
        fold: Columns whose text may run on over several lines, at any letter.
    """
    made = bare_table()
    for title in titles:
        is_folded = title in fold
        made.add_column(
            title,
            justify="left" if title in left else "right",
            no_wrap=not is_folded,
            overflow="fold" if is_folded else "ellipsis",
        )
    for row in rows:
        made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return made


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names with their values, a line each, without a head."""
    made = Table.grid(padding=(0, 2, 0, 0))
    made.add_column(no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(Text(name), Text(value))
    return made


def cells_of(
    rows: Sequence[_Row], columns: Columns[_Row]
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Titles and rows of declared columns; one in which no row has anything to say is left out."""
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    known = {title: made for title, made in cells.items() if any(cell is not None for cell in made)}
    lines = zip(*known.values(), strict=True)
    return tuple(known), tuple(tuple("-" if cell is None else cell for cell in line) for line in lines)


def table_of(
    rows: Sequence[_Row],
    columns: Columns[_Row],
    *,
    left: Collection[str] = (),
    fold: Collection[str] = (),
) -> Table:
    """A table of declared columns, see ``cells_of``."""
    return table(*cells_of(rows, columns), left=left, fold=fold)
