"""Measurements as plain documents (JSON), and back, with every value checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from forerun.errors import RecordError, near_matches
from forerun.records.measurement import (
    MEASUREMENT_VERSION,
    Circumstances,
    JobKind,
    Measurement,
    Outcome,
    Scalar,
    Summary,
)

__all__ = ["Document", "measurement_document", "read_document"]

Document = dict[str, Any]
"""A record as a JSON object."""

_Choice = TypeVar("_Choice", JobKind, Outcome)
_Part = TypeVar("_Part", Circumstances, Summary)

_OTHER_UNITS = ("_ms", "_us", "_ns", "_kb", "_mb", "_gb", "_kib", "_mib", "_gib")


def _field_names(kind: type[Measurement | Circumstances | Summary]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _required_names(kind: type[Measurement | Circumstances | Summary]) -> tuple[str, ...]:
    fields = dataclasses.fields(kind)
    return tuple(f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING)


# Looked up once: a million records pass through here.
_FIELDS, _REQUIRED = _field_names(Measurement), _required_names(Measurement)
_CIRCUMSTANCES, _SUMMARY = _field_names(Circumstances), _field_names(Summary)


def measurement_document(measurement: Measurement) -> Document:
    """A measurement as JSON values: enumerations as text, tuples as lists."""
    # dataclasses.asdict copies every value deeply, which takes ten times as long.
    document: Document = {name: getattr(measurement, name) for name in _FIELDS}
    document["kind"], document["outcome"] = str(measurement.kind), str(measurement.outcome)
    for name in ("repetitions_s", "warm_up_s"):
        document[name] = list(document[name])
    for name in ("parameters", "results"):
        document[name] = dict(document[name])
    around, summary = measurement.circumstances, measurement.summary
    document["circumstances"] = {name: getattr(around, name) for name in _CIRCUMSTANCES}
    document["circumstances"]["telemetry"] = dict(around.telemetry)
    if summary is not None:
        document["summary"] = {name: getattr(summary, name) for name in _SUMMARY}
    return document


def read_document(document: Mapping[str, Any], place: str) -> Measurement:
    """A measurement from a document.

    Args:
        document: Output of ``measurement_document``.
        place: Origin of the document for messages, such as a file and row.

    Raises:
        RecordError: Unknown or missing fields, impossible values, or a document of another version.
    """
    version = document.get("schema_version")
    if version != MEASUREMENT_VERSION or not _is_whole(version):
        raise RecordError(
            f"{place}: expected schema_version {MEASUREMENT_VERSION}, got {version!r}; "
            "read it with the version of forerun that wrote it"
        )
    _check_names(document, _FIELDS, _REQUIRED, place)
    measurement = Measurement(
        key=_named(document, "key", place),
        kind=_choice(JobKind, document["kind"], "kind", place),
        subject=_named(document, "subject", place),
        family=_named(document, "family", place),
        parameters=_scalars(document["parameters"], "parameters", place),
        outcome=_choice(Outcome, document["outcome"], "outcome", place),
        circumstances=_part(Circumstances, document["circumstances"], "circumstances", place),
        reason=str(document.get("reason") or ""),
        repetitions_s=_times(document.get("repetitions_s") or (), "repetitions_s", place),
        warm_up_s=_times(document.get("warm_up_s") or (), "warm_up_s", place),
        summary=_summary(document.get("summary"), place),
        results=_scalars(document.get("results") or {}, "results", place),
        schema_version=MEASUREMENT_VERSION,
    )
    if measurement.outcome is Outcome.DONE and not (measurement.repetitions_s or measurement.results):
        raise RecordError(
            f"{place}: outcome 'done' needs repetitions_s or results, got neither; drop the record or fill it in"
        )
    return measurement


def _check_names(
    document: Mapping[str, Any], known: tuple[str, ...], required: tuple[str, ...], place: str
) -> None:
    for name in required:
        if name not in document:
            raise RecordError(f"{place}: expected the field '{name}', which is missing")
    for name in document:
        if name not in known:
            raise RecordError(
                f"{place}: unknown field '{name}'{near_matches(str(name), known)} "
                "(units are part of a name: times in _s, sizes in _bytes); rename or remove it"
            )


def _named(document: Mapping[str, Any], name: str, place: str) -> str:
    value = document[name]
    if not isinstance(value, str) or not value:
        raise RecordError(f"{place}, '{name}': expected text, got {value!r}")
    return value


def _choice(kind: type[_Choice], value: Any, name: str, place: str) -> _Choice:
    try:
        return kind(value)
    except ValueError:
        raise RecordError(f"{place}, '{name}': expected one of {', '.join(kind)}, got {value!r}") from None


def _times(values: Any, name: str, place: str) -> tuple[float, ...]:
    if not isinstance(values, (list, tuple)):
        raise RecordError(f"{place}, '{name}': expected a list of seconds, got {values!r}")
    for index, value in enumerate(values):
        if not _is_number(value) or not 0 <= value < math.inf:
            raise RecordError(
                f"{place}, '{name}', item {index + 1}: expected seconds from zero, got {value!r}; "
                "drop the record or correct the time"
            )
    return tuple(map(float, values))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scalars(values: Any, name: str, place: str) -> dict[str, Scalar]:
    if not isinstance(values, Mapping):
        raise RecordError(f"{place}, '{name}': expected names with values, got {values!r}")
    for key, value in values.items():
        if value is not None and not isinstance(value, (str, int, float, bool)):
            raise RecordError(f"{place}, '{name}', '{key}': expected a number, text or flag, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise RecordError(
                f"{place}, '{name}', '{key}': expected a finite number, got {value}; leave it out"
            )
        if key.endswith(_OTHER_UNITS):
            raise RecordError(
                f"{place}, '{name}', '{key}': expected times in seconds (_s) and sizes in bytes (_bytes); "
                "convert the value and rename it"
            )
        if isinstance(value, (int, float)) and value < 0 and key.endswith("_s"):
            raise RecordError(
                f"{place}, '{name}', '{key}': expected seconds from zero, got {value}; "
                "drop the record or correct the time"
            )
    return dict(values)


def _part(kind: type[_Part], values: Any, name: str, place: str) -> _Part:
    if not isinstance(values, Mapping):
        raise RecordError(f"{place}, '{name}': expected names with values, got {values!r}")
    checks = _CHECKS[kind]
    required = _required_names(kind) if len(values) < len(checks) else ()
    _check_names(values, tuple(checks), required, f"{place}, '{name}'")
    for key, value in values.items():
        is_right, expected = checks[key]
        if not is_right(value):
            raise RecordError(f"{place}, '{name}', '{key}': expected {expected}, got {value!r}")
    part: _Part = kind(**values)
    return part


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def _is_finite_or_none(value: Any) -> bool:
    return value is None or _is_finite(value)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_finite(values: Any) -> bool:
    return isinstance(values, Mapping) and all(map(_is_finite, values.values()))


_BY_HINT: dict[str, tuple[Callable[[Any], bool], str]] = {
    "str": (_is_text, "text"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_finite, "a finite number"),
    "float | None": (_is_finite_or_none, "a finite number or nothing"),
    "bool": (_is_flag, "true or false"),
    "dict[str, float]": (_are_finite, "names with finite numbers"),
}
# The hints of the fields are the schema: a field of another type cannot be added without its check.
_CHECKS = {
    kind: {field.name: _BY_HINT[str(field.type)] for field in dataclasses.fields(kind)}
    for kind in (Circumstances, Summary)
}


def _summary(values: Any, place: str) -> Summary | None:
    if values is None:
        return None
    summary = _part(Summary, values, "summary", place)
    if not 0 <= summary.low_s <= summary.median_s <= summary.high_s:
        raise RecordError(
            f"{place}, 'summary': expected 0 <= low_s <= median_s <= high_s, got "
            f"{summary.low_s}, {summary.median_s}, {summary.high_s}"
        )
    return summary
