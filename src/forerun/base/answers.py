"""Answers as JSON: converts frozen dataclasses to the types that JSON has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from enum import Enum
from importlib import import_module
from pathlib import PurePath
from typing import Any

__all__ = ["Answer", "fields_of", "plain"]


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
