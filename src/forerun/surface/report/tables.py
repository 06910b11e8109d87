"""The one look of all tables: no lines, a bold head, numbers to the right."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

_Row = TypeVar("_Row")

Columns = Mapping[str, Callable[[_Row], "str | Text | None"]]
"""Columns by title, each with the cell that it makes of a row; None where the row has nothing to say."""


def bare_table() -> Table:
    """A table without columns."""
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")


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


def cells_of(
    rows: Sequence[_Row], columns: Columns[_Row], blank: Any = "-"
) -> tuple[tuple[str, ...], tuple[tuple[Any, ...], ...]]:
    """Titles and rows of declared columns; one in which no row has anything to say is left out."""
    cells = {title: [cell(row) for row in rows] for title, cell in columns.items()}
    known = {title: made for title, made in cells.items() if any(cell is not None for cell in made)}
    lines = zip(*known.values(), strict=True)
    return tuple(known), tuple(tuple(blank if cell is None else cell for cell in line) for line in lines)


def table_of(
    rows: Sequence[_Row],
    columns: Columns[_Row],
    *,
    left: Collection[str] = (),
    fold: Collection[str] = (),
    blank: str = "-",
) -> Table:
    """A table of declared columns, see ``cells_of``."""
    return table(*cells_of(rows, columns, blank), left=left, fold=fold)
