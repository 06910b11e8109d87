"""Rules of convolutions and their gradients; sizes as in the package's table."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow, TensorInfo
from forerun.tracing.op_rules.registry import rule

__all__: list[str] = []


def _conv_class(groups: int, channels_in: int, channels_out: int) -> OpClass:
    if groups == 1:
        return OpClass.CONV
    return OpClass.DEPTHWISE_CONV if groups in (channels_in, channels_out) else OpClass.GROUPED_CONV


def _conv_row(
    source: TensorInfo,
    weight: TensorInfo,
    out: TensorInfo,
    transposed: bool,
    groups: int,
    stride: Sequence[int],
    which: str,
) -> CostRow:
    """One of the three products of a convolution; for a transposed convolution, input and output change places."""
    if transposed:
        source, out = out, source
    batch, channels_in = source.shape[:2]
    channels_out = out.shape[1]
    area = prod(weight.shape[2:])
    in_pixels, out_pixels = batch * prod(source.shape[2:]), batch * prod(out.shape[2:])
    per_in, per_out = channels_in // groups, channels_out // groups
    if transposed:
        which = {"forward": "data", "data": "forward"}.get(which, which)
    gemm, moved = {
        "forward": ((out_pixels, per_out, per_in * area), (source, weight, out)),
        "data": ((in_pixels, per_in, per_out * area), (out, weight, source)),
        "weight": ((per_out, per_in * area, out_pixels), (out, source, weight)),
    }[which]
    return CostRow(
        op_class=_conv_class(groups, channels_in, channels_out),
        flops=2.0 * out_pixels * channels_out * per_in * area,
        read_bytes=moved[0].touched_bytes + moved[1].touched_bytes,
        write_bytes=moved[2].touched_bytes,
        element_bytes=source.element_bytes,
        gemm=(groups, *gemm),
        elements=source.num_elements + out.num_elements + weight.num_elements,
        kernel_area=area,
        stride=max(stride, default=1),
        groups=groups,
        width=out.shape[-1],
        is_weight_gradient=which == "weight",
    )


@rule("convolution", "_convolution", "cudnn_convolution", "convolution_overrideable")
def _convolution(call: Call) -> list[CostRow]:
    """Direct convolution in any number of dimensions; a bias is added by the same kernel."""
    source, weight, _, stride, _, _, transposed, _, groups = call.args[:9]
    return [_conv_row(source, weight, call.outputs[0], transposed, groups, stride, "forward")]


@rule("convolution_backward", "convolution_backward_overrideable")
def _convolution_backward(call: Call) -> list[CostRow]:
    """Data gradient, weight gradient and bias gradient, as far as they are needed."""
    grad, source, weight, _, stride, _, _, transposed, _, groups, wanted = call.args[:11]
    rows = []
    if wanted[0]:
        rows.append(_conv_row(source, weight, grad, transposed, groups, stride, "data"))
    if wanted[1]:
        rows.append(_conv_row(source, weight, grad, transposed, groups, stride, "weight"))
    if wanted[2]:
        rows.append(
            CostRow(
                op_class=OpClass.REDUCE,
                flops=grad.num_elements,
                read_bytes=grad.touched_bytes,
                write_bytes=grad.shape[1] * grad.element_bytes,
                elements=grad.num_elements,
                element_bytes=grad.element_bytes,
            )
        )
    return rows
