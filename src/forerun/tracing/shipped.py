"""Graphs of common models that come with the package, so that they are answered without PyTorch and at once.

One archive per model, ``python -m studies shipped-graphs`` makes them: a tar of uncompressed graphs, compressed as one,
because the graphs of a model in its precisions, layouts and optimizers differ little.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

from forerun.base.received import LARGEST_FILE_BYTES
from forerun.graph.file import GRAPH_FORMAT_VERSION, read_graph
from forerun.graph.graph import Graph
from forerun.question.model import ModelRequest, find_architecture

SHIPPED_FOLDER = Path(__file__).parent / "graphs"

SHIPPED_OPTIMIZERS = ("sgd", "adamw")
"""Optimizers of the training steps that come with the package."""

_INDEX = "index.json"


def shipped_archive(model: str) -> Path:
    """The archive of a model's graphs, whether or not it exists."""
    return SHIPPED_FOLDER / f"{re.sub(r'[^a-z0-9.=_-]+', '-', model.lower())}.tar.xz"


def shipped_models() -> tuple[str, ...]:
    """Names of the models whose graphs come with the package."""
    return tuple(_index())


@lru_cache(maxsize=1)
def _index() -> dict[str, frozenset[str]]:
    """Keys of the graphs of each model."""
    try:
        graphs = json.loads((SHIPPED_FOLDER / _INDEX).read_text(encoding="utf-8"))["graphs"]
        return {model: frozenset(keys) for model, keys in graphs.items()}
    except (OSError, ValueError, KeyError):
        return {}


def full_name(model: str) -> str:
    """``torchvision:resnet50`` for ``resnet50``: the library of a bare name whose graphs come with the package.

    Where several libraries have the name, the first of them counts: torchvision before timm.

    >>> full_name("resnet50"), full_name("timm:resnet50"), full_name("gpt2")
    ('torchvision:resnet50', 'timm:resnet50', 'gpt2')
    """
    if ":" in model or model in _index():
        return model
    found = (f"{library}:{model}" for library in ("torchvision", "timm"))
    return next((name for name in found if name in _index()), model)


def graph_key(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> str:
    """Name of a graph in its archive.

    Args:
        request: The model and its inputs.
        settings: Settings of the setup that change the graph.
        trace_version: Version of the tracer.
    """
    key = [asdict(request), dict(settings), GRAPH_FORMAT_VERSION, trace_version]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def shipped_graph(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> Graph | None:
    """The graph of a model that came with the package, None if there is none of this input and these settings."""
    asked = request.model
    known = find_architecture(asked)
    if known is not None and not asked.startswith("hf:"):
        request = replace(request, model=known.name)  # it may be asked for by its name on the hub
    found = _shipped_graph(request, settings, trace_version)
    return found if found is None or found.model == asked else replace(found, model=asked)


def _shipped_graph(request: ModelRequest, settings: Mapping[str, object], trace_version: int) -> Graph | None:
    keys = _index().get(request.model, frozenset())
    key = graph_key(request, settings, trace_version)
    if key in keys:
        return _read(shipped_archive(request.model), key)
    own = replace(request, image_size=None, input_shape=None, sequence_length=None)
    key = graph_key(own, settings, trace_version)
    graph = _read(shipped_archive(request.model), key) if key in keys else None
    return graph if graph is not None and _has_this_input(graph, request) else None


def _has_this_input(graph: Graph, request: ModelRequest) -> bool:
    """True if an input that was named is the model's own."""
    shape = graph.input_shape
    return (
        (request.image_size is None or shape[-2:] == (request.image_size, request.image_size))
        and (request.input_shape is None or shape == tuple(request.input_shape))
        and (request.sequence_length is None or shape == (request.sequence_length,))
    )


@lru_cache(maxsize=8)
def _read(path: Path, key: str) -> Graph | None:
    import tarfile  # few questions read an archive: their graphs are kept

    try:
        with tarfile.open(path, "r|xz") as archive:
            for member in archive:  # what follows the one that is wanted need not be unpacked
                content = archive.extractfile(member) if member.name == f"{key}.npz" else None
                if content is not None and member.size <= LARGEST_FILE_BYTES:
                    return read_graph(io.BytesIO(content.read()))
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError):
        return None
    return None
