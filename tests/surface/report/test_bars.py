import io

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from forerun.surface.report.page import Bar, bar_cells, bar_text, merge_small

shares = st.floats(0, 1)


@given(shares, shares, st.integers(1, 200))
def test_bar_fills_its_line_and_no_part_vanishes(start, end, width):
    text = bar_text(start, end, width, "#")
    assert len(text) == width
    assert ("#" in text) == (end > start)


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=8), st.integers(20, 100))
def test_parts_one_after_another_leave_no_gap(sizes, width):
    total = sum(sizes)
    start = 0.0
    covered = set()
    for size in sizes:
        end = min(1.0, start + size / total)
        first, last = bar_cells(start, end, width)
        covered |= set(range(first, last))
        start = end
    assert covered == set(range(width))


def test_what_lies_beyond_the_line_is_cut_off():
    assert bar_text(0.5, 3.0, 10, "#") == "     #####"
    assert bar_text(2.0, 3.0, 4, "#") == "   #"


def test_small_parts_merge_and_the_sum_stays():
    parts = (("a", 50.0), ("b", 48.5), ("c", 0.8), ("d", 0.7))
    merged = merge_small(parts)
    assert merged == [("a", 50.0), ("b", 48.5), ("other (2 parts)", 1.5)]


def test_a_single_small_part_keeps_its_name_and_nothing_is_no_part():
    assert merge_small((("a", 99.5), ("c", 0.0), ("b", 0.5))) == [("a", 99.5), ("b", 0.5)]
    assert merge_small((("a", 99.5), ("b", 0.5))) == [("a", 99.5), ("b", 0.5)]


def test_terminal_without_block_signs_gets_plain_ones():
    file = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    Console(file=file, width=12).print(Bar(0.0, 0.5))
    file.seek(0)
    assert file.read().rstrip() == "######"
