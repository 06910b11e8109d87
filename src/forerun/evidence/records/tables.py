"""forerun's own table format: one row per record, the columns are the fields of ``StepRecord``."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError, near_matches
from forerun.base.extras import needing
from forerun.base.frames import (
    check_columns,
    check_positive,
    check_unique,
    read_table,
)
from forerun.evidence.records.measurement import (
    MEASUREMENT_VERSION,
    Circumstances,
    Document,
    JobKind,
    Measurement,
    Outcome,
    Scalar,
    read_document,
)
from forerun.evidence.records.model_names import subject_family
from forerun.evidence.records.step_record import SCHEMA_VERSION, StepRecord
from forerun.question.devices import find_device
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision

__all__ = [
    "RECORD_COLUMNS",
    "SHORT_COLUMNS",
    "above_zero",
    "is_short_table",
    "read_records",
    "read_short_steps",
    "read_step_table",
    "write_records",
    "yes_or_no",
]

RECORD_COLUMNS = tuple(field.name for field in dataclasses.fields(StepRecord))
"""Columns of forerun's own format, beside ``schema_version``."""

_REQUIRED_COLUMNS = tuple(
    field.name for field in dataclasses.fields(StepRecord) if field.default is dataclasses.MISSING
)


def write_records(records: Iterable[StepRecord], path: str | Path) -> None:
    """Write records to a ``.csv`` or ``.parquet`` file in forerun's own format."""
    with needing("writing a table of records"):
        import pandas as pd

    path = Path(path)
    frame = pd.DataFrame(
        [_to_cells(record) for record in records], columns=["schema_version", *RECORD_COLUMNS]
    )
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path, index=False)
    else:
        raise RecordError(f"{path.name}: records are written to .csv or .parquet, got '{path.suffix}'")


def _to_cells(record: StepRecord) -> dict[str, object]:
    cells: dict[str, object] = {"schema_version": SCHEMA_VERSION}
    for name in RECORD_COLUMNS:
        value = getattr(record, name)
        cells[name] = "x".join(map(str, value)) if name == "input_shape" and value is not None else value
    return cells


def read_records(path: str | Path) -> list[StepRecord]:
    """Records of a file in forerun's own format: the columns are the fields of ``StepRecord``.

    Optional columns may be left out or empty. Shapes are written ``3x224x224``.
    """
    path = Path(path)
    frame = read_table(path)
    check_columns(frame, path.name, ["schema_version", *_REQUIRED_COLUMNS], RECORD_COLUMNS)
    check_unique(frame, path.name, ["source", "row_id"])
    check_positive(frame, path.name, ["step_time_s"])
    return [_from_cells(row, path.name, index + 1) for index, row in enumerate(frame.to_dict("records"))]


def read_step_table(path: str | Path) -> Iterator[Measurement]:
    """Records of such a file as measurements of one repetition, with the circumstances that the table gives.

    Raises:
        RecordError: Columns or values are missing or impossible.
    """
    for number, record in enumerate(read_records(path), start=1):
        yield read_document(_step_document(record), f"{Path(path).name}, row {number}")


_RESULTS = ("step_time_std_s", "num_parameters", "peak_memory_bytes", "next_larger_batch_failed", "note")
_ELSEWHERE = (
    "model",
    "family",
    "device",
    "batch_size_per_device",
    "step_time_s",
    "framework",
    "framework_version",
)


def _step_document(record: StepRecord) -> Document:
    identity = json.dumps([record.source, record.row_id])
    values = _to_cells(record)
    asked = [name for name in RECORD_COLUMNS if name not in (*_RESULTS, *_ELSEWHERE)]

    def present(names: Iterable[str]) -> Document:
        return {name: values[name] for name in names if values[name] not in (None, "")}

    return {
        "schema_version": MEASUREMENT_VERSION,
        "key": hashlib.sha256(identity.encode()).hexdigest()[:32],
        "kind": str(JobKind.STEP),
        "subject": record.model,
        "family": record.family,
        "parameters": {"batch_size": record.batch_size_per_device, **present(asked)},
        "outcome": str(Outcome.DONE),
        "repetitions_s": [record.step_time_s],
        "results": present(_RESULTS),
        "circumstances": {
            "device": record.device,
            "device_title": record.device,
            "framework": record.framework,
            "framework_version": record.framework_version,
            "occasion": record.source,
        },
    }


def _from_cells(row: Mapping[Any, Any], table: str, number: int) -> StepRecord:
    import pandas as pd

    if str(row["schema_version"]) != str(SCHEMA_VERSION):
        raise RecordError(
            f"{table}, row {number}: expected schema_version {SCHEMA_VERSION}, got {row['schema_version']}; "
            "write the file again with this version of forerun"
        )
    values: dict[str, Any] = {}
    for name, cell in row.items():
        if name == "schema_version" or pd.isna(cell) or cell == "":
            continue
        try:
            values[name] = _PARSERS[name](cell)
        except ValueError as error:
            raise RecordError(
                f"{table}, column '{name}', row {number}: '{cell}' cannot be read: {error}"
            ) from error
    missing = [name for name in _REQUIRED_COLUMNS if name not in values]
    if missing:
        raise RecordError(
            f"{table}, column '{missing[0]}', row {number}: expected a value, got an empty cell"
        )
    return StepRecord(**values)


def _whole_number(cell: object) -> int:
    value = float(str(cell))
    if value != int(value):
        raise ValueError("expected a whole number")
    return int(value)


