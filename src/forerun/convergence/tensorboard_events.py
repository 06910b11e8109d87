"""Scalars of TensorBoard event files, read without TensorBoard.

A file is a sequence of records: length (8 bytes, little endian), its checksum (4), the message, its checksum (4). The
message is a protocol buffer ``Event``: wall_time (field 1, double), step (2), summary (5) with values (1) of tag (1)
and simple_value (2, float) or tensor (8) with float_val (5) or tensor_content (4).

Source of the formats: tensorflow/core/lib/io/record_writer.h, tensorflow/core/util/event.proto, summary.proto,
tensor.proto. A record that is cut off at the end, as a running job leaves it, ends the reading.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from forerun.convergence.curve import Floats
from forerun.errors import RecordError

__all__ = ["read_events"]

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
    try:
        content = file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file}: the event file cannot be read: {error.strerror or error}") from error
    for message in _records(content):
        wall_time_s, step, summaries = 0.0, 0, []
        for field, value in _fields(message, file):
            if field == 1 and isinstance(value, bytes):
                wall_time_s = struct.unpack("<d", value)[0]
            elif field == 2 and isinstance(value, int):
                step = value
            elif field == 5 and isinstance(value, bytes):
                summaries.append(value)
        for summary in summaries:
            for field, value in _fields(summary, file):
                found = _scalar(value, file) if field == 1 and isinstance(value, bytes) else None
                if found is not None:
                    yield wall_time_s, step, *found


def _records(content: bytes) -> Iterator[bytes]:
    at = 0
    while at + 12 <= len(content):
        (length,) = struct.unpack_from("<Q", content, at)
        end = at + 12 + length
        if end + 4 > len(content):
            return  # still being written
        yield content[at + 12 : end]
        at = end + 4


def _fields(message: bytes, file: Path) -> Iterator[tuple[int, int | bytes]]:
    """Number and content of each field of a message; fixed-width numbers as their bytes."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at, file)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at, file)
            yield field, value
            continue
        if kind == 2:
            size, at = _varint(message, at, file)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
        else:
            raise RecordError(f"{file}: expected a TensorBoard event file, got a damaged record")
        yield field, message[at : at + size]
        at += size


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


def _scalar(message: bytes, file: Path) -> tuple[str, float] | None:
    tag, value = "", None
    for field, content in _fields(message, file):
        if not isinstance(content, bytes):
            continue
        if field == 1:
            tag = content.decode("utf-8", "replace")
        elif field == 2:
            value = float(struct.unpack("<f", content)[0])
        elif field == 8:
            value = _tensor_value(content, file)
    return None if value is None or not tag else (tag, value)


def _tensor_value(message: bytes, file: Path) -> float | None:
    """The value of a tensor of one number; None for any other."""
    kind, content = _FLOAT_TYPE, b""
    for field, found in _fields(message, file):
        if field == 1 and isinstance(found, int):
            kind = found
        elif field in (4, 5, 6) and isinstance(found, bytes):
            content = found
    if kind == _FLOAT_TYPE and len(content) == 4:
        return float(struct.unpack("<f", content)[0])
    return float(struct.unpack("<d", content)[0]) if kind == _DOUBLE_TYPE and len(content) == 8 else None
