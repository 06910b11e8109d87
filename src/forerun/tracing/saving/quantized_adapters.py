"""Adapters of quantized layers as peft computes them; the module needs peft."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear

from forerun.question.saving import Quantization
from forerun.tracing.cuda_semantics import autocast_dtype_now
from forerun.tracing.saving.quantized import QuantizedLinear


class AdaptedQuantizedLinear(Linear):  # type: ignore[misc]
    """A quantized linear layer with adapters: the output of the layer, copied if it has 4 bits, plus the adapters'.

    Under autocast the adapters take the input as it is; otherwise it is converted to their format first.

    Source: peft 0.21, ``tuners/lora/bnb.py``, ``Linear4bit`` and ``Linear8bitLt``, which need bitsandbytes.
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The layer's output in the precision of its input."""
        base: QuantizedLinear = self.get_base_layer()
        result: torch.Tensor = self.base_layer(x, *args, **kwargs)
        # bitsandbytes' 4-bit layer hands out a buffer that peft clones before adding to it; the 8-bit one
        # does not.
        if base.kind is not Quantization.INT8:
            result = result.clone()
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            source = x
            if autocast_dtype_now() is None:
                source = self._cast_input_dtype(x, self.lora_A[name].weight.dtype)
            inside = self.lora_A[name](self.lora_dropout[name](source))
            output = self.lora_B[name](inside) * self.scaling[name]
            if autocast_dtype_now() is None:
                output = output.to(result.dtype)
            result = result + output
        return result
