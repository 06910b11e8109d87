"""Rules of kernels that Liger-Kernel and Unsloth write, each of which reads its tensors once."""

from __future__ import annotations

from dataclasses import replace

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow, TensorInfo
from forerun.tracing.op_rules.registry import rule, streaming_row

__all__ = ["TRITON_KERNELS"]

TRITON_KERNELS: dict[str, tuple[OpClass, float]] = {
    "_rms_norm_forward_kernel": (OpClass.LAYER_NORM, 1.0),
    "_rms_norm_backward_kernel": (OpClass.LAYER_NORM, 1.0),
    "_rms_layernorm_forward": (OpClass.LAYER_NORM, 1.0),
    "_rms_layernorm_backward": (OpClass.LAYER_NORM, 4 / 3),
    "_triton_rope": (OpClass.ELEMENTWISE, 2.0),
    "_rope_embedding": (OpClass.ELEMENTWISE, 2.0),
    "_rope_embedding_QK": (OpClass.ELEMENTWISE, 2.0),
    "_swiglu_forward_kernel": (OpClass.ACTIVATION, 1.0),
    "_swiglu_backward_kernel": (OpClass.ACTIVATION, 5 / 3),
    "_geglu_tanh_forward_kernel": (OpClass.ACTIVATION, 1.0),
    "_geglu_tanh_backward_kernel": (OpClass.ACTIVATION, 5 / 3),
    "_fg_kernel": (OpClass.ACTIVATION, 1.0),
    "_DWf_DW_dfg_kernel": (OpClass.ACTIVATION, 2.0),
    "liger_cross_entropy_kernel": (OpClass.ACTIVATION, 2.0),
    "_cross_entropy_forward": (OpClass.REDUCE, 1.0),
    "_chunked_cross_entropy_forward": (OpClass.REDUCE, 1.0),
    "_cross_entropy_backward": (OpClass.ACTIVATION, 2.0),
}
"""Class of Liger-Kernel's and Unsloth's own kernels, by their names in a script, and how often each of their tensors is
moved: twice by one that works in place."""


def _row(
    call: Call, op_class: OpClass, work: float, *changed: TensorInfo, width: float = 0.0
) -> list[CostRow]:
    """Row of a kernel that writes its results, and some of its arguments anew."""
    row = streaming_row(replace(call, outputs=(*call.outputs, *changed)), op_class, work, width=width)
    return [row]


@rule("cross_entropy")
def _cross_entropy(call: Call) -> list[CostRow]:
    return _row(call, OpClass.REDUCE, 5.0)


@rule("cross_entropy_backward_")
def _cross_entropy_backward(call: Call) -> list[CostRow]:
    return _row(call, OpClass.ACTIVATION, 5.0, call.tensors()[0])


@rule("rms_norm")
def _rms_norm(call: Call) -> list[CostRow]:
    return _row(call, OpClass.LAYER_NORM, 5.0, width=float(call.tensors()[0].shape[-1]))


@rule("rms_norm_backward_")
def _rms_norm_backward(call: Call) -> list[CostRow]:
    gradient = call.tensors()[0]
    return _row(call, OpClass.LAYER_NORM, 8.0, gradient, width=float(gradient.shape[-1]))


@rule("rotate_")
def _rotate(call: Call) -> list[CostRow]:
    queries, keys = call.tensors()[:2]
    return _row(call, OpClass.ELEMENTWISE, 4.0, queries, keys)


@rule("gated")
def _gated(call: Call) -> list[CostRow]:
    return _row(call, OpClass.ACTIVATION, 5.0)


@rule("gated_backward_")
def _gated_backward(call: Call) -> list[CostRow]:
    gate, other = call.tensors()[:2]
    return _row(call, OpClass.ACTIVATION, 10.0, gate, other)
