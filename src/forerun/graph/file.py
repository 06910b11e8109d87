"""Graphs on disk: one compressed NumPy archive, written atomically, no pickle."""

from __future__ import annotations

import json
import struct
import tempfile
import zipfile
import zlib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forerun.graph.graph import Graph, HostTraffic, MemoryStream, OpClass, OpTable

__all__ = ["GRAPH_FORMAT_VERSION", "read_graph", "write_graph"]

GRAPH_FORMAT_VERSION = 6

_HEADER = "header"
_TEXTS = ("kernel_names", "module_names")
_DAMAGE = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,  # zipfile: flags that claim encryption or patches
    MemoryError,  # NumPy: an array header that claims a huge shape
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)
"""Exceptions raised by reading a damaged archive or a file that is not a graph."""


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
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop(_HEADER).tobytes().decode())
        return _graph(header, arrays) if header.pop("format_version") == GRAPH_FORMAT_VERSION else None
    except _DAMAGE:
        return None


def _graph(header: dict[str, Any], arrays: dict[str, Any]) -> Graph:
    texts: dict[str, Any] = {name: tuple(header.pop(name)) for name in _TEXTS}

    def table(prefix: str) -> dict[str, Any]:
        start = len(prefix) + 1
        return {name[start:]: value for name, value in arrays.items() if name.startswith(f"{prefix}.")}

    header["input_shape"] = tuple(header["input_shape"])
    header["unsupported_ops"] = tuple(header["unsupported_ops"])
    for name in ("notes", "parameter_names", "blocks", "model_flops", "recomputed_flops"):
        header[name] = tuple(header[name])
    if header["host_traffic"] is not None:
        header["host_traffic"] = HostTraffic(**header["host_traffic"])
    header["versions"] = tuple((name, version) for name, version in header["versions"])
    return Graph(
        ops=OpTable(**_with_law_sizes(table("ops")), **texts),
        memory=MemoryStream(**table("memory")),
        **header,
    )


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