def _flag(cell: object) -> bool:
    words = {"true": True, "1": True, "false": False, "0": False}
    if str(cell).lower() not in words:
        raise ValueError("expected True or False")
    return words[str(cell).lower()]


def _shape(cell: object) -> tuple[int, ...]:
    return tuple(_whole_number(size) for size in str(cell).split("x"))


def _choice(
    kind: type[Precision] | type[Phase] | type[Layout] | type[OptimizerImplementation],
) -> Callable[[object], object]:
    def parse(cell: object) -> object:
        word = str(cell).lower()
        known = [str(member) for member in kind]
        if word not in known:
            raise ValueError(f"expected one of {', '.join(known)}{near_matches(word, known)}")
        return kind(word)

    return parse


_PARSERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(RECORD_COLUMNS, str),
    **dict.fromkeys(("step_time_s", "step_time_std_s", "peak_memory_bytes"), float),
    **dict.fromkeys(
        (
            "batch_size_per_device",
            "image_size",
            "sequence_length",
            "num_devices",
            "num_parameters",
            "next_larger_batch_failed",
        ),
        _whole_number,
    ),
    **dict.fromkeys(("compile", "includes_optimizer", "fused_attention", "autocast_backward"), _flag),
    "input_shape": _shape,
    "precision": _choice(Precision),
    "phase": _choice(Phase),
    "layout": _choice(Layout),
    "optimizer_implementation": _choice(OptimizerImplementation),
}


_NEEDED = ("model", "device", "batch_size")
_TIMES = ("step_time_s", "images_per_s")
_WORDS = ("precision", "phase", "layout", "optimizer")
_WHOLE_NUMBERS = ("image_size", "sequence_length")
SHORT_COLUMNS = (*_NEEDED, *_TIMES, *_WORDS, "compile", *_WHOLE_NUMBERS, "torch_version")
"""Columns such a table may have: the first three and a time or a speed are needed."""

_YES, _NO = ("true", "yes", "1"), ("", "false", "no", "0")
_DEFAULTS: dict[str, Scalar] = {"precision": "fp32", "phase": "train", "layout": "nchw", "optimizer": "sgd"}


def is_short_table(columns: tuple[str, ...]) -> bool:
    """True if a table with these columns is one of steps that a person wrote."""
    return set(_NEEDED) <= set(columns) and "row_id" not in columns and bool(set(_TIMES) & set(columns))


def read_short_steps(path: Path) -> Iterator[Measurement]:
    """Measured steps of a short table; a training step is fp32 with SGD unless a column says otherwise.

    Args:
        path: A ``.csv`` file with some of ``SHORT_COLUMNS``.

    Raises:
        RecordError: A column is unknown, or a cell is damaged or impossible.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        unknown = sorted(set(reader.fieldnames or ()) - set(SHORT_COLUMNS))
        if unknown:
            raise RecordError(
                f"{path.name}: unknown column '{unknown[0]}'; the columns are {', '.join(SHORT_COLUMNS)}"
            )
        for number, row in enumerate(reader, start=1):
            cells = {name: (row.get(name) or "").strip() for name in SHORT_COLUMNS}
            yield _measurement(cells, number, f"{path.name}, row {number}")


def _measurement(cells: Mapping[str, str], number: int, place: str) -> Measurement:
    for name in _NEEDED:
        if not cells[name]:
            raise RecordError(f"{place}: '{name}' is empty; fill it in")
    device = find_device(cells["device"])
    batch_size = int(_positive(cells["batch_size"], "batch_size", place))
    parameters: dict[str, Scalar] = {
        "batch_size": batch_size,
        "compile": yes_or_no(cells["compile"], "compile", place),
    }
    for name in _WORDS:
        parameters[name] = cells[name].lower() or _DEFAULTS[name]
    if parameters["phase"] != "train":
        parameters["optimizer"] = "none"
    for name in _WHOLE_NUMBERS:
        if cells[name]:
            parameters[name] = int(_positive(cells[name], name, place))
    return Measurement(
        key=f"row {number}",
        kind=JobKind.STEP,
        subject=cells["model"],
        family=subject_family(cells["model"]),
        parameters=parameters,
        outcome=Outcome.DONE,
        repetitions_s=(_step_time_s(cells, batch_size, place),),
        circumstances=Circumstances(
            device=device.name, device_title=device.title, framework_version=cells["torch_version"]
        ),
    )


def _step_time_s(cells: Mapping[str, str], batch_size: int, place: str) -> float:
    given = [name for name in _TIMES if cells[name]]
    if len(given) != 1:
        raise RecordError(
            f"{place}: expected either step_time_s or images_per_s, got {' and '.join(given) or 'neither'}"
        )
    value = _positive(cells[given[0]], given[0], place)
    return value if given[0] == "step_time_s" else batch_size / value


def _positive(text: str, name: str, place: str) -> float:
    value = above_zero(text)
    if value is None:
        raise RecordError(f"{place}: expected a positive number in '{name}', got '{text}'")
    return value


def above_zero(text: str) -> float | None:
    """A finite number above zero; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None


def yes_or_no(text: str, name: str, place: str) -> bool:
    """The flag that a cell holds; an empty one is False.

    Raises:
        RecordError: It says neither.
    """
    if text.lower() not in (*_YES, *_NO):
        raise RecordError(f"{place}: expected yes or no in '{name}', got '{text}'")
    return text.lower() in _YES
