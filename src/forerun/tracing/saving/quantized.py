"""Linear layers in fewer bits: frozen weights of bitsandbytes in 4 or 8, and products in fp8.

bitsandbytes itself makes its weights on a GPU. Here the layers hold tensors of the same sizes, and operations without
values stand for its kernels:

- nf4: two weights a byte and a 4-byte scale for each 64 weights; forward and backward pass write the weights in the
  precision of the step, then multiply (``MatMul4Bit``).
- nf4-dq: the scales are bytes with a 4-byte scale for each 256 of them; one kernel writes them in fp32 and one adds
  their mean before every use.
- int8: a byte a weight and a 4-byte scale for each row; the forward pass quantizes the input by rows, by way of fp16,
  multiplies in 8 bits and keeps the input; the backward pass writes the weights in the precision of that input and
  multiplies in it, under autocast too (``MatMul8bitLt``).

Source: bitsandbytes 0.50, ``bitsandbytes/nn/modules.py`` and ``autograd/_functions.py``.

Linear layers multiply in fp8 as torchao's dynamic recipe or Transformer Engine's recipes do. torchao casts inputs,
weights and gradients where they are used; weights and activations are held in bf16. Transformer Engine casts an input
or gradient once, into both orders of memory that its products read, and keeps an input in fp8 for the backward pass.
Its weights are taken to be held in fp8, in both orders (``fp8_model_init``), which is two bytes a weight as in bf16:
the update writes them, and no pass casts them, and so are those of its experts, whose grouped products are in fp8 too;
torchao's stay in bf16. So do the head and layers whose sizes are no multiples of 16.
Norms that write fp8 themselves are left out: a cast is a kernel by itself. Fused experts
(``NVTE_CUTEDSL_FUSED_GROUPED_MLP``) have none between their two products: the first one's kernel applies the activation
and casts its result, and so does that of the gradient of the second one's input.

Sources: torchao, ``float8/float8_linear.py`` and ``matmul_with_hp_or_float8_args``; Transformer Engine,
``pytorch/module/linear.py``, ``pytorch/ops/fused`` and ``common/recipe``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

from forerun.question.saving import Fp8Recipe, Quantization
from forerun.tracing.cuda_semantics import autocast_dtype_now
from forerun.tracing.device_ops import (
    dequantize,
    eight_bit_product,
    grouped_eight_bit_product,
    to_eight_bits,
    to_eight_bits_twice,
)

NF4_BLOCK = 64
"""Weights that share a scale."""

_DQ_BLOCK = 256
"""Scales of nf4-dq that share a scale."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is quantized and frozen; its bias stays as it is, frozen too.

    Args:
        layer: The layer, or one of Transformers' ``Conv1D``, whose weight is transposed.
        kind: Format of the weight.
        keeps_input: Whether products in 4 bits keep their inputs too (before 0.43.2, pull request 1270).
    """

    def __init__(self, layer: nn.Module, kind: Quantization, *, keeps_input: bool = False) -> None:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        shape = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
        nn.Module.__init__(self)
        self.out_features, self.in_features = (int(size) for size in shape)
        self.kind = kind
        self.keeps_input = keeps_input or kind is Quantization.INT8
        number = self.out_features * self.in_features
        four = kind is not Quantization.INT8
        size = ((number + 1) // 2, 1) if four else (self.out_features, self.in_features)
        held = torch.empty(size, dtype=torch.uint8 if four else torch.int8, device="meta")
        self.weight = nn.Parameter(held, requires_grad=False)
        self.scales: torch.Tensor
        # Scales are held as bytes, so that a conversion of the model to another precision leaves them alone.
        self.register_buffer(
            "scales",
            torch.empty(_scale_bytes(kind, number, self.out_features), dtype=torch.uint8, device="meta"),
        )
        bias: Any = layer.bias
        frozen: Any = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.bias = frozen

    def forward(self, source: torch.Tensor) -> torch.Tensor:
        """The layer's output in the precision of its input."""
        dtype = source.dtype if self.kind is Quantization.INT8 else _compute_dtype(source)
        product = _EightBits if self.kind is Quantization.INT8 else _FourBits
        result: torch.Tensor = product.apply(
            source.to(dtype), self.weight, self.scales, self.kind, self.out_features, self.keeps_input
        )
        if self.bias is not None:
            result = result + self.bias.to(dtype)
        return result.to(source.dtype)


