"""Operations without values that stand for kernels of libraries that need a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.library import Library

_NUM_PARTIAL_SUMS = 128
"""Rows of partial gradients of a norm's weight: one for each multiprocessor."""

_library = Library("forerun", "DEF")


def define(schema: str, kernel: Any) -> Any:
    """An operation of the namespace ``forerun``, whose kernel makes meta tensors of the sizes of its results."""
    name = _library.define(schema)
    _library.impl(name, kernel, "Meta")
    return getattr(torch.ops.forerun, name).default


def _nothing(*_args: Any) -> None:
    return None


def _like(source: torch.Tensor, *_more: Any) -> torch.Tensor:
    return torch.empty_like(source)


def _grouped_product(left: torch.Tensor, right: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype) -> Any:
    if right.dim() == 3:
        return left.new_empty((left.shape[0], right.shape[2]), dtype=dtype)
    return left.new_empty((len(ends), left.shape[0], right.shape[1]), dtype=dtype)


delta_rule = define(
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor rate, int piece) -> (Tensor, Tensor)",
    lambda _query, _key, value, _decay, _rate, piece: (
        _like(value),
        value.new_empty((*value.shape[:-1], piece)),
    ),
)
"""The gated delta rule over pieces of a sequence, and the inverse of each piece."""

delta_rule_backward = define(
    "delta_rule_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor decay, Tensor rate, "
    "Tensor inverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    lambda _gradient, *inputs: tuple(_like(one) for one in inputs[:5]),
)
"""Gradients of all inputs of the gated delta rule."""

causal_convolution: Callable[..., torch.Tensor] = define(
    "causal_convolution(Tensor source, Tensor weight) -> Tensor", _like
)
"""Channels over the last few tokens, with their activation; one kernel."""

causal_convolution_backward = define(
    "causal_convolution_backward(Tensor gradient, Tensor source, Tensor weight) -> (Tensor, Tensor)",
    lambda _gradient, source, weight: (_like(source), _like(weight)),
)
"""Gradients of the channels and of the weights; one kernel."""

dequantize: Callable[..., torch.Tensor] = define(
    "dequantize_weight(Tensor packed, Tensor scales, int num_rows, int num_columns, ScalarType dtype) -> Tensor",
    lambda packed, _scales, rows, columns, dtype: packed.new_empty((rows, columns), dtype=dtype),
)
"""A quantized weight written out in another type; one kernel."""

eight_bit_product: Callable[..., torch.Tensor] = define(
    "eight_bit_product(Tensor left, Tensor right, ScalarType dtype) -> Tensor",
    lambda left, right, dtype: left.new_empty((left.shape[0], right.shape[1]), dtype=dtype),
)
"""(m, k) x (k, n) with operands of 8 bits and the result in another type."""

grouped_eight_bit_product: Callable[..., torch.Tensor] = define(
    "grouped_eight_bit_product(Tensor left, Tensor right, Tensor ends, ScalarType dtype) -> Tensor",
    _grouped_product,
)
"""Products of groups of rows with a matrix of each group, or of groups of both, as ``_grouped_mm`` but in 8 bits."""

to_eight_bits = define(
    "to_eight_bits(Tensor source, ScalarType dtype) -> Tensor",
    lambda source, dtype: torch.empty_like(source, dtype=dtype),
)
"""A tensor in 8 bits with a scale: one kernel that looks for the largest value, one that writes."""

to_eight_bits_twice: Callable[..., tuple[torch.Tensor, torch.Tensor]] = define(
    "to_eight_bits_twice(Tensor source, ScalarType dtype, bool looks) -> (Tensor, Tensor)",
    lambda source, dtype, _looks: tuple(torch.empty_like(source, dtype=dtype) for _ in range(2)),
)
"""A matrix in 8 bits, by rows and by columns, in one kernel; with a look for the largest value before if asked."""

adamw_8bit = define(
    "adamw_8bit_(Tensor(a!) weight, Tensor gradient, Tensor(b!) first, Tensor(c!) second, Tensor(d!) scales) -> ()",
    _nothing,
)
"""AdamW on one tensor with both moments in 8 bits; one kernel."""

liger_cross_entropy = define(
    "liger_cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor(b!) losses) -> ()", _nothing
)
"""Losses of the rows, and logits overwritten by their gradient; one kernel."""

add_product = define("add_product_(Tensor(a!) total, Tensor left, Tensor right) -> ()", _nothing)
"""(m, k) x (k, n) added to a tensor in its own format; one kernel."""

cross_entropy = define(
    "cross_entropy(Tensor logits, Tensor labels) -> (Tensor, Tensor)",
    lambda logits, _labels: tuple(logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2)),
)
"""Losses of the rows and logarithms of their sums; one kernel."""

cross_entropy_backward = define(
    "cross_entropy_backward_(Tensor(a!) logits, Tensor losses, Tensor sums, Tensor labels) -> ()", _nothing
)
"""Logits overwritten by their gradient; one kernel."""

rms_norm = define(
    "rms_norm(Tensor source, Tensor weight) -> (Tensor, Tensor)",
    lambda source, _weight: (_like(source), source.new_empty(source.shape[:-1], dtype=torch.float32)),
)
"""RMSNorm of the last axis, and the reciprocal root of each row; one kernel."""

rms_norm_backward = define(
    "rms_norm_backward_(Tensor(a!) gradient, Tensor source, Tensor roots, Tensor weight, bool needs_weight) -> Tensor",
    lambda gradient, _source, _roots, weight, needs_weight: gradient.new_empty(
        (_NUM_PARTIAL_SUMS if needs_weight else 0, weight.shape[0]), dtype=torch.float32
    ),
)
"""Gradient of the result overwritten by that of the source, and partial sums of the weight's; one kernel."""

rotate = define("rotate_(Tensor(a!) queries, Tensor(b!) keys, Tensor cosines, Tensor sines) -> ()", _nothing)
"""Rotary embedding of queries and keys in place, or its gradient; one kernel."""

gated: Callable[..., torch.Tensor] = define("gated(Tensor gate, Tensor other) -> Tensor", _like)
"""Activation of the gate times the other; one kernel."""

gated_backward = define("gated_backward_(Tensor(a!) gate, Tensor(b!) other, Tensor gradient) -> ()", _nothing)
"""Both factors overwritten by their gradients; one kernel."""
