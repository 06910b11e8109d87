"""Operations without values that stand for kernels of libraries that need a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library

__all__ = [
    "adamw_8bit",
    "dequantize",
    "eight_bit_product",
    "liger_cross_entropy",
    "to_eight_bits",
    "to_eight_bits_twice",
]

_library = Library("forerun", "DEF")


def _define(schema: str, kernel: Any) -> Any:
    name = _library.define(schema)
    _library.impl(name, kernel, "Meta")
    return getattr(torch.ops.forerun, name).default


def _dequantized(
    packed: torch.Tensor, scales: torch.Tensor, num_rows: int, num_columns: int, dtype: torch.dtype
) -> torch.Tensor:
    return packed.new_empty((num_rows, num_columns), dtype=dtype)


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return left.new_empty((left.shape[0], right.shape[1]), dtype=dtype)


def _converted(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(source, dtype=dtype)


def _converted_twice(
    source: torch.Tensor, dtype: torch.dtype, looks: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(source, dtype=dtype), torch.empty_like(source, dtype=dtype)


def _nothing(*_args: Any) -> None:
    return None


dequantize = _define(
    "dequantize_weight(Tensor packed, Tensor scales, int num_rows, int num_columns, ScalarType dtype) -> Tensor",
    _dequantized,
)
"""A quantized weight written out in another type; one kernel."""

eight_bit_product = _define(
    "eight_bit_product(Tensor left, Tensor right, ScalarType dtype) -> Tensor", _product
)
"""(m, k) x (k, n) with operands of 8 bits and the result in another type."""

to_eight_bits = _define("to_eight_bits(Tensor source, ScalarType dtype) -> Tensor", _converted)
"""A tensor in 8 bits with a scale: one kernel that looks for the largest value, one that writes."""

to_eight_bits_twice = _define(
    "to_eight_bits_twice(Tensor source, ScalarType dtype, bool looks) -> (Tensor, Tensor)", _converted_twice
)
"""A matrix in 8 bits, by rows and by columns, in one kernel; with a look for the largest value before if asked."""

adamw_8bit = _define(
    "adamw_8bit_(Tensor(a!) weight, Tensor gradient, Tensor(b!) first, Tensor(c!) second, Tensor(d!) scales) -> ()",
    _nothing,
)
"""AdamW on one tensor with both moments in 8 bits; one kernel."""

liger_cross_entropy = _define(
    "liger_cross_entropy_(Tensor(a!) logits, Tensor labels, Tensor(b!) losses) -> ()", _nothing
)
"""Losses of the rows, and logits overwritten by their gradient; one kernel."""