class QuantizedStack(nn.Module):
    """Weights of all experts in 4 bits, which every use writes out whole.

    As a parametrization of the tensor that held them; the backward pass keeps what was written out.
    Source: bitsandbytes 0.50, ``bitsandbytes/nn/parametrize.py``.

    Args:
        full: The weights, (experts, ...).
        kind: Their format, nf4 or nf4-dq.
    """

    def __init__(self, full: torch.Tensor, kind: Quantization) -> None:
        super().__init__()
        self.shape, self.kind = full.shape, kind
        size = _scale_bytes(kind, full.numel(), 1)
        self.scales: torch.Tensor
        self.register_buffer("scales", torch.empty(size, dtype=torch.uint8, device="meta"))

    def right_inverse(self, full: torch.Tensor) -> tuple[torch.Tensor]:
        """The tensor that is held in place of the weights."""
        return (torch.empty(((full.numel() + 1) // 2, 1), dtype=torch.uint8, device=full.device),)

    def forward(self, packed: torch.Tensor) -> torch.Tensor:
        """The weights in half precision."""
        scales = _scales_in_full(packed, self.scales, self.kind)
        rows = self.shape.numel() // self.shape[-1]
        return dequantize(packed, scales, rows, self.shape[-1], torch.bfloat16).view(self.shape)


def stacked_experts(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """Modules with the names of their weights that hold all experts of a block as one tensor."""
    return [
        (part, name)
        for path, part in module.named_modules()
        if "expert" in path.lower()
        for name, weight in part.named_parameters(recurse=False)
        if weight.dim() == 3
    ]


def _scale_bytes(kind: Quantization, num_weights: int, num_rows: int) -> int:
    """Bytes of the scales of a weight, the scales of scales among them."""
    if kind is Quantization.INT8:
        return 4 * num_rows
    scales = -(-num_weights // NF4_BLOCK)
    return 4 * scales if kind is Quantization.NF4 else scales + 4 * -(-scales // _DQ_BLOCK)


def num_weights(module: nn.Module) -> int:
    """Parameters of a model, a quantized weight counted as what it stands for."""
    total = sum(parameter.numel() for parameter in module.parameters())
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            total += layer.out_features * layer.in_features - layer.weight.numel()
        elif isinstance(layer, QuantizedStack):
            total += layer.shape.numel() - (layer.shape.numel() + 1) // 2
    return total


def _compute_dtype(source: torch.Tensor) -> torch.dtype:
    region = autocast_dtype_now()
    if region is not None:
        return region
    return source.dtype if source.element_size() == 2 else torch.bfloat16


class _FourBits(torch.autograd.Function):
    """Product with a weight that is written out in the precision of the input first."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, *more: Any
    ) -> Any:
        _hold(ctx, source, weight, scales, *more)
        full = _scales_in_full(weight, scales, ctx.kind)
        size = (ctx.out_features, source.shape[-1])
        return functional.linear(source, dequantize(weight, full, *size, source.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None
        found = _times_weight(
            ctx.weight, _scales_in_full(ctx.weight, ctx.scales, ctx.kind), ctx.out_features, gradient
        )
        return found, None, None, None, None, None


def _hold(
    ctx: Any,
    source: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    kind: Quantization,
    out_features: int,
    keeps: bool,
) -> None:
    """Holds what the backward pass of a product needs, and its input where the library keeps it."""
    ctx.weight, ctx.scales, ctx.kind, ctx.out_features = weight, scales, kind, out_features
    if keeps and ctx.needs_input_grad[0]:
        ctx.save_for_backward(source)


def _scales_in_full(weight: torch.Tensor, scales: torch.Tensor, kind: Quantization) -> torch.Tensor:
    """Scales in fp32; those of nf4-dq for one use, since what a context holds would live until its end."""
    if kind is not Quantization.NF4_DQ:
        return scales
    number = -(-2 * weight.numel() // NF4_BLOCK)
    return dequantize(scales[:number], scales[number:], number, 1, torch.float32) + 1.0


class _EightBits(_FourBits):
    """Product in 8 bits; the gradient of the input is one in the format of that input."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, weight: torch.Tensor, *more: Any) -> Any:
        _hold(ctx, source, weight, *more)
        rows = source.flatten(0, -2).to(torch.float16)
        result: torch.Tensor = eight_bit_product(to_eight_bits(rows, torch.int8), weight.t(), source.dtype)
        return result.view(*source.shape[:-1], weight.shape[0])


def input_gradient(layer: QuantizedLinear, gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of the input of a layer in 4 bits from that of its output."""
    full = _scales_in_full(layer.weight, layer.scales, layer.kind)
    return _times_weight(layer.weight, full, layer.out_features, gradient)


def _times_weight(
    packed: torch.Tensor, scales: torch.Tensor, out_features: int, gradient: torch.Tensor
) -> torch.Tensor:
    number = packed.numel() * (2 if packed.dtype == torch.uint8 else 1)
    return gradient @ dequantize(packed, scales, out_features, number // out_features, gradient.dtype)


# ``torch._scaled_mm`` takes no other sizes.
_MULTIPLE = 16
_FORWARD, _BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2


def multiply_in_fp8(
    module: nn.Module,
    heads: set[nn.Module],
    recipe: Fp8Recipe | None = None,
    *,
    fuses_experts: bool = False,
) -> int:
    """Makes the linear layers of a model multiply in fp8, in place; returns their number.

    Args:
        module: The model.
        heads: Layers that stay as they are.
        recipe: Scales of the operands; None for torchao's.
        fuses_experts: Whether experts have no kernel between their products.
    """
    number = 0
    for layer in module.modules():
        if type(layer) is nn.Linear and layer not in heads and _is_aligned(layer):
            layer.forward = _fp8_forward(layer, recipe or Fp8Recipe.DYNAMIC)  # type: ignore[method-assign,assignment]
            number += 1
        weights = [weight for weight in layer.parameters(recurse=False) if weight.dim() == 3]
        if weights and recipe not in (None, Fp8Recipe.DYNAMIC):
            is_fused = fuses_experts and hasattr(layer, "_apply_gate")
            layer.forward = _experts_forward(layer, weights, recipe is Fp8Recipe.CURRENT, is_fused)
            if is_fused:
                layer._apply_gate = _FusedGate.apply
    return number


def _experts_forward(
    part: nn.Module, weights: list[nn.Parameter], looks: bool, is_fused: bool
) -> Callable[..., Any]:
    """The pass of experts whose grouped products are in fp8; fused ones have no kernel between their two products."""
    held = {
        id(weight): torch.empty_like(weight, dtype=_FORWARD)
        for weight in weights
        if all(size % _MULTIPLE == 0 for size in weight.shape[1:])
    }
    plain = part.forward

    def forward(*args: Any, **words: Any) -> Any:
        from transformers.integrations import moe

        usual = moe._grouped_mm
        # Whether the kernel before casts the source of a product, and that behind it the gradient of its result.
        casts = iter([(False, True), (True, False)] if is_fused else [])

        def product(source: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            own = weight if id(weight) in held else weight._base
            found: torch.Tensor = (
                usual(source, weight, offs)
                if own is None or id(own) not in held or weight.element_size() != 2
                # With the parameter itself its gradient is made in its own order of memory.
                else _HeldGroups.apply(
                    source.to(weight.dtype),
                    own,
                    held[id(own)],
                    offs,
                    own is not weight,
                    looks,
                    next(casts, (False, False)),
                )
            )
            return found

        with patch.object(moe, "_grouped_mm", product):
            return plain(*args, **words)

    return forward


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
        return eight_bit_product(
            to_eight_bits(source, _FORWARD), to_eight_bits(weight, _FORWARD).t(), source.dtype
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        source, weight = ctx.saved_tensors
        small = to_eight_bits(gradient, _BACKWARD)
        of_source = of_weight = None
        if ctx.needs_input_grad[0]:
            of_source = eight_bit_product(small, to_eight_bits(weight, _FORWARD), gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = eight_bit_product(small.t(), to_eight_bits(source, _FORWARD), gradient.dtype)
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
        return eight_bit_product(by_rows, held.t(), source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by_columns, held = ctx.saved_tensors
        by_rows, transposed = to_eight_bits_twice(gradient, _BACKWARD, ctx.looks)
        of_source = of_weight = None
        if ctx.needs_input_grad[0]:
            of_source = eight_bit_product(by_rows, held, gradient.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = eight_bit_product(transposed.t(), by_columns, gradient.dtype)
        return of_source, of_weight, None, None


class _HeldGroups(torch.autograd.Function):
    """Groups of rows, (rows, in), times weights of experts, (experts, in, out) or turned, which are held in fp8."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        weight: torch.Tensor,
        held: torch.Tensor,
        ends: torch.Tensor,
        is_turned: bool,
        looks: bool,
        casts: tuple[bool, bool],
    ) -> torch.Tensor:
        by_rows, by_columns = _cast_twice(source, _FORWARD, looks, casts[0])
        ctx.save_for_backward(by_columns if weight.requires_grad else None, held, ends)
        ctx.is_turned, ctx.looks, ctx.is_cast = is_turned, looks, casts[1]
        right = held.transpose(-2, -1) if is_turned else held
        return grouped_eight_bit_product(by_rows, right, ends, source.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        by_columns, held, ends = ctx.saved_tensors
        by_rows, by_both = _cast_twice(gradient, _BACKWARD, ctx.looks, ctx.is_cast)
        of_source = of_weight = None
        if ctx.needs_input_grad[0]:
            right = held if ctx.is_turned else held.transpose(-2, -1)
            of_source = grouped_eight_bit_product(by_rows, right, ends, gradient.dtype)
        if ctx.needs_input_grad[1]:
            left, right = (by_both, by_columns) if ctx.is_turned else (by_columns, by_both)
            of_weight = grouped_eight_bit_product(left.t(), right, ends, gradient.dtype)
        return of_source, of_weight, None, None, None, None, None


def _cast_twice(
    source: torch.Tensor, dtype: torch.dtype, looks: bool, is_cast: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in 8 bits by rows and by columns; without a kernel where another one has cast it."""
    if is_cast:
        return torch.empty_like(source, dtype=dtype), torch.empty_like(source, dtype=dtype)
    return to_eight_bits_twice(source, dtype, looks)


class _FusedGate(torch.autograd.Function):
    """Activation of a gate and its product, computed by the kernels of the products beside it."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        return both.new_empty((*both.shape[:-1], both.shape[-1] // 2))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (both,) = ctx.saved_tensors
        return torch.empty_like(both)
