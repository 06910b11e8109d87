"""Linear layers with frozen weights in 4 or 8 bits, with the sizes and kernels of bitsandbytes.

The package itself makes its weights on a GPU. Here the layers hold tensors of the same sizes, and operations without
values stand for its kernels:

- nf4: two weights a byte and a 4-byte scale for each 64 weights; forward and backward pass write the weights in the
  precision of the step, then multiply (``MatMul4Bit``).
- nf4-dq: the scales are bytes with a 4-byte scale for each 256 of them; one kernel writes them in fp32 and one adds
  their mean before every use.
- int8: a byte a weight and a 4-byte scale for each row; the forward pass quantizes the input by rows, by way of fp16,
  multiplies in 8 bits and keeps the input; the backward pass writes the weights in the precision of that input and
  multiplies in it, under autocast too (``MatMul8bitLt``).

Source: bitsandbytes 0.50, ``bitsandbytes/nn/modules.py`` and ``autograd/_functions.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from forerun.question.saving import Quantization
from forerun.tracing.cuda_semantics import autocast_dtype_now
from forerun.tracing.saving.device_ops import dequantize, eight_bit_product, to_eight_bits

__all__ = ["NF4_BLOCK", "QuantizedLinear", "input_gradient", "num_weights"]

NF4_BLOCK = 64
"""Weights that share a scale."""

_DQ_BLOCK = 256
"""Scales of nf4-dq that share a scale."""


class QuantizedLinear(nn.Linear):
    """A linear layer whose weight is quantized and frozen; its bias stays as it is, frozen too.

    Args:
        layer: The layer, or one of Transformers' ``Conv1D``, whose weight is transposed.
        kind: Format of the weight.
    """

    def __init__(self, layer: nn.Module, kind: Quantization) -> None:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        shape = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
        nn.Module.__init__(self)
        self.out_features, self.in_features = (int(size) for size in shape)
        self.kind = kind
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
        product = {Quantization.INT8: _EightBits, Quantization.NF4: _FourBits}.get(self.kind, _FourBitsTwice)
        result: torch.Tensor = product.apply(source.to(dtype), self.weight, self.scales, self.out_features)
        if self.bias is not None:
            result = result + self.bias.to(dtype)
        return result.to(source.dtype)


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
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out_features: int
    ) -> torch.Tensor:
        ctx.weight, ctx.scales, ctx.out_features = weight, scales, out_features
        full = dequantize(weight, scales, out_features, source.shape[-1], source.dtype)
        return functional.linear(source, full)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _input_gradient(ctx, gradient), None, None, None


class _FourBitsTwice(_FourBits):
    """The same with scales that are written out in fp32 before each use."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out_features: int
    ) -> torch.Tensor:
        found: torch.Tensor = _FourBits.forward(ctx, source, weight, _in_full(weight, scales), out_features)
        ctx.scales = scales
        return found

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.scales = _in_full(ctx.weight, ctx.scales)
        return _input_gradient(ctx, gradient), None, None, None


def _in_full(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Scales of nf4-dq in fp32."""
    number = -(-2 * weight.numel() // NF4_BLOCK)
    full: torch.Tensor = dequantize(scales[:number], scales[number:], number, 1, torch.float32)
    return full + 1.0


class _EightBits(torch.autograd.Function):
    """Product in 8 bits; the gradient of the input is one in the format of that input."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, out_features: int
    ) -> torch.Tensor:
        ctx.weight, ctx.scales, ctx.out_features = weight, scales, out_features
        if ctx.needs_input_grad[0]:
            # bitsandbytes keeps inputs of products in 8 bits, none of those in 4 bits.
            ctx.save_for_backward(source)
        rows = source.flatten(0, -2).to(torch.float16)
        result: torch.Tensor = eight_bit_product(to_eight_bits(rows, torch.int8), weight.t(), source.dtype)
        return result.view(*source.shape[:-1], out_features)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _input_gradient(ctx, gradient), None, None, None


def input_gradient(layer: QuantizedLinear, gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of the input of a layer in 4 bits from that of its output."""
    scales = layer.scales
    if layer.kind is Quantization.NF4_DQ:
        scales = _in_full(layer.weight, scales)
    return _times_weight(layer.weight, scales, layer.out_features, gradient)


def _input_gradient(ctx: Any, gradient: torch.Tensor) -> torch.Tensor | None:
    if not ctx.needs_input_grad[0]:
        return None
    return _times_weight(ctx.weight, ctx.scales, ctx.out_features, gradient)


def _times_weight(
    packed: torch.Tensor, scales: torch.Tensor, out_features: int, gradient: torch.Tensor
) -> torch.Tensor:
    number = packed.numel() * (2 if packed.dtype == torch.uint8 else 1)
    full = dequantize(packed, scales, out_features, number // out_features, gradient.dtype)
    found: torch.Tensor = gradient @ full
    return found
