"""Logs that trainers write by themselves, and scalars of TensorBoard, as columns of numbers.

    trainer_state.json      Trainer of Hugging Face: its log history, one row an entry
    *.jsonl, *.json         rows of Weights & Biases (``wandb-history.jsonl``, ``run.history().to_json()``), or of any
                            script that writes an object a row with its step
    *.wandb                 what a run of W&B has written, synchronised or not
    mlruns/EXPERIMENT/RUN   MLflow: metrics/NAME holds lines of timestamp [ms], value and step, params/NAME a value
    mlflow.db               the same in SQLite, several runs

A ``.wandb`` file is LevelDB's log: blocks of 32 KiB, records with checksum (4 bytes), length (2) and kind (1). Each is
a ``Record``: history (field 2) with items (1) of key (1) or nested keys (2) and a value as JSON (16).

TensorBoard's event files are read without TensorBoard.

A file is a sequence of records: length (8 bytes, little endian), its checksum (4), the message, its checksum (4). The
message is a protocol buffer ``Event``: wall_time (field 1, double), step (2), summary (5) with values (1) of tag (1)
and simple_value (2, float) or tensor (8) with float_val (5) or tensor_content (4).

Source of the formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, summary.proto,
tensor.proto; wandb/proto/wandb_internal.proto; mlflow/store/tracking/file_store.py, dbmodels/models.py. A record that
is cut off at the end, as a running job leaves it, ends the reading.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import RecordError
from forerun.jobs.forecasting.curve import Floats

TRAINER_STATE = "trainer_state.json"

_NOT_METRICS = re.compile(r"runtime|per_second|flos|tokens_seen|grad_norm|memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumns:
    """Columns of a log.

    Attributes:
        columns: Numbers by name, NaN where a row has none, infinite where it was written as no number, (rows,) each.
        planned_end: Length that the run was set up for, in ``planned_unit``; None where the log does not say.
        planned_unit: "epoch" or "step".
        is_sparse: Whether an empty place is a row of another metric; in a table it may be a NaN that was written so.
    """

    columns: dict[str, Floats]
    planned_end: float | None = None
    planned_unit: str = "epoch"
    is_sparse: bool = True


def read_trainer_state(file: Path) -> LogColumns:
    """The log history of a ``trainer_state.json``.

    Raises:
        RecordError: The file cannot be read, or has no log history.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        history = [row for row in document["log_history"] if "step" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        got = str(error) if isinstance(error, (OSError, ValueError)) else "JSON of another form"
        raise RecordError(
            f"{file}: expected the state of a Hugging Face Trainer with its 'log_history', got {got}"
        ) from error
    if not history:
        raise RecordError(
            f"{file}: the log history is empty; set logging_steps or evaluate in the course of the run"
        )
    columns = columns_of_rows(
        [{k: v for k, v in row.items() if not _NOT_METRICS.search(k)} for row in history]
    )
    last = history[-1]
    steps, end = document.get("max_steps"), None
    # Epochs of streamed data begin anew where the run was resumed.
    has_epochs = "epoch" in columns and bool(np.all(np.diff(columns["epoch"]) >= 0))
    if isinstance(steps, (int, float)) and steps > 0 and last["step"] > 0:
        end = float(steps) * (float(last["epoch"]) / float(last["step"]) if has_epochs else 1.0)
    return LogColumns(columns=columns, planned_end=end, planned_unit="epoch" if has_epochs else "step")


_STEPS_OF_TRAINERS = ("step", "global_step", "trainer/global_step", "train/global_step", "_step")
"""Steps in a row of W&B: its own number, the last, counts calls of its ``log`` and not updates of the weights."""


def of_tracker(columns: Mapping[str, Floats]) -> dict[str, Floats]:
    """Columns of a W&B run under the names that a CSV has."""
    lowered = {name.lower(): name for name in columns}
    step = next((lowered[name] for name in _STEPS_OF_TRAINERS if name in lowered), None)
    names = {step: "step", "_runtime": "elapsed_s"}
    if "epoch" not in lowered:
        names["train/epoch"] = "epoch"
    return {
        names.get(name, name): column
        for name, column in columns.items()
        if name in names or not (name.startswith("_") or name.lower() in _STEPS_OF_TRAINERS)
    }


def read_history(file: Path) -> LogColumns:
    """Rows in JSON: one object a line, a list of them, the columns that pandas writes, or the state of a trainer.

    Raises:
        RecordError: The file cannot be read, or holds no such rows.
    """
    try:
        text = file.read_text(encoding="utf-8")
        is_lines = file.suffix == ".jsonl" or _begins_with_rows(text)
        document: Any = _lines_of_json(text) if is_lines else json.loads(text)
        if isinstance(document, dict) and "log_history" in document:
            return read_trainer_state(file)
        if isinstance(document, dict):
            document = _rows_of_columns(document)
        columns = columns_of_rows([{**row} for row in document])
    except (OSError, ValueError, TypeError, KeyError, StopIteration) as error:
        # What other JSON files hold fails in Python's own words, which say nothing of the file.
        got = str(error) if isinstance(error, (OSError, ValueError)) else "JSON of another form"
        raise RecordError(
            f'{file}: expected rows such as {{"_step": 1, "loss": 2.5}}, as W&B writes its history, got {got}'
        ) from error
    return LogColumns(columns=of_tracker(columns))


def _rows_of_columns(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the longest columns, which are lists or, as pandas writes them, objects; what else there is is no row."""
    columns = {name: column for name, column in document.items() if isinstance(column, (dict, list))}
    longest = max(map(len, columns.values()), default=0)
    whole = {name: column for name, column in columns.items() if len(column) == longest}
    rows = next(iter(whole.values()))
    return [
        {name: column[row] for name, column in whole.items()}
        for row in (rows if isinstance(rows, dict) else range(longest))
    ]


def _lines_of_json(text: str) -> list[Any]:
    """An object a line; the last is left out where it is cut off, as a running job leaves it."""
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        return [json.loads(line) for line in lines]
    except ValueError:
        if text.endswith("\n"):
            raise
        return [json.loads(line) for line in lines[:-1]]


def _begins_with_rows(text: str) -> bool:
    """True if the first two lines are an object each, whatever the file is called."""
    lines = [line.strip() for line in text.splitlines()[:2]]
    return len(lines) == 2 and all(line.startswith("{") and line.endswith("}") for line in lines)


def read_wandb(file: Path) -> LogColumns:
    """The history in a ``.wandb`` file.

    Raises:
        RecordError: The file cannot be read, is none, or has no history.
    """
    content = bytes_of(file)
    if content[:4] != b":W&B":
        raise RecordError(f"{file}: expected a run of W&B, which begins with ':W&B', got {content[:4]!r}")
    rows = []
    for record in _log_records(content):
        for history in _Message(record, file).texts(2):
            items = [_Message(item, file) for item in _Message(history, file).texts(1)]
            try:
                rows.append({_key(item): json.loads(b"".join(item.texts(16))) for item in items})
            except ValueError as error:
                raise RecordError(f"{file}: expected JSON in its history, got {error}") from error
    if not rows:
        raise RecordError(f"{file}: the run has no history; log the metric with run.log")
    return LogColumns(columns=of_tracker(columns_of_rows(rows)))


def _key(item: _Message) -> str:
    return b".".join(item.texts(1) or item.texts(2)).decode("utf-8", "replace")


_Scalar = tuple[str, int, float, float]
"""Name, step, wall time [s] and value."""

_BLOCK_BYTES, _HEAD_OF_RECORD = 32_768, 7
_FULL, _LAST = 1, 4


def _log_records(content: bytes) -> Iterator[bytes]:
    at, parts = _HEAD_OF_RECORD, b""  # the head of the file is as long as that of a record
    while at + _HEAD_OF_RECORD <= len(content):
        left = _BLOCK_BYTES - at % _BLOCK_BYTES
        if left < _HEAD_OF_RECORD:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", content, at + 4)
        at += _HEAD_OF_RECORD
        if at + size > len(content):
            return  # still being written
        parts += content[at : at + size]
        at += size
        if kind in (_FULL, _LAST):
            yield parts
            parts = b""


_LENGTHS = {"max_steps": "step", "epochs": "epoch", "num_epochs": "epoch", "max_epochs": "epoch"}
_LENGTHS |= {"num_train_epochs": "epoch"}


def is_mlflow_run(folder: Path) -> bool:
    """True for the folder of a run of MLflow."""
    return (folder / "metrics").is_dir() and (folder / "meta.yaml").is_file()


def read_mlflow_run(folder: Path) -> LogColumns:
    """Metrics and length of the run in a folder of MLflow.

    Raises:
        RecordError: A file cannot be read, or there is no metric.
    """
    rows = []
    for file in _files_below(folder / "metrics"):
        name = file.relative_to(folder / "metrics").as_posix()
        for number, line in enumerate(bytes_of(file).decode("utf-8", "replace").splitlines(), start=1):
            try:
                timestamp_ms, value, step = line.split()[:3]
                rows.append((name, int(step), float(timestamp_ms) / 1000, float(value)))
            except ValueError:
                raise RecordError(
                    f"{file}: expected a timestamp, a value and a step in line {number}, got '{line[:40]}'"
                ) from None
    params = {
        file.name: bytes_of(file).decode("utf-8", "replace") for file in _files_below(folder / "params")
    }
    return _mlflow_columns(folder, rows, params.items())


def _files_below(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def runs_of_store(file: Path) -> dict[str, str]:
    """Identifiers of the runs in MLflow's SQLite, by name, or by themselves where a name comes twice.

    Raises:
        RecordError: The file is no such store.
    """
    named = _asked(
        file, "select run_uuid, name from runs where lifecycle_stage = 'active' order by start_time"
    )
    names = [name for _, name in named]
    return {name if name and names.count(name) == 1 else run: run for run, name in named}


def read_stored_run(file: Path, run: str) -> LogColumns:
    """A run of MLflow's SQLite by its identifier.

    Raises:
        RecordError: The file is no such store, or the run has no metric.
    """
    wanted = "select key, step, timestamp, case is_nan when 1 then 'NaN' else value end from metrics where run_uuid = ?"
    rows = [
        (name, int(step), float(timestamp_ms) / 1000, _number(value))
        for name, step, timestamp_ms, value in _asked(file, f"{wanted} order by timestamp", run)
    ]
    return _mlflow_columns(file, rows, _asked(file, "select key, value from params where run_uuid = ?", run))


def _asked(file: Path, words: str, *values: str) -> list[tuple[Any, ...]]:
    try:
        with closing(sqlite3.connect(f"{file.resolve().as_uri()}?mode=ro", uri=True)) as store:
            return store.execute(words, values).fetchall()
    except sqlite3.Error as error:
        raise RecordError(f"{file}: expected the SQLite store of MLflow, got {error}") from error


def _mlflow_columns(place: Path, rows: Iterable[_Scalar], params: Iterable[tuple[str, str]]) -> LogColumns:
    columns = _by_step(rows)
    if not columns:
        raise RecordError(f"'{place}' holds no metric; log it with mlflow.log_metric")
    lengths = {
        _LENGTHS[name]: float(value) for name, value in params if name in _LENGTHS and _is_length(value)
    }
    unit = "epoch" if "epoch" in columns else "step"
    return LogColumns(columns=columns, planned_end=lengths.get(unit), planned_unit=unit)


def _is_length(value: str) -> bool:
    return value.replace(".", "", 1).isdecimal() and float(value) > 0  # -1 is a trainer's word for none


def columns_of_rows(rows: list[dict[str, Any]]) -> dict[str, Floats]:
    """Columns of the names of rows, NaN where a row has none, without those that are empty."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.asarray([_number(row.get(name)) for row in rows], dtype=float) for name in names}
    return {name: column for name, column in columns.items() if not np.isnan(column).all()}


def _number(value: object) -> float:
    if value in ("NaN", "Infinity", "-Infinity"):  # JSON has no such numbers
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.inf


EVENTS = "events.out.tfevents"
_DOUBLE_TYPE, _FLOAT_TYPE = 2, 1


def read_events(place: Path) -> dict[str, Floats]:
    """Columns ``step``, ``wall_time`` and one per tag, NaN where a tag was not written at a step.

    Args:
        place: An event file, or a folder with some, of one run.

    Raises:
        RecordError: There is none, or it holds no scalar.
    """
    files = sorted(place.rglob(f"{EVENTS}*")) if place.is_dir() else [place]
    if not files:
        raise RecordError(f"'{place}' holds no TensorBoard event file (events.out.tfevents...)")
    columns = _by_step(scalar for file in files for scalar in _scalars(file))
    if not columns:
        raise RecordError(f"'{place}' holds no scalar; log the metric with add_scalar")
    return columns


def _by_step(found: Iterable[_Scalar]) -> dict[str, Floats]:
    """Columns ``step``, ``wall_time`` and one per name; none without a scalar."""
    scalars: dict[str, dict[int, float]] = {}
    clock: dict[int, float] = {}
    for name, step, wall_time_s, value in found:
        scalars.setdefault(name, {})[step] = value
        clock[step] = wall_time_s
    if not scalars:
        return {}
    steps = sorted(clock)
    columns = {"step": np.asarray(steps, dtype=float), "wall_time": np.asarray([clock[s] for s in steps])}
    for tag, values in scalars.items():
        columns[tag] = np.asarray([_number(values.get(step)) for step in steps])
    return columns


def _scalars(file: Path) -> Iterator[_Scalar]:
    for record in _records(bytes_of(file)):
        event = _Message(record, file)
        steps, wall_times = event.numbers(2), event.texts(1)
        for summary in event.texts(5):
            for content in _Message(summary, file).texts(1):
                value = _Message(content, file)
                tag = b"".join(value.texts(1)[-1:]).decode("utf-8", "replace")
                found = _value_of(value)
                if tag and found is not None:
                    wall_time_s = struct.unpack("<d", wall_times[-1])[0] if wall_times else 0.0
                    yield tag, steps[-1] if steps else 0, wall_time_s, found


def bytes_of(file: Path) -> bytes:
    """The content of a log.

    Raises:
        RecordError: It cannot be read.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file}: the log cannot be read: {error.strerror or error}") from error


def _records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length
        if end + 4 > len(content):
            return  # still being written
        yield content[at + 12 : end]
        at = end + 4


class _Message:
    """A message of a protocol buffer: the contents of its fields, fixed-width numbers as their bytes."""

    def __init__(self, message: bytes, file: Path) -> None:
        self.file = file
        self._fields: dict[int, list[int | bytes]] = {}
        at = 0
        while at < len(message):
            key, at = _varint(message, at, file)
            kind = key & 7
            if kind == 0:
                value: int | bytes
                value, at = _varint(message, at, file)
            else:
                size = {1: 8, 5: 4}.get(kind, 0)
                if kind == 2:
                    size, at = _varint(message, at, file)
                elif not size:
                    raise _damaged(file)
                value = message[at : at + size]
                at += size
            self._fields.setdefault(key >> 3, []).append(value)

    def numbers(self, field: int) -> list[int]:
        """Whole numbers of a field."""
        return [value for value in self._fields.get(field, ()) if isinstance(value, int)]

    def texts(self, field: int) -> list[bytes]:
        """Contents of a field that are bytes: texts, messages and numbers of a fixed width."""
        return [value for value in self._fields.get(field, ()) if isinstance(value, bytes)]


def _damaged(file: Path) -> RecordError:
    return RecordError(f"{file}: expected TensorBoard events or a W&B run, got a damaged record")


def _varint(message: bytes, at: int, file: Path) -> tuple[int, int]:
    value = shift = 0
    while True:
        # No number of the format has more than 64 bits: more is damage.
        if at >= len(message) or shift > 63:
            raise _damaged(file)
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _value_of(value: _Message) -> float | None:
    """The number of a summary's value; None where it holds no single number."""
    # Of a field that stands several times the last counts, as protobuf has it.
    if tensors := value.texts(8):
        tensor = _Message(tensors[-1], value.file)
        kind = (tensor.numbers(1) or [_FLOAT_TYPE])[-1]
        content = b"".join([found for field in (4, 5, 6) for found in tensor.texts(field)][-1:])
    else:
        kind, content = _FLOAT_TYPE, b"".join(value.texts(2)[-1:])
    if kind == _FLOAT_TYPE and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    return float(struct.unpack("<d", content)[0]) if kind == _DOUBLE_TYPE and len(content) == 8 else None
