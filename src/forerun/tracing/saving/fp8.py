"""Linear layers that multiply in fp8, as torchao's dynamic recipe or Transformer Engine's recipes do.

torchao casts inputs, weights and gradients where they are used; weights and activations are held in bf16. Transformer
Engine casts an input or gradient once, into both orders of memory that its products read, and keeps an input in fp8 for
the backward pass. Its weights are taken to be held in fp8, in both orders (``fp8_model_init``), which is two bytes a
weight as in bf16: the update writes them, and no pass casts them. The head and layers whose sizes are no multiples of
16 stay in bf16. Norms that write fp8 themselves are left out: a cast is a kernel by itself.

Sources: torchao, ``float8/float8_linear.py`` and ``matmul_with_hp_or_float8_args``; Transformer Engine,
``pytorch/module/linear.py`` and ``common/recipe``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from forerun.question.saving import Fp8Recipe
from forerun.tracing.saving.device_ops import eight_bit_product, to_eight_bits, to_eight_bits_twice

__all__ = ["multiply_in_fp8"]

_MULTIPLE = 16
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def multiply_in_fp8(module: nn.Module, heads: set[nn.Module], recipe: Fp8Recipe | None = None) -> int:
    """Makes the linear layers of a model multiply in fp8, in place; returns their number.

    Args:
        module: The model.
        heads: Layers that stay as they are.
        recipe: Scales of the operands; None for torchao's.
    """
    number = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and layer not in heads and _is_aligned(layer):
            layer.forward = _fp8_forward(layer, recipe or Fp8Recipe.DYNAMIC)  # type: ignore[method-assign,assignment]
            number += 1
    return number


def _is_aligned(layer: nn.Linear) -> bool:
    return layer.in_features % _MULTIPLE == 0 and layer.out_features % _MULTIPLE == 0


def _fp8_forward(layer: nn.Linear, recipe: Fp8Recipe) -> Callable[[torch.Tensor], torch.Tensor]:
    held = torch.empty_like(layer.weight, dtype=_FORWARD) if recipe is not Fp8Recipe.DYNAMIC else None

    def forward(source: torch.Tensor) -> torch.Tensor:
        rows = source.flatten(0, -2)
        if rows.dim() == 1 or source.element_size() != 2:
            return nn.functional.linear(source, layer.weight, layer.bias)
        product: torch.Tensor
        if held is None:
            product = _DynamicProduct.apply(rows, layer.weight)
        else:
            product = _HeldProduct.apply(rows, layer.weight, held, recipe is Fp8Recipe.CURRENT)
        result = product.view(*source.shape[:-1], layer.out_features)
        return result if layer.bias is None else result + layer.bias

    return forward


class _DynamicProduct(torch.autograd.Function):
    """source (rows, in) x weight (out, in), each cast where it is used."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(source, weight)
        return _product(to_eight_bits(source, _FORWARD), to_eight_bits(weight, _FORWARD).t(), source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, weight = ctx.saved_tensors
        small = to_eight_bits(gradient, _BACKWARD)
        of_source = of_weight = None
        if ctx.needs_input_grad[0]:
            of_source = _product(small, to_eight_bits(weight, _FORWARD), gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _product(small.t(), to_eight_bits(source, _FORWARD), gradient.dtype)
        return of_source, of_weight


class _HeldProduct(torch.autograd.Function):
    """source (rows, in) x weight (out, in) that is held in fp8; the source is cast once for both passes."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, held: torch.Tensor, looks: bool
    ) -> torch.Tensor:
        by_rows, by_columns = to_eight_bits_twice(source, _FORWARD, looks)
        ctx.save_for_backward(by_columns if weight.requires_grad else None, held)
        ctx.looks = looks
        return _product(by_rows, held.t(), source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by_columns, held = ctx.saved_tensors
        by_rows, transposed = to_eight_bits_twice(gradient, _BACKWARD, ctx.looks)
        of_source = of_weight = None
        if ctx.needs_input_grad[0]:
            of_source = _product(by_rows, held, gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = _product(transposed.t(), by_columns, gradient.dtype)
        return of_source, of_weight, None, None


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    result: torch.Tensor = eight_bit_product(left, right, dtype)
    return result
