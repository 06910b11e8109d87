"""Cross entropy of a language model that never holds all its logits at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from forerun.base.errors import InvalidSetupError
from forerun.question.saving import Loss
from forerun.tracing.saving.device_ops import (
    add_product,
    cross_entropy,
    cross_entropy_backward,
    liger_cross_entropy,
)
from forerun.tracing.saving.recompute import autocast_contexts

__all__ = ["NUM_CHUNKS", "fuse_loss"]

NUM_CHUNKS = 8
"""Pieces of the tokens of a chunked loss (torchtune, ``CEWithChunkedOutputLoss``)."""


def fuse_loss(module: nn.Module, loss: Loss, name: str) -> None:
    """Joins the head of a causal language model of Transformers with its loss, or makes its loss one kernel, in place.

    Raises:
        InvalidSetupError: The model has no such head and loss.
    """
    get: Any = getattr(module, "get_output_embeddings", None)
    head = get() if get is not None else None
    uses_function = hasattr(module, "loss_function") and "loss_function" in inspect.getsource(
        type(module).forward
    )
    if not isinstance(head, nn.Linear) or not uses_function:
        raise InvalidSetupError(
            f"{name} has no head with a loss of its own that can be joined: --loss {loss} is for causal language "
            "models of Transformers; give --loss plain"
        )
    if loss is Loss.FUSED:
        module.loss_function = _of_all_logits  # type: ignore[assignment]
        return
    names = [key for key, child in module.named_children() if child is head]
    if not names:
        raise InvalidSetupError(f"the head of {name} is not a part of the model itself: give --loss plain")
    config: Any = module.config
    if getattr(config, "final_logit_softcapping", None) is not None:
        config.final_logit_softcapping = None  # it acts on logits, one more elementwise kernel of each piece
    setattr(module, names[0], _HeadLater(head))
    compute = _chunked if loss is Loss.CHUNKED else _liger
    module.loss_function = _loss_of(head, compute)  # type: ignore[assignment]


class _HeadLater(nn.Module):
    """Takes the place of a head that runs inside of the loss; it holds the weights."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the head."""
        return self.head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states as they are."""
        return hidden


def _loss_of(head: nn.Linear, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss(logits: torch.Tensor, labels: torch.Tensor, *_sizes: Any, **_kwargs: Any) -> torch.Tensor:
        hidden = logits.flatten(0, -2)
        shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
        return compute(hidden, head, shifted)

    return loss


def _of_all_logits(logits: torch.Tensor, labels: torch.Tensor, *_sizes: Any, **_kwargs: Any) -> torch.Tensor:
    shifted = functional.pad(labels, (0, 1), value=-100)[..., 1:].flatten()
    losses: torch.Tensor = _FusedLoss.apply(logits.float().flatten(0, -2), shifted)
    return losses.sum() / len(shifted)


def _piece(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(head(hidden).float(), labels, reduction="sum")


def _chunked(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    size = -(-len(hidden) // NUM_CHUNKS)
    total = None
    for rows, wanted in zip(hidden.split(size), labels.split(size), strict=True):
        part = checkpoint(
            _piece, rows, head, wanted,
            use_reentrant=False, preserve_rng_state=False, context_fn=autocast_contexts,
        )  # fmt: skip
        total = part if total is None else total + part
    assert total is not None
    return total / len(hidden)


def _liger(hidden: torch.Tensor, head: nn.Linear, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _LigerLoss.apply(hidden, head.weight, labels)
    return found


class _LigerLoss(torch.autograd.Function):
    """Logits, loss and gradients of each piece of the tokens in the forward pass.

    The number of pieces is the ratio of vocabulary to hidden size, so that a piece takes as much memory as the hidden
    states. Source: Liger-Kernel 0.8.5, ``ops/fused_linear_cross_entropy.py``.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        ratio = -(-weight.shape[0] // weight.shape[1])
        size = 1 << (max(1, -(-len(hidden) // ratio)) - 1).bit_length()
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = hidden.new_empty(len(hidden), dtype=torch.float32)
        for rows, wanted, part in zip(
            hidden.split(size), labels.split(size), to_hidden.split(size), strict=True
        ):
            logits = rows @ weight.to(rows.dtype).t()
            liger_cross_entropy(logits, wanted, losses)  # from here on they are their own gradient
            if logits.dtype == weight.dtype == part.dtype:
                torch.mm(logits, weight, out=part)
            else:
                part.copy_(logits @ weight.to(rows.dtype))
            if to_weight is not None:
                add_product(to_weight, logits.t(), rows.to(logits.dtype))
            del logits
        ctx.save_for_backward(to_hidden, to_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # Trainers divide the sum by the number of tokens, so the gradient of the loss is not one.
        to_hidden, to_weight = ctx.saved_tensors
        to_hidden.mul_(gradient)
        if to_weight is not None:
            to_weight.mul_(gradient)
        return to_hidden, to_weight, None


class _FusedLoss(torch.autograd.Function):
    """Losses of rows of logits; their gradient overwrites the logits.

    Source: Unsloth, ``kernels/cross_entropy_loss.py``, on the logits in fp32 that Transformers' own losses take.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses, sums = cross_entropy(logits, labels)
        ctx.save_for_backward(logits, sums, labels)
        found: torch.Tensor = losses
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, sums, labels = ctx.saved_tensors
        cross_entropy_backward(logits, gradient, sums, labels)
        return logits, None
