"""Linear attention by the gated delta rule, and its short convolution, as the kernels of the libraries compute it.

A head of widths d and e keeps a state of d x e numbers. In pieces of C = 64 tokens the forward pass takes, for each
token and head, 6 C d + 4 C e + 6 d e FLOP in products; it writes and reads the piece's two factors, its new values and
the state between two pieces, and keeps the inverse of C numbers a token for the backward pass, which makes the rest
again and takes three times as much.

Sources: fla-org/flash-linear-attention, ``fla/ops/gated_delta_rule/chunk.py``; Dao-AILab/causal-conv1d.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from forerun.tracing.device_ops import (
    causal_convolution,
    causal_convolution_backward,
    delta_rule,
    delta_rule_backward,
)
from forerun.tracing.op_rules.products import DELTA_PIECE


def take_linear_attention_kernels(module: torch.nn.Module) -> None:
    """Makes the linear attention of Transformers take these kernels for tensors on meta.

    They stay in its modules: a checkpoint calls them again outside of the model's forward pass.
    """
    for own in {sys.modules[type(part).__module__] for part in module.modules()}:
        if hasattr(own, "torch_chunk_gated_delta_rule"):
            for name, kernel in (
                ("torch_chunk_gated_delta_rule", _delta_rule),
                ("causal_conv1d_fn", _convolution),
            ):
                usual = getattr(own, name, None)
                if usual is not None and not hasattr(usual, "on_meta"):
                    setattr(own, name, _on_meta(kernel, usual))


def _on_meta(kernel: Callable[..., Any], usual: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(source: torch.Tensor, *of: Any, **more: Any) -> Any:
        return (kernel if source.device.type == "meta" else usual)(source, *of, **more)

    chosen.on_meta = kernel  # type: ignore[attr-defined]
    return chosen


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    output_final_state: bool = False,
    **_more: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    found: torch.Tensor = _DeltaRule.apply(query, key, value, g, beta)
    if not output_final_state:
        return found, None
    batch, _, heads, width = value.shape
    return found, value.new_empty((batch, heads, key.shape[-1], width), dtype=torch.float32)


def _convolution(
    source: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_more: Any
) -> torch.Tensor:
    found: torch.Tensor = _Convolution.apply(source, weight)
    return found if bias is None else found + bias.unsqueeze(-1)


class _DeltaRule(torch.autograd.Function):
    """Values (batch, tokens, heads, width) of queries and keys, with a decay and a rate for each token and head."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor
        found, inverse = delta_rule(*inputs, DELTA_PIECE)
        ctx.save_for_backward(*inputs, inverse)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return delta_rule_backward(gradient, *ctx.saved_tensors)


class _Convolution(torch.autograd.Function):
    """Channels (batch, channels, tokens) over the last few tokens, with their activation."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, weight)
        return causal_convolution(source, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return causal_convolution_backward(gradient, *ctx.saved_tensors)
