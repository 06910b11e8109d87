"""Graphs on disk: one compressed NumPy archive, no pickle.

Every column is held against its declaration before anything is computed with it. A file may come from a stranger, and
its indices reach code that does not look again. A column says beside its name which values it may have
(``graph.Within``); what lies outside is refused with the column, the row and the value.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import numpy as np

from forerun.base.answers import from_plain
from forerun.base.errors import TraceError
from forerun.base.kept import write_whole
from forerun.base.received import DAMAGE, LARGEST_FILE_BYTES, check_array, refuse_row
from forerun.graph.graph import Graph, MemoryEvent, MemoryStream, OpClass, OpTable, Within, within_of

GRAPH_FORMAT_VERSION = 6

_HEADER = "header"
_TEXTS = ("kernel_names", "module_names")


def write_graph(graph: Graph, path: Path) -> None:
    """Writes a graph; a reader never sees half a file.

    Raises:
        OSError: The folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, graph_bytes(graph))


def graph_bytes(graph: Graph) -> bytes:
    """The content of a graph's file."""
    names = [field.name for field in fields(graph) if field.name not in ("ops", "memory", "eager_memory")]
    header = {name: getattr(graph, name) for name in names}
    header |= {name: getattr(graph.ops, name) for name in _TEXTS}
    header["host_traffic"] = None if graph.host_traffic is None else asdict(graph.host_traffic)
    header["format_version"] = GRAPH_FORMAT_VERSION
    arrays: dict[str, Any] = {_HEADER: np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)}
    for prefix, table in (("ops", graph.ops), ("memory", graph.memory)):
        for field in fields(table):
            value = getattr(table, field.name)
            if isinstance(value, np.ndarray):
                arrays[f"{prefix}.{field.name}"] = value
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    return content.getvalue()


def read_graph(path: Path | BinaryIO) -> Graph | None:
    """Reads a graph from a file; None if it is missing, damaged or of another format version."""
    try:
        return parse_graph(path)
    except ValueError:
        return None


def parse_graph(path: Path | BinaryIO) -> Graph:
    """Reads a graph from a file, which may come from anybody.

    Raises:
        ValueError: It is missing, damaged or of another format version; the message names the column and the row.
    """
    try:
        arrays = read_arrays(path)
        header = json.loads(arrays.pop(_HEADER).tobytes().decode())
        version = header.pop("format_version")
        if version != GRAPH_FORMAT_VERSION:
            raise ValueError(f"its format version is {str(version)[:20]}, not {GRAPH_FORMAT_VERSION}")
        return _graph(header, arrays)
    except DAMAGE as error:
        raise ValueError(f"{error}" or type(error).__name__) from error


def _graph(header: dict[str, Any], arrays: dict[str, Any]) -> Graph:
    texts = {name: from_plain(tuple[str, ...], header.pop(name), name) for name in _TEXTS}

    def table(prefix: str) -> dict[str, Any]:
        start = len(prefix) + 1
        return {name[start:]: value for name, value in arrays.items() if name.startswith(f"{prefix}.")}

    hints = get_type_hints(Graph)
    known = {name: from_plain(hints[name], value, name) for name, value in header.items()}
    ops = checked_ops({**_with_law_sizes(table("ops")), **texts})
    return Graph(ops=ops, memory=checked_memory(table("memory")), **known)


def _with_law_sizes(columns: dict[str, Any]) -> dict[str, Any]:
    """Columns of a graph that was written when the channels of an interpolation stood among the serial steps."""
    if "law_size" in columns:
        return columns
    serial = columns["serial_steps"]
    is_recurrent = columns["op_class"] == OpClass.RECURRENT
    return columns | {
        "serial_steps": np.where(is_recurrent, serial, 1.0),
        "law_size": np.where(is_recurrent, 1.0, serial),
    }


SMALLEST_BATCHES = 16
_LEAST = -1e-6
"""Of an affine size at a batch of one, and of its slope: fits of sizes leave remainders of rounding."""


def read_arrays(file: Path | BinaryIO) -> dict[str, Any]:
    """The arrays of an archive of NumPy, none of them pickled.

    The sizes that it declares are added up before anything is unpacked, and no member is unpacked beyond its own.

    Raises:
        ValueError: It is too large, or no such archive; ``zipfile`` and NumPy raise others.
    """
    with zipfile.ZipFile(file) as archive:
        size = sum(member.file_size for member in archive.infolist())
        if size > LARGEST_FILE_BYTES:
            raise ValueError(f"its arrays take {size:,} bytes, more than {LARGEST_FILE_BYTES:,}")
        members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
    return {name: _array(name, content) for name, content in members.items()}


