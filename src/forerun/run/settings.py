"""The declaration of a setting: its help, unit, bounds and choices, and the check of a value against them.

A setting is declared once, as the annotation of a key of a typed dictionary such as ``run.options.RunOptions``. Command
line, HTTP bodies, jobs files and docs/commands.md are made from it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from forerun.errors import InvalidSetupError, near_matches

if sys.version_info >= (3, 12):
    from typing import TypedDict
else:  # pydantic needs this one before Python 3.12
    from typing_extensions import TypedDict

__all__ = [
    "Declared",
    "Setting",
    "TypedDict",
    "check_number",
    "checked",
    "declared",
    "flag_of",
    "setting_names",
    "whole",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Declaration of one setting.

    Attributes:
        help: One sentence, the same on the command line, over HTTP and in the documentation.
        group: Heading of the setting in the help: model, device, run, saving, sharing, job, input, price, software or
            output.
        default: Default value in words; empty where the help says it.
        metavar: Example or name of the value on the command line.
        low, high: Least and largest value; None for no bound.
        above: Value that must be exceeded.
        choices: The possible words.
        flag: Name on the command line without dashes, if it differs from the name in Python.
        words: Its name in messages, where that is another one.
        aliases: Earlier names, which still work.
        http_high: Largest value over HTTP, where that is less than ``high``.
        is_local: Whether the value names a file of this machine, which is refused over HTTP.
    """

    help: str
    group: str
    default: str = ""
    metavar: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    choices: tuple[str, ...] = ()
    flag: str = ""
    words: str = ""
    aliases: tuple[str, ...] = ()
    http_high: float | None = None
    is_local: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A setting with its name and the type of its values.

    Attributes:
        name: Its name in Python, over HTTP and in files.
        kind: int, float, bool, str, Path or tuple.
        element: Type of the values of a tuple.
        setting: The declaration.
    """

    name: str
    kind: type
    setting: Setting
    element: type = int

    @property
    def flag(self) -> str:
        """Name of the setting on the command line, with dashes."""
        return "--" + (self.setting.flag or self.name.replace("_", "-"))


def flag_of(name: str, options: type) -> str:
    """The name of a setting on the command line."""
    return declared(options)[name].flag


@cache
def declared(options: type) -> Mapping[str, Declared]:
    """The settings of a typed dictionary by name, in the order of their declaration."""
    hints = get_type_hints(options, include_extras=True)
    found = {}
    for name, hint in hints.items():
        kind, *metadata = get_args(hint)
        (setting,) = (item for item in metadata if isinstance(item, Setting))
        found[name] = Declared(name=name, kind=_plain(kind), setting=setting, element=_element(kind))
    return found


def _plain(hint: Any) -> type:
    """The type of a value, without None and type arguments."""
    if get_origin(hint) in (Union, UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        if any(get_origin(part) is Mapping for part in parts):
            return object  # the verb that takes a mapping checks its contents
        hint = Path if Path in parts else parts[0]
    found: type = get_origin(hint) or hint
    return tuple if found is Sequence else found


def _element(hint: Any) -> type:
    """The type of the values of a sequence; whole numbers where nothing is said."""
    for part in get_args(hint):
        if get_origin(part) is Sequence:
            (found,) = get_args(part)
            return found if isinstance(found, type) else int
    return int


def setting_names(options: type) -> dict[str, str]:
    """Present names of all settings by all of their names."""
    return {
        alias: name for name, item in declared(options).items() for alias in (name, *item.setting.aliases)
    }


def checked(given: Mapping[str, Any], options: type) -> dict[str, Any]:
    """The given settings under their present names, without None, each value checked against its declaration.

    Raises:
        InvalidSetupError: A setting is not known, is given under two names, or has an impossible value.
    """
    known, names = declared(options), setting_names(options)
    found: dict[str, Any] = {}
    for word, value in given.items():
        name = names.get(word)
        if name is None:
            raise InvalidSetupError(f"unknown setting '{word}'{near_matches(word, names)}; leave it out")
        if value is None:
            continue
        if name in found:
            raise InvalidSetupError(f"'{name}' is given twice, the second time as '{word}'; give it once")
        found[name] = _checked(known[name], value)
    return found


def check_number(item: Declared, value: Any) -> None:
    """Checks a number against the bounds of its declaration; leaves other values alone.

    Raises:
        InvalidSetupError: The number is outside.
    """
    if item.kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        _checked(item, value)


def _checked(item: Declared, value: Any) -> Any:
    setting = item.setting
    words = setting.words or item.name.replace("_", " ")
    if setting.choices:
        word = str(value).strip().lower().replace("_", "-")
        if word not in setting.choices:
            raise InvalidSetupError(
                f"unknown {words} {str(value)!r}; expected one of {', '.join(setting.choices)}"
            )
        return word
    if item.kind is bool:
        if not isinstance(value, bool):
            raise InvalidSetupError(f"{words} is either true or false, got {value!r}")
        return value
    if item.kind is int:
        return _bounded(words, whole(words, value), setting)
    if item.kind is float:
        return _bounded(words, _number(words, value), setting)
    if item.kind is tuple and item.element is not int:
        return tuple(value)
    if item.kind is tuple:
        return tuple(_bounded(words, whole(words, part), setting) for part in value)
    return value


def whole(name: str, value: Any) -> int:
    """A whole number.

    Raises:
        InvalidSetupError: The value is not a whole number.
    """
    try:
        found = None if isinstance(value, (bool, str)) else int(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or found != value:
        raise InvalidSetupError(f"{name} must be a whole number, got {value!r}")
    return found


def _number(name: str, value: Any) -> float:
    try:
        found = None if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or not isfinite(found):
        raise InvalidSetupError(f"{name} must be a finite number, got {value!r}")
    return found


def _bounded(name: str, value: Any, setting: Setting) -> Any:
    low, high, above = setting.low, setting.high, setting.above
    if low is not None and value < low:
        raise InvalidSetupError(
            f"{name} must be {'zero or more' if low == 0 else f'at least {low:g}'}, got {value}"
        )
    if above is not None and value <= above:
        raise InvalidSetupError(f"{name} must be above {'zero' if above == 0 else f'{above:g}'}, got {value}")
    if high is not None and value > high:
        most = f"{high:,.0f}" if float(high).is_integer() else f"{high:g}"
        raise InvalidSetupError(f"{name} must be at most {most}, got {value}")
    return value
