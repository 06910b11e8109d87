"""Answers as JSON: frozen dataclasses as the types that JSON has, and back from a file that may be damaged."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Set
from enum import Enum, EnumType
from functools import partial
from importlib import import_module
from pathlib import PurePath
from types import MappingProxyType, NoneType, UnionType
from typing import Any, cast, get_args, get_origin, get_type_hints


class Answer:
    """A frozen dataclass that answers a question; ``--json`` prints its ``as_dict``."""

    __slots__ = ()

    def json_fields(self) -> Mapping[str, Any]:
        """Names and values of the JSON object, in order: the fields, unless a class says otherwise."""
        return fields_of(self)

    def as_dict(self) -> dict[str, Any]:
        """The answer as types that JSON has, under the names of ``json_fields``."""
        found: dict[str, Any] = plain(self)
        return found

    def to_dict(self) -> dict[str, Any]:
        """The same as ``as_dict``, by the name that libraries of tables use."""
        return self.as_dict()

    def to_frame(self) -> Any:
        """The rows of the answer as a ``pandas.DataFrame``, an interval as three columns; needs pandas."""
        return _objects().frame_of(self)

    def plot(self) -> Any:
        """The chart of the answer as a figure of matplotlib, which a notebook shows."""
        return _objects().plot_of(self)

    def __str__(self) -> str:
        """The page that the command line prints, for answers that have one."""
        return str(_objects().text_of(self)) if _objects().has_page(self) else repr(self)

    def _repr_html_(self) -> str | None:
        """The same page for a notebook."""
        return str(_objects().html_of(self)) if _objects().has_page(self) else None


def _objects() -> Any:
    """The module that shows answers, by its name: a base imports nothing of the rooms that stand on it."""
    return import_module("forerun.surface.report.objects")


def fields_of(answer: Any) -> dict[str, Any]:
    """Fields of a dataclass by name, their values as they are."""
    return {field.name: getattr(answer, field.name) for field in dataclasses.fields(answer)}


def plain(value: Any) -> Any:
    """A value as types that JSON has.

    Dataclasses and mappings become objects, arrays, tuples and sets become lists, enumerations their values, paths
    text; a number that is not finite becomes None, because JSON has no sign for it.

    Raises:
        TypeError: The value has a type that cannot be converted.

    >>> plain({1: (2.0, math.inf), "folder": PurePath("a") / "b"})
    {'1': [2.0, None], 'folder': 'a/b'}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_key(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | Set):
        return [plain(item) for item in value]
    if isinstance(value, Answer):
        return plain(value.json_fields())
    if dataclasses.is_dataclass(value):
        return plain(fields_of(value))
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and numbers of NumPy, which is not imported for them
        return plain(value.tolist())
    raise TypeError(f"expected a dataclass or a plain value in an answer, got {type(value).__name__}")


def _key(key: Any) -> str:
    key = plain(key)
    return f"{key:g}" if isinstance(key, float) else str(key)


_MOST = 1e18
"""Largest number that is taken for a size."""


def from_plain(
    kind: Any,
    value: Any,
    name: str = "",
    *,
    least: float = 0.0,
    ignores_unknown: bool = False,
    readers: Mapping[Any, Callable[[Any], Any]] = MappingProxyType({}),
) -> Any:
    """A value of a type from what JSON made of it: the reverse of ``plain`` for dataclasses.

    Numbers must be finite, and a whole number may stand for a float; an unknown name is refused and a missing one takes
    its default.

    Args:
        kind: A dataclass, or a type of its fields: bool, int, float, str, an enumeration of words, None, a tuple, a
            mapping by text, a choice of one of these and None, or ``Any``.
        value: The value.
        name: Its name, for messages.
        least: Smallest number; that of sizes if it is not given.
        ignores_unknown: Whether unknown names are left out instead, such as those of another version.
        readers: Functions that read what has a form of its own, by its type.

    Raises:
        ValueError: The value is not of the type; the message names it.

    >>> from_plain(tuple[int, ...], [3, "x"], "shape")
    Traceback (most recent call last):
    ValueError: shape 1: expected int, got 'x'
    """
    if kind is Any:
        return value
    choices = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if value is None and NoneType in choices:
        return None
    # Two types besides None would leave open which one a value is.
    (kind, *others) = [choice for choice in choices if choice is not NoneType]
    if others:
        raise TypeError(f"{name}: expected one type and perhaps None, got {choices}")
    if kind in readers:
        return readers[kind](value)
    again = partial(from_plain, least=least, ignores_unknown=ignores_unknown, readers=readers)
    if dataclasses.is_dataclass(kind):
        hints, given = get_type_hints(kind), _fields_given(kind, value, name, ignores_unknown=ignores_unknown)
        fields = {key: again(hints[key], item, f"{name} {key}".strip()) for key, item in given.items()}
        return cast(Any, kind)(**fields)
    inner = get_args(kind)
    if get_origin(kind) is Mapping and isinstance(value, Mapping):
        return {key: again(inner[1], item, f"{name} {_short(key)}") for key, item in value.items()}
    if get_origin(kind) is tuple and isinstance(value, list | tuple):
        if inner[-1] is ...:
            inner = (inner[0],) * len(value)
        if len(inner) == len(value):
            pairs = enumerate(zip(inner, value, strict=True))
            return tuple(again(each, item, f"{name} {index}") for index, (each, item) in pairs)
    if isinstance(kind, EnumType):
        return kind(value)
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if kind in (int, float) and is_number and least <= value <= _MOST:
        return kind(value)
    if kind in (bool, str) and isinstance(value, kind):
        return value
    raise ValueError(f"{name}: expected {getattr(kind, '__name__', kind)}, got {_short(value)!r}")


def _short(value: Any) -> str:
    return str(value)[:60]


def needed_fields(kind: Any) -> list[str]:
    """Fields of a dataclass that have no default."""
    fields = dataclasses.fields(kind)
    return [field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING]


def _fields_given(kind: Any, value: Any, name: str, *, ignores_unknown: bool) -> dict[str, Any]:
    """The fields of a dataclass that an object of JSON has, none of which may be missing without a default."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: expected the fields of {kind.__name__}, got {_short(value)!r}")
    known = {field.name for field in dataclasses.fields(kind)}
    for unknown in () if ignores_unknown else value.keys() - known:
        raise ValueError(f"{name} {_short(unknown)}: no field of {kind.__name__}".strip())
    for needed in needed_fields(kind):
        if needed not in value:
            raise ValueError(f"{name} {needed}: missing".strip())
    return {key: item for key, item in value.items() if key in known}
