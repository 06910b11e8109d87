"""``python -m studies shipped-graphs``: the graphs that come with the package."""

from __future__ import annotations

import io
import itertools
import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from forerun.graph.file import write_graph
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Layout, Phase, Precision, TrainingSetup
from forerun.surface.cli.settings import DebugOption
from forerun.tracing.trace import (
    SHIPPED_FOLDER,
    SHIPPED_OPTIMIZERS,
    TRACE_VERSION,
    graph_key,
    library_versions,
    shipped_archive,
    trace,
    traced_settings,
)

LANGUAGE_MODELS = (
    "llama-3.1-8b", "llama-3-8b", "gpt2", "qwen2.5-7b", "mistral-7b", "llama-3.2-1b", "llama-3.2-3b", "qwen2.5-1.5b",
)  # fmt: skip

IMAGE_MODELS = (
    "torchvision:resnet50", "torchvision:resnet18", "cnn:depth=2,base_filters=32",
    "cnn:depth=4,base_filters=64", "cifar-resnet:20", "torchvision:vit_b_16", "torchvision:convnext_tiny",
    "torchvision:mobilenet_v2", "timm:resnet50", "timm:vit_base_patch16_224", "timm:convnext_tiny",
    "torchvision:vgg16", "torchvision:resnet34", "torchvision:resnet101", "torchvision:resnet152",
    "torchvision:resnext50_32x4d", "torchvision:wide_resnet50_2", "torchvision:alexnet",
    "torchvision:squeezenet1_1", "torchvision:mobilenet_v3_large", "torchvision:efficientnet_b0",
    "torchvision:swin_t", "torchvision:densenet121", "timm:efficientnet_b0", "mnist-cnn", "cifar-resnet:56",
)  # fmt: skip

MODELS = (IMAGE_MODELS[0], LANGUAGE_MODELS[0], *IMAGE_MODELS[1:], *LANGUAGE_MODELS[1:])
"""Models in the package: networks that people ask about most, the most asked first."""


_RUNTIMES = {"llama-3.2-1b": {}, "llama-3.2-3b": {"recompute": "full"}}
"""Forms in micro-steps of torchtune's configurations in the runtimes of Kubeflow's trainer."""

_LENGTHS = {"gpt2": (1024,)}
_USUAL_LENGTHS = (2048, 4096)
_RANK = 16
_OTHER_LENGTHS = (1024, 8192)
_OTHER_RANKS = (8, 32, 64)
"""Lengths and ranks of the most asked language model alone; a further one takes 2 kB of its archive."""


def questions(model: str) -> Iterator[tuple[ModelRequest, TrainingSetup]]:
    """The steps whose graphs are shipped, the most asked first.

    Training in each optimizer and, of images, layout; inference of images; and language models in half precision at
    usual numbers of tokens, whole, with adapters, with recomputation and in micro-steps.
    """
    for setup in setups(model):
        yield ModelRequest(model=model), setup
    if model not in LANGUAGE_MODELS:
        return
    yield from _adapters(model, None, _RANK)
    yield _question(model, None, {"recompute": "full"})
    yield _question(model, None, {"lora": _RANK})
    if model in _RUNTIMES:
        yield _question(model, None, {**_RUNTIMES[model], "accumulation": 2})
    lengths = _LENGTHS.get(model, _USUAL_LENGTHS)
    for length in lengths:
        yield from _adapters(model, length, _RANK)
        for form in ({}, {"recompute": "full"}, {"lora": _RANK}, {"lora": _RANK, "quantize": "nf4"}):
            yield _question(model, length, form)
        yield from _adapters(model, length, _RANK, accumulation=2)  # any number of micro-steps has this graph
    if model == LANGUAGE_MODELS[0]:
        for length, rank in itertools.product(lengths, _OTHER_RANKS):
            yield from _adapters(model, length, rank)
        for length in _OTHER_LENGTHS:
            yield from _adapters(model, length, _RANK)


def _adapters(
    model: str, length: int | None, rank: int, accumulation: int = 1
) -> Iterator[tuple[ModelRequest, TrainingSetup]]:
    """Adapters beside half and beside nf4 weights, with recomputation."""
    form = {"recompute": "full", "lora": rank, "accumulation": accumulation}
    yield _question(model, length, form)
    yield _question(model, length, {**form, "quantize": "nf4"})


def _question(model: str, length: int | None, form: dict[str, Any]) -> tuple[ModelRequest, TrainingSetup]:
    run = Run.of(model, device="cpu", precision="bf16", optimizer="adamw", sequence_length=length, **form)
    return run.model, run.setup


def setups(model: str) -> Iterator[TrainingSetup]:
    """The plain setups: training in each optimizer and, of images, layout; and inference."""
    is_language = model in LANGUAGE_MODELS
    layouts = (Layout.NCHW,) if is_language else tuple(Layout)
    precisions = (
        (Precision.AMP, Precision.BF16) if is_language else (Precision.FP32, Precision.AMP, Precision.BF16)
    )
    for precision, layout, optimizer in itertools.product(precisions, layouts, SHIPPED_OPTIMIZERS):
        yield TrainingSetup(precision=precision, layout=layout, optimizer=optimizer)
    for precision in () if is_language else precisions:
        yield TrainingSetup(precision=precision, phase=Phase.INFERENCE)


def shipped_graphs(
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="MODEL", help="Make the graphs of these models only."),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Trace common models with the installed libraries, and write their graphs into the package."""
    SHIPPED_FOLDER.mkdir(exist_ok=True)
    for model in only or MODELS:
        path = shipped_archive(model)
        num_graphs = _write(model, path)
        typer.echo(f"{model}: {num_graphs} graphs, {path.stat().st_size / 1e3:.0f} kB")
        _write_index()


def _write_index() -> None:
    known = sorted(model for model in MODELS if shipped_archive(model).exists())
    versions = {
        library: version
        for model in known
        for library, version in library_versions(model, has_adapters=model in LANGUAGE_MODELS)
    }
    graphs = {model: _keys_in(shipped_archive(model)) for model in known}
    index = {"trace_version": TRACE_VERSION, "versions": versions, "graphs": graphs}
    (SHIPPED_FOLDER / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _keys_in(path: Path) -> list[str]:
    with tarfile.open(path, "r:xz") as archive:
        return [name.removesuffix(".npz") for name in archive.getnames()]


def _write(model: str, path: Path) -> int:
    members: dict[str, bytes] = {}
    for request, setup in questions(model):
        key = graph_key(request, traced_settings(setup), TRACE_VERSION)
        if key not in members:
            members[key] = _bytes_of(request, setup)
    partial = path.with_suffix(".partial")
    with tarfile.open(partial, "w:xz", preset=9) as archive:
        for key, content in members.items():
            member = tarfile.TarInfo(f"{key}.npz")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    partial.replace(path)
    return len(members)


def _bytes_of(request: ModelRequest, setup: TrainingSetup) -> bytes:
    """A graph's file, not compressed: the archive compresses all graphs of a model together."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        write_graph(trace(request, setup, use_cache=False), path)
        with np.load(path, allow_pickle=False) as arrays:
            plain = io.BytesIO()
            np.savez(plain, **{name: arrays[name] for name in arrays.files})
    return plain.getvalue()
