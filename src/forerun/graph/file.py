"""Graphs on disk: one compressed NumPy archive, written atomically, no pickle."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO, get_type_hints

import numpy as np

from forerun.base.answers import from_plain
from forerun.base.received import DAMAGE
from forerun.graph.graph import Graph, OpClass
from forerun.graph.schema import checked_memory, checked_ops, read_arrays

__all__ = ["GRAPH_FORMAT_VERSION", "parse_graph", "read_graph", "write_graph"]

GRAPH_FORMAT_VERSION = 6

_HEADER = "header"
_TEXTS = ("kernel_names", "module_names")


def write_graph(graph: Graph, path: Path) -> None:
    """Writes a graph; a reader never sees half a file.

    Raises:
        OSError: The folder cannot be written.
    """
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
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".partial-", suffix=".npz")
    try:
        with open(handle, "wb") as file:  # noqa: PTH123 - opens a descriptor, not a path
            np.savez_compressed(file, **arrays)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


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
