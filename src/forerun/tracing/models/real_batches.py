"""Batches with values, for models that are built on a real device.

Every maker of batches gives shapes and types as meta tensors; this module fills them. Time hardly depends on the
values as long as they are in range: numbers are normal, tokens are drawn from the vocabulary (so a gather from a table
touches as much of it as text would), and labels are 0 or 1, which are classes of every head with classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.models.meta_build import building_on

__all__ = ["with_real_batches"]

_TOKEN_INPUTS = ("args", "input_ids", "decoder_input_ids")
_LABELS = 2


def with_real_batches(built: BuiltModel, device: torch.device) -> BuiltModel:
    """The same model with a maker of batches with values, on the device."""
    make_shapes = built.make_batch
    num_tokens = _vocabulary(built.module)

    def make_batch(batch_size: int) -> Mapping[str, Any]:
        with building_on(device):
            batch = make_shapes(batch_size)
        return {name: _filled(name, value, num_tokens, device) for name, value in batch.items()}

    return replace(built, make_batch=make_batch)


def _vocabulary(module: nn.Module) -> int:
    """Number of rows of the first table in which tokens are looked up."""
    tables = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    first = next(tables, None)
    return _LABELS if first is None else first.num_embeddings


def _filled(name: str, value: Any, num_tokens: int, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        bound = num_tokens if name in _TOKEN_INPUTS else _LABELS
        return _values_like(value, bound, device) if value.is_meta else value.to(device)
    if isinstance(value, Mapping):
        return {key: _filled(str(key), item, num_tokens, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(name, item, num_tokens, device) for item in value)
    return value


def _values_like(meta: torch.Tensor, bound: int, device: torch.device) -> torch.Tensor:
    if meta.is_floating_point() or meta.is_complex():
        return torch.randn(meta.shape, dtype=meta.dtype, device=device)
    if meta.dtype == torch.bool:
        return torch.ones(meta.shape, dtype=torch.bool, device=device)
    return torch.randint(bound, meta.shape, dtype=meta.dtype, device=device)
