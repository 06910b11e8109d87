"""Tables: whole where the screen is wide enough, in blocks with every figure whole where it is not."""

from __future__ import annotations

import io

from rich.console import Console

from forerun.surface.report.tables import table

TITLES = ("device", "batch", "step of all devices", "90 % interval", "memory")
ROWS = (
    ("a100-sxm4-40gb", "64", "56.1 ms", "45.0 to 70.4 ms", "3.71 GiB"),
    ("a100-sxm4-40gb", "128", "103 ms", "84.4 to 126 ms", "6.35 GiB"),
)


def printed(width, rows=ROWS, **words):
    console = Console(width=width, file=io.StringIO())
    console.print(table(TITLES, rows, left=("device",), **words))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_a_table_that_fits_is_one_block():
    assert len(printed(100)) == 1 + len(ROWS)


def test_a_table_too_wide_is_cut_after_what_tells_its_rows_apart_and_loses_no_figure():
    lines = printed(48)
    heads = [line for line in lines if line.startswith("device")]
    assert len(heads) > 1
    assert all(head.split()[:2] == ["device", "batch"] for head in heads)
    text = "\n".join(lines)
    assert "…" not in text
    assert all(text.count(cell) >= 1 for row in ROWS for cell in row)
    assert max(map(len, lines)) <= 48


def test_rows_that_nothing_tells_apart_are_cut_after_their_first_column():
    heads = [line for line in printed(48, (ROWS[0], ROWS[0])) if line.startswith("device")]
    assert [head.split()[1] for head in heads][1:] != ["batch"]


def test_words_that_may_fold_do_so_before_a_table_is_cut():
    rows = [(*row[:4], "a long sentence of its own that may run on over lines") for row in ROWS]
    assert sum(line.startswith("device") for line in printed(100, rows, fold=("memory",))) == 1
