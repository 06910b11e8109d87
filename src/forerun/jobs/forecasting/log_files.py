"""Logs that trainers write by themselves, and scalars of TensorBoard, as columns of numbers.

    trainer_state.json      Trainer of Hugging Face: its log history, one row an entry
    *.log, *.txt            training scripts of the nanoGPT family:

        step:125/1390 val_loss:5.9012 train_time:22981ms step_avg:183.85ms      modded-nanogpt
        s:250 tel:6.1557                                                        llm.c (tel and trl: test and train loss)
        250 val 5.9650                                                          build-nanogpt

Rows at step 0 of the latter say what an untrained model does, and are left out.

TensorBoard's event files are read without TensorBoard.

A file is a sequence of records: length (8 bytes, little endian), its checksum (4), the message, its checksum (4). The
message is a protocol buffer ``Event``: wall_time (field 1, double), step (2), summary (5) with values (1) of tag (1)
and simple_value (2, float) or tensor (8) with float_val (5) or tensor_content (4).

Source of the formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, summary.proto,
tensor.proto. A record that is cut off at the end, as a running job leaves it, ends the reading.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.errors import RecordError
from forerun.jobs.forecasting.curve import Floats

TRAINER_STATE = "trainer_state.json"

_NOT_METRICS = re.compile(r"runtime|per_second|flos|tokens_seen|grad_norm|memory")
_STEP = r"(?:step|s):(?P<step>\d+)(?:/(?P<last>\d+))?\s"
_NAMED_VALUE = re.compile(
    r"(?P<name>[a-z_]+)\s*:\s*(?P<value>[-+.\deE]+|nan|inf)(?P<unit>ms)?", re.IGNORECASE
)
_PLAIN = re.compile(r"(?P<step>\d+) (?P<name>val|train|hella) (?P<value>[-+.\deE]+|nan)\s*")
_NAMES = {"tel": "val_loss", "trl": "train_loss", "val": "val_loss", "train": "train_loss", "eval": "hella"}
_HEAD_BYTES = 1_000_000
_FEWEST_LINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LogColumns:
    """Columns of a log.

    Attributes:
        columns: Numbers by name, NaN where a row has none, (rows,) each.
        planned_end: Length that the run was set up for, in ``planned_unit``; None where the log does not say.
        planned_unit: "epoch" or "step".
    """

    columns: dict[str, Floats]
    planned_end: float | None = None
    planned_unit: str = "epoch"


def read_trainer_state(file: Path) -> LogColumns:
    """The log history of a ``trainer_state.json``.

    Raises:
        RecordError: The file cannot be read, or has no log history.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        history = [row for row in document["log_history"] if "step" in row]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(
            f"{file}: expected the state of a Hugging Face Trainer with its 'log_history', got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not history:
        raise RecordError(
            f"{file}: the log history is empty; set logging_steps or evaluate in the course of the run"
        )
    columns = _as_columns([{k: v for k, v in row.items() if not _NOT_METRICS.search(k)} for row in history])
    last = history[-1]
    steps, end = document.get("max_steps"), None
    has_epochs = "epoch" in columns and bool(np.all(np.isfinite(columns["epoch"])))
    if isinstance(steps, (int, float)) and steps > 0 and last["step"] > 0:
        end = float(steps) * (float(last["epoch"]) / float(last["step"]) if has_epochs else 1.0)
    return LogColumns(columns=columns, planned_end=end, planned_unit="epoch" if has_epochs else "step")


def is_text_log(file: Path) -> bool:
    """True if a text file has lines of one of the known forms."""
    if file.suffix not in (".log", ".txt"):
        return False
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return False
    return len(_rows(head)[0]) >= _FEWEST_LINES


def read_text_log(file: Path) -> LogColumns:
    """The losses in a log of a script of the nanoGPT family.

    Raises:
        RecordError: The file cannot be read, or has no such line.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise RecordError(f"{file}: the log cannot be read: {error.strerror or error}") from error
    rows, last = _rows(text)
    if not rows:
        raise RecordError(
            f"{file}: expected lines such as 'step:125/1390 val_loss:5.9', 's:250 tel:6.1' or '250 val 5.9', got none; "
            "write the curve as a CSV with the columns step and val_loss"
        )
    return LogColumns(columns=_as_columns(rows), planned_end=last, planned_unit="step")


def _rows(text: str) -> tuple[list[dict[str, Any]], float | None]:
    """Rows of the lines that hold a loss, and the last step that they name."""
    rows, last = [], None
    for line in text.splitlines():
        plain = _PLAIN.fullmatch(line)
        named = None if plain else re.match(_STEP, line)
        if plain:
            found: dict[str, Any] = {_NAMES.get(plain["name"], plain["name"]): float(plain["value"])}
        elif named:
            found = _named_values(line[named.end() :])
            last = float(named["last"]) if named["last"] else last
        else:
            continue
        step = int((plain or named)["step"])  # type: ignore[index]  # one of them matched
        if step > 0 and found:
            rows.append({"step": step, **found})
    return rows, last


def _named_values(text: str) -> dict[str, float]:
    found = {}
    for match in _NAMED_VALUE.finditer(text):
        name = _NAMES.get(match["name"].lower(), match["name"].lower())
        if name == "train_time" and match["unit"]:
            found["elapsed_s"] = float(match["value"]) / 1000
        elif name in ("val_loss", "train_loss", "lr", "hella"):
            found[name] = float(match["value"])
    return found if any(name not in ("lr", "elapsed_s") for name in found) else {}


def _as_columns(rows: list[dict[str, Any]]) -> dict[str, Floats]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.asarray([_number(row.get(name)) for row in rows], dtype=float) for name in names}
    return {name: column for name, column in columns.items() if np.isfinite(column).any()}


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float("nan")
    return float(value)


_PREFIX = "events.out.tfevents"
_DOUBLE_TYPE, _FLOAT_TYPE = 2, 1


def read_events(place: Path) -> dict[str, Floats]:
    """Columns ``step``, ``wall_time`` and one per tag, NaN where a tag was not written at a step.

    Args:
        place: An event file, or a folder with some, of one run.

    Raises:
        RecordError: There is none, or it holds no scalar.
    """
    files = sorted(place.rglob(f"{_PREFIX}*")) if place.is_dir() else [place]
    if not files:
        raise RecordError(f"'{place}' holds no TensorBoard event file (events.out.tfevents...)")
    scalars: dict[str, dict[int, float]] = {}
    clock: dict[int, float] = {}
    for file in files:
        for wall_time_s, step, tag, value in _scalars(file):
            scalars.setdefault(tag, {})[step] = value
            clock[step] = wall_time_s
    if not scalars:
        raise RecordError(f"'{place}' holds no scalar; log the metric with add_scalar")
    steps = sorted(clock)
    columns = {"step": np.asarray(steps, dtype=float), "wall_time": np.asarray([clock[s] for s in steps])}
    for tag, values in scalars.items():
        columns[tag] = np.asarray([values.get(step, float("nan")) for step in steps])
    return columns


def _scalars(file: Path) -> Iterator[tuple[float, int, str, float]]:
    """Wall time, step, tag and value of each scalar of a file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file}: the event file cannot be read: {error.strerror or error}") from error
    for record in _records(content):
        event = _Message(record, file)
        steps, wall_times = event.numbers(2), event.texts(1)
        for summary in event.texts(5):
            for content in _Message(summary, file).texts(1):
                value = _Message(content, file)
                tag = b"".join(value.texts(1)[-1:]).decode("utf-8", "replace")
                found = _value_of(value)
                if tag and found is not None:
                    wall_time_s = struct.unpack("<d", wall_times[-1])[0] if wall_times else 0.0
                    yield wall_time_s, steps[-1] if steps else 0, tag, found


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
                    raise RecordError(f"{file}: expected a TensorBoard event file, got a damaged record")
                value = message[at : at + size]
                at += size
            self._fields.setdefault(key >> 3, []).append(value)

    def numbers(self, field: int) -> list[int]:
        """Whole numbers of a field."""
        return [value for value in self._fields.get(field, ()) if isinstance(value, int)]

    def texts(self, field: int) -> list[bytes]:
        """Contents of a field that are bytes: texts, messages and numbers of a fixed width."""
        return [value for value in self._fields.get(field, ()) if isinstance(value, bytes)]


def _varint(message: bytes, at: int, file: Path) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise RecordError(f"{file}: expected a TensorBoard event file, got a damaged record")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _value_of(value: _Message) -> float | None:
    """The number of a summary's value; None where it holds no single number."""
    if tensors := value.texts(8):
        tensor = _Message(tensors[-1], value.file)
        kind = (tensor.numbers(1) or [_FLOAT_TYPE])[-1]
        content = b"".join([found for field in (4, 5, 6) for found in tensor.texts(field)][-1:])
    else:
        kind, content = _FLOAT_TYPE, b"".join(value.texts(2)[-1:])
    if kind == _FLOAT_TYPE and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    return float(struct.unpack("<d", content)[0]) if kind == _DOUBLE_TYPE and len(content) == 8 else None
