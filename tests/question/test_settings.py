"""A setting is one field: everything else follows from it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TypedDict

import pytest

import forerun.question.settings  # the typed dictionary of a test is declared by full names
from forerun.base.errors import InvalidSetupError
from forerun.question.options import LayoutOptions, RunOptions
from forerun.question.run import Run
from forerun.question.settings import (
    changed_fields,
    checked,
    declared,
    from_settings,
    names_needing,
    refuse,
    setting,
    told,
)


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    colour: Colour = setting(Colour.RED, help="Colour.", group="run", only_changed=True)
    delay_s: float | None = setting(None, name="delay_ms", unit=1e-3, help="Delay [ms].", group="run", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    inner: Inner
    sizes: tuple[int, ...] = setting((1,), help="Sizes.", group="run", needs="several")


def test_a_field_is_declared_read_told_and_changed_by_its_name():
    found = declared(Outer)
    assert list(found) == ["colour", "delay_ms", "sizes"]
    assert (found["colour"].setting.choices, found["colour"].setting.default) == (("red", "blue"), "red")
    part = Outer(inner=Inner(**from_settings(Inner, {"delay_ms": 250, "colour": "blue"})), sizes=(2, 3))
    assert part.inner == Inner(colour=Colour.BLUE, delay_s=0.25)
    assert told(part) == {"colour": "blue", "delay_ms": 250.0, "sizes": [2, 3]}
    changed = changed_fields(part, {("inner", "colour"): Colour.RED, ("sizes",): (4,)})
    assert changed == Outer(inner=Inner(delay_s=0.25), sizes=(4,))
    assert "colour" not in told(changed)


def test_what_has_no_meaning_is_refused_by_its_flag():
    assert names_needing(Outer, "several") == ["sizes"]
    with pytest.raises(
        InvalidSetupError, match="--sizes cannot be used here: there is one; leave it out, or"
    ):
        refuse({"sizes": (2,)}, ["sizes"], "there is one", "give more")


def test_bounds_and_names_are_those_of_the_field():
    with pytest.raises(InvalidSetupError, match="delay ms must be zero or more, got -1"):
        checked({"delay_ms": -1}, Outer)
    with pytest.raises(InvalidSetupError, match="unknown setting 'color'; did you mean colour"):
        checked({"color": "red"}, Outer)


def test_every_setting_that_a_run_holds_is_a_word_of_a_question_and_told_by_a_run():
    held, words = declared(Run), declared(RunOptions)
    assert set(held) <= set(words)
    assert set(words) <= set(declared(LayoutOptions))
    for name, item in held.items():
        assert words[name].setting == item.setting
        assert item.path


def test_a_word_beside_fields_is_declared_by_its_key():
    class Options(TypedDict, total=False):
        size: "forerun.question.options.Annotated[int | None, forerun.question.options.Setting(help='S.', group='x')]"

    assert checked({"size": 2}, Options) == {"size": 2}
