"""Losses and targets for models without their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import functional

__all__ = [
    "INFERRED_LOSS_NOTE",
    "classification_loss",
    "image_batch",
    "inferred_loss",
    "next_token_loss",
    "sum_of_means",
    "token_batch",
]

INFERRED_LOSS_NOTE = (
    "no loss was given: cross entropy is used for outputs (batch, classes), (batch, classes, height, width) "
    "and per token, binary cross entropy for a single output, the model's own loss if it returns one, and "
    "the mean of all outputs otherwise"
)


def image_batch(batch_size: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """A batch of images (or clips) with class labels, on meta."""
    return {
        "args": (torch.empty((batch_size, *shape), device="meta"),),
        "target": torch.empty(batch_size, dtype=torch.int64, device="meta"),
    }


def token_batch(batch_size: int, shape: tuple[int, ...]) -> dict[str, Any]:
    """A batch of texts with the token after each token, on meta."""
    return {
        "args": (torch.empty((batch_size, *shape), dtype=torch.int64, device="meta"),),
        "target": torch.empty((batch_size, *shape), dtype=torch.int64, device="meta"),
    }


def next_token_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross entropy of logits (batch, tokens, vocabulary) with the tokens that follow."""
    return functional.cross_entropy(output.flatten(0, 1), batch["target"].flatten())


def classification_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Cross entropy of logits (batch, classes) with class labels; of several outputs, the first one counts."""
    logits = output[0] if isinstance(output, (tuple, list)) else output
    return _tensor_loss(logits, batch)


def inferred_loss(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """The loss for the form of the output, see ``INFERRED_LOSS_NOTE``."""
    own = _own_loss(output)
    if own is not None:
        return own
    tensors = list(_float_tensors(output))
    if len(tensors) == 1:
        return _tensor_loss(tensors[0], batch)
    return sum_of_means(output, batch)


def sum_of_means(output: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Sum of the means of all floating-point outputs in fp32, so that every output gets a gradient."""
    means = [tensor.float().mean() for tensor in _float_tensors(output)]
    if not means:
        raise TypeError(f"the model returned no floating-point tensor but {type(output).__name__}")
    total = means[0]
    for mean in means[1:]:
        total = total + mean
    return total


def _own_loss(output: Any) -> torch.Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return loss.mean() if isinstance(loss, torch.Tensor) and loss.is_floating_point() else None


def _tensor_loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    if output.dim() < 2:
        return output.float().mean()
    if _is_per_token(output, batch):
        output = output.flatten(0, 1)
    elif output.dim() == 3:
        return output.float().mean()
    if output.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(
            output, _stand_in(output.shape, output.dtype, output)
        )
    shape = (output.shape[0], *output.shape[2:])
    target = batch.get("target")
    if target is None or tuple(target.shape) != shape:
        target = _stand_in(shape, torch.int64, output)
    return functional.cross_entropy(output, target)


def _stand_in(shape: tuple[int, ...], dtype: torch.dtype, output: torch.Tensor) -> torch.Tensor:
    """A target for an output without one: zeros, or on meta a tensor that no kernel fills."""
    make = torch.empty if output.is_meta else torch.zeros
    return make(shape, dtype=dtype, device=output.device)


def _is_per_token(output: torch.Tensor, batch: Mapping[str, Any]) -> bool:
    """True if the output is (batch, tokens, classes) for integer inputs (batch, tokens)."""
    inputs = [*batch.get("args", ()), *batch.get("kwargs", {}).values()]
    tokens = [x for x in inputs if isinstance(x, torch.Tensor) and not x.is_floating_point() and x.dim() == 2]
    return output.dim() == 3 and any(output.shape[:2] == x.shape for x in tokens)


def _float_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _float_tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _float_tensors(item)