def _array(name: str, content: bytes) -> Any:
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, is_fortran, dtype = read_header[version](stream)
    wanted = dtype.itemsize * int(np.prod(shape, dtype=np.float64))
    if dtype.hasobject or is_fortran or wanted != len(content) - stream.tell():
        raise ValueError(
            f"{name}: expected {shape} numbers of {dtype}, got {len(content) - stream.tell()} bytes"
        )
    # A copy: columns are aligned, and may be written to like any other array.
    return np.frombuffer(content, dtype=dtype, offset=stream.tell()).reshape(shape).copy()


def checked_ops(columns: Mapping[str, Any]) -> OpTable:
    """The operations of a file.

    Raises:
        ValueError: A column is missing, unknown, or has a value that it may not have.
    """
    names = {name: len(columns[name]) for name in ("kernel_names", "module_names")}
    rows = len(columns["op_class"])
    _check("ops", OpTable, columns, {**names, "rows": rows})
    return OpTable(**columns)


def checked_memory(columns: Mapping[str, Any]) -> MemoryStream:
    """The memory stream of a file; ``check_stream`` looks at the order of its entries.

    Raises:
        ValueError: As in ``checked_ops``.
    """
    rows = len(columns["event"])
    _check("memory", MemoryStream, columns, {"rows": rows})
    stream = MemoryStream(**columns)
    is_made = stream.event == MemoryEvent.ALLOCATE
    refuse_row("memory.kind", stream.kind, is_made & (stream.kind < 0), "a kind of contents")
    if is_made.any() and not stream.size_bytes.any():
        raise ValueError("memory.size_bytes: expected sizes above zero, got none")
    return stream


def _check(name: str, table: type[Any], columns: Mapping[str, Any], lengths: Mapping[str, int]) -> None:
    known = {column.name: column for column in fields(table)}
    for unknown in sorted(columns.keys() - known.keys()):
        raise ValueError(f"unknown column {name}.{unknown}")
    for column_name, column in known.items():
        is_optional = column.default_factory is not MISSING
        if column_name not in columns and not is_optional:
            raise ValueError(f"the column {name}.{column_name} is missing")
        within = within_of(column)
        if within is not None and column_name in columns:
            _check_column(
                f"{name}.{column_name}", columns[column_name], within, lengths, is_optional=is_optional
            )


def _check_column(
    name: str, values: Any, within: Within, lengths: Mapping[str, int], *, is_optional: bool
) -> None:
    dtype, shape = "int64" if within.is_whole else "float64", (lengths["rows"], *within.tail)
    if is_optional and values.size == 0 and values.ndim == 1 and values.dtype == dtype:
        return
    if within.tail:
        check_array(name, values, dtype, shape, -np.inf, np.inf)
        _check_sizes(name, values, within)
        return
    if isinstance(within.high, str):
        # An index stays below the number of names; a kernel may have as many numbers as the table has rows.
        high: float = lengths[within.high] - within.high.endswith("names")
    else:
        high = within.high
    check_array(name, values, dtype, shape, within.low, high)


def _check_sizes(name: str, values: Any, within: Within) -> None:
    """Sizes, constant + slope * batch: they grow with the batch, and are no less than nothing."""
    if not values.size:
        return
    constant, slope = values[..., 0], values[..., 1]
    if within.may_fall_short:
        # Found on batches of two and more: what a pass over half a batch leaves is no size yet.
        is_fine = (constant >= -SMALLEST_BATCHES * slope + _LEAST) & (slope >= _LEAST)
    else:
        is_fine = (constant + slope >= _LEAST) & (slope >= _LEAST)
    is_fine &= (np.abs(constant) <= within.high) & (slope <= within.high)
    refuse_row(name, values, ~is_fine, f"a size from 0 to {within.high:g} that grows with the batch")


def check_stream(stream: MemoryStream) -> None:
    """Raise ``TraceError`` unless the stream is two steps in which every free has its allocation.

    Args:
        stream: Any stream; entries after the second ``STEP_ENDS`` are allowed and ignored elsewhere.
    """
    num_steps = int(np.count_nonzero(stream.event == MemoryEvent.STEP_ENDS))
    if num_steps != 2 or not np.any(stream.event == MemoryEvent.FORWARD_BEGINS):
        raise TraceError(
            f"a memory stream holds two training steps, got {num_steps} ends of a step; trace the model again"
        )
    seen: set[int] = set()
    alive: set[int] = set()
    for position, (event, block) in enumerate(zip(stream.event.tolist(), stream.block.tolist(), strict=True)):
        if event == MemoryEvent.ALLOCATE:
            if block in seen or block < 0:
                raise TraceError(
                    f"every allocation needs its own block, but entry {position} repeats block {block}; "
                    "trace the model again"
                )
            seen.add(block)
            alive.add(block)
        elif event == MemoryEvent.FREE:
            if block not in alive:
                raise TraceError(
                    f"a free needs a block that is allocated, but entry {position} frees block {block}; "
                    "trace the model again"
                )
            alive.remove(block)
