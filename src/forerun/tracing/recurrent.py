"""Recurrent layers as one operation each, as cuDNN runs them.

On the meta device PyTorch takes LSTM, GRU and RNN layers apart into a step-by-step chain of small products.
A GPU runs one fused call for the whole sequence. The two operations defined here, ``forerun::rnn`` and
``forerun::rnn_backward``, only carry shapes; they exist on the meta device alone.
"""

from __future__ import annotations

from typing import Any

import torch

from forerun.tracing.op_rules.products import NUM_GATES

torch.library.define(
    "forerun::rnn",
    "(Tensor source, Tensor hidden, Tensor[] weights, str mode, int num_layers, int num_directions, "
    "bool batch_first, bool train, int num_steps) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "forerun::rnn_backward",
    "(Tensor grad_output, Tensor source, Tensor hidden, Tensor[] weights, Tensor reserve, str mode, "
    "int num_layers, int num_directions, bool batch_first, int num_steps) -> Tensor[]",
)


@torch.library.impl("forerun::rnn", "Meta")
def _rnn(
    source: torch.Tensor,
    hidden: torch.Tensor,
    weights: list[torch.Tensor],
    mode: str,
    num_layers: int,
    num_directions: int,
    batch_first: bool,
    train: bool,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden_size = hidden.shape[-1]
    output = source.new_empty((*source.shape[:-1], hidden_size * num_directions))
    final_cell = hidden.new_empty(hidden.shape if mode == "lstm" else (0,))
    # cuDNN keeps the activated gates and the cell state of every layer for the backward pass.
    num_tokens = source.numel() // source.shape[-1]
    kept = (NUM_GATES[mode] + 1) * hidden_size * num_layers * num_directions * num_tokens
    return output, hidden.new_empty(hidden.shape), final_cell, source.new_empty((kept if train else 0,))


@torch.library.impl("forerun::rnn_backward", "Meta")
def _rnn_backward(
    grad_output: torch.Tensor,
    source: torch.Tensor,
    hidden: torch.Tensor,
    weights: list[torch.Tensor],
    reserve: torch.Tensor,
    mode: str,
    num_layers: int,
    num_directions: int,
    batch_first: bool,
    num_steps: int,
) -> list[torch.Tensor]:
    return [source.new_empty(source.shape), *(weight.new_empty(weight.shape) for weight in weights)]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    source, hidden, weights, mode, num_layers, num_directions, batch_first, _, num_steps = inputs
    ctx.save_for_backward(source, hidden, output[3], *weights)
    ctx.settings = (mode, num_layers, num_directions, batch_first, num_steps)


def _backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
    source, hidden, reserve, *weights = ctx.saved_tensors
    made = torch.ops.forerun.rnn_backward(grad_output, source, hidden, list(weights), reserve, *ctx.settings)
    return made[0], None, list(made[1:]), None, None, None, None, None, None


torch.library.register_autograd("forerun::rnn", _backward, setup_context=_setup_context)


def fused_layers(
    mode: str,
    source: torch.Tensor,
    hx: Any,
    weights: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    num_steps: int = 0,
) -> tuple[torch.Tensor, ...]:
    """Replacement of ``aten::lstm.input``, ``gru.input`` and ``rnn_*.input``: one kernel per call.

    The steps of a source without an axis for them, (tokens, features), are given as ``num_steps``.
    """
    hidden = hx[0] if isinstance(hx, (list, tuple)) else hx
    num_directions = 2 if bidirectional else 1
    output, final_hidden, final_cell, _ = torch.ops.forerun.rnn(
        source, hidden, list(weights), mode, num_layers, num_directions, batch_first, train, num_steps
    )
    return (output, final_hidden, final_cell) if mode == "lstm" else (output, final_hidden)


def fused_layers_of_packed(
    mode: str,
    source: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Any,
    weights: list[torch.Tensor],
    *settings: Any,
) -> tuple[torch.Tensor, ...]:
    """Replacement of ``aten::lstm.data`` and its like, whose source holds packed sequences, (tokens, features)."""
    has_biases, num_layers, dropout, train, bidirectional = settings
    return fused_layers(
        mode, source, hx, weights, has_biases, num_layers, dropout, train, bidirectional, batch_first=False,
        num_steps=len(batch_sizes),
    )  # fmt: skip
