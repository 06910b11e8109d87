"""Plans, predictions and curves of scaling read back from the JSON that the command line and the server write."""

from __future__ import annotations

import json
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from typing import Any, Union, get_args, get_origin, get_type_hints

from forerun.base.errors import UsageError
from forerun.prediction.estimate import Estimate
from forerun.question.run import Run
from forerun.search.plan_answer import Plan
from forerun.search.scale import ScaleCurve

__all__ = ["Readable", "read_answer"]


Readable = Plan | Estimate | ScaleCurve
"""An answer of which a report can be made."""

_EXPECTED = "expected what 'forerun predict --json', 'forerun plan --json' or 'forerun scale --json' printed"


def read_answer(text: str, where: str = "the input") -> Readable:
    """The plan, prediction or curve of scaling of a JSON text.

    Raises:
        UsageError: The text is not JSON, or none of these.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{where}: {_EXPECTED}, got no JSON ({error})") from error
    kinds: tuple[type[Readable], ...] = (Plan, Estimate, ScaleCurve)
    for kind in kinds:
        if isinstance(found, dict) and _needed(kind) <= set(found):
            return _read(kind, found, where)
    raise UsageError(
        f"{where}: {_EXPECTED} in this version, for devices and not for parameter servers, got other JSON"
    )


def _needed(kind: Any) -> set[str]:
    """Fields of a dataclass that have no default; the others came with later versions."""
    return {
        field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
    }


def _read(kind: type[Readable], found: dict[str, Any], where: str) -> Readable:
    try:
        if kind is Plan:
            counts = [tuple(item.values()) for item in found["num_rejected_by_limit"]]
            found = {**found, "num_rejected_by_limit": counts}
        answer: Readable = _value(kind, found)
    except (TypeError, KeyError, ValueError, AttributeError, AssertionError) as error:
        raise UsageError(
            f"{where}: the JSON is damaged ({type(error).__name__}: {error}); make it again"
        ) from error
    return answer


def _value(hint: Any, value: Any) -> Any:
    """A JSON value as the type that a hint names."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return (
            None if value is None else _value(next(a for a in get_args(hint) if a is not type(None)), value)
        )
    if origin is tuple:
        parts = get_args(hint)
        hints = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_value(part, item) for part, item in zip(hints, value, strict=True))
    if hint is Run:
        return _run(value)
    if is_dataclass(hint) and isinstance(hint, type):
        hints_of = get_type_hints(hint)
        present = [field.name for field in fields(hint) if field.name in value or field.name in _needed(hint)]
        return hint(**{name: _value(hints_of[name], value[name]) for name in present})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(value)
    if hint is float and isinstance(value, int | float):
        return float(value)
    if isinstance(hint, type) and not isinstance(value, hint):
        raise TypeError(f"expected {hint.__name__}, got {value!r}")
    return value


def _run(settings: dict[str, Any]) -> Run | None:
    """The run of a prediction; None where a device or a file of another machine was asked about."""
    rest = {name: value for name, value in settings.items() if name not in ("model", "device")}
    try:
        return Run.of(settings["model"], device=settings["device"], **rest)
    except UsageError:
        return None
