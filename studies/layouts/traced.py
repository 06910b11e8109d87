"""Traced language models of the study, kept in the cache folder by their sizes and settings."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from functools import cache

import torch

from forerun.base.kept import cache_folder
from forerun.graph.file import GRAPH_FORMAT_VERSION, read_graph, write_graph
from forerun.prediction.step import prepare
from forerun.prediction.units import DividedModel
from forerun.question.setup import TrainingSetup
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.saving.blocks import block_names, of_all_blocks
from forerun.tracing.saving.prepare import with_saving
from forerun.tracing.trace import TRACE_VERSION, trace_built
from studies.layouts.networks import Sizes, in_place_loss, language_model

_MOST_BLOCKS = 3


@cache
def traced_model(sizes: Sizes, setup: TrainingSetup, most_blocks: int = _MOST_BLOCKS) -> DividedModel:
    """The step of a language model, for any batch size of the setup; of more blocks three stand for all."""
    setup = replace(setup, batch_size_per_device=1)
    number, sizes = sizes.layers, replace(sizes, layers=min(most_blocks, sizes.layers))
    key = json.dumps(
        [number, asdict(sizes), asdict(setup), GRAPH_FORMAT_VERSION, TRACE_VERSION, torch.__version__],
        sort_keys=True,
    )
    path = cache_folder() / "layout-study-5" / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.npz"
    graph = read_graph(path)
    if graph is None:
        built = _built(sizes)
        names = block_names(built.module)
        if left := number - sizes.layers:
            built = replace(built, all_blocks=(names[0], *(1 + left) * names[1:2], *names[2:]))
        built = with_saving(built, setup)
        graph = trace_built(built, setup)
        graph = of_all_blocks(graph, built) if built.all_blocks else graph
        write_graph(graph, path)
    return DividedModel.of(prepare(graph))


def _built(sizes: Sizes) -> BuiltModel:
    def loss(output: torch.Tensor, batch: object) -> torch.Tensor:
        if sizes.logit_copies is not None:
            return in_place_loss(output, sizes.logit_copies)
        target = batch["labels"]  # type: ignore[index]
        logits = output if sizes.fused_loss else output.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())

    def make_batch(batch_size: int) -> dict[str, object]:
        def numbers() -> torch.Tensor:
            return torch.zeros((batch_size, sizes.tokens), dtype=torch.long, device="meta")

        return {"args": (numbers(),), "labels": numbers()}

    return BuiltModel(
        name=f"decoder of {sizes.layers} x {sizes.hidden}",
        module=language_model(sizes),
        input_shape=(sizes.tokens,),
        make_batch=make_batch,
        loss=loss,
        tokens_per_sample=sizes.tokens,
    )
