"""No room grows beyond its figure in ``rooms.toml``: what is replaced goes."""

from itertools import pairwise
from pathlib import Path

import pytest

from architecture.rooms import Size, complaints, kept_sizes, sizes

TESTS = Path(__file__).parents[1]


def test_no_room_grew():
    assert complaints(sizes(), kept_sizes()) == []


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"a": Size(11, 2)}, "a may have 10 lines in 2 modules, and has 11 in 2; make it smaller, or raise"),
        ({"a": Size(9, 3)}, "a may have 10 lines in 2 modules, and has 9 in 3"),
        (
            {"a": Size(10, 2), "b": Size(5, 1)},
            'b has no figure; add "b" = { lines = 5, modules = 1 } to rooms',
        ),
        ({}, "a is gone; remove its line"),
    ],
)
def test_growth_is_told(now, words):
    (told,) = complaints(now, {"a": Size(10, 2)})
    assert told.startswith(words)


def test_a_smaller_room_is_welcome():
    assert complaints({"a": Size(1, 1)}, {"a": Size(10, 2)}) == []


def test_no_two_test_files_share_a_name():
    """pytest imports test files by name alone: of two alike it collects one and the whole run fails."""
    names = sorted(path.name for path in TESTS.rglob("test_*.py"))
    assert [one for one, next_one in pairwise(names) if one == next_one] == []
