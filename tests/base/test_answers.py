import json
import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from pathlib import Path

import numpy as np
import pytest

from forerun.base.answers import Answer, fields_of, plain


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole(Answer):
    parts: tuple[Part, ...]
    colour: Colour = Colour.RED
    folder: Path = Path("a/b")
    errors: dict[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed(Answer):
    parts: tuple[Part, ...]
    rows: np.ndarray

    def json_fields(self):
        return {"time_s": sum(part.time_s for part in self.parts), "whole": Whole(parts=self.parts)}


PARTS = (Part(name="x", time_s=1.0), Part(name="y", time_s=np.float64(0.5)))


def test_fields_become_an_object_in_their_order():
    found = Whole(parts=PARTS, errors={0.5: math.nan, 0.25: 1.0}).as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == {
        "parts": [{"name": "x", "time_s": 1.0}, {"name": "y", "time_s": 0.5}],
        "colour": "red",
        "folder": "a/b",
        "errors": {"0.5": None, "0.25": 1.0},
    }
    assert list(found) == ["parts", "colour", "folder", "errors"]


def test_a_class_may_name_its_own_fields_also_inside_another():
    found = Summed(parts=PARTS, rows=np.zeros(3))
    assert found.as_dict() == {"time_s": 1.5, "whole": Whole(parts=PARTS).as_dict()}
    assert plain([found]) == [found.as_dict()]
    assert set(fields_of(found)) == {"parts", "rows"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.array([[1.0, math.inf]]), [[1.0, None]]),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (Level.LOW, 1),
        ({Colour.RED: 1, 4: 2}, {"red": 1, "4": 2}),
        (-math.inf, None),
        (frozenset({"only"}), ["only"]),
        ((), []),
    ],
)
def test_values_of_other_types(value, expected):
    found = plain(value)
    assert found == expected
    assert type(found) is type(expected)
    json.dumps(found, allow_nan=False)


def test_what_is_no_answer_is_refused():
    with pytest.raises(TypeError, match="got complex"):
        Whole(parts=(Part(name="x", time_s=1j),)).as_dict()
