"""Rules of matrix products in any format, of attention and recurrent layers as fused kernels, and of convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import prod

from forerun.graph.blocks import EIGHT_BIT_PRODUCT, EIGHT_BIT_RATE
from forerun.graph.graph import OpClass
from forerun.question.setup import FLASH_3_GAIN, AttentionKernel
from forerun.tracing.calls import Call, CostRow, TensorInfo, operation_facts, rule, streaming_row, traffic

NUM_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
"""Number of gates of a recurrent cell."""

_KERNEL: ContextVar[AttentionKernel] = ContextVar("kernel", default=AttentionKernel.PLAIN)
_CAUSAL = operation_facts()["causal"]


@contextmanager
def attention_as(kernel: AttentionKernel) -> Iterator[None]:
    """Fused attention is recorded with the work that a library does for it."""
    token = _KERNEL.set(kernel)
    try:
        yield
    finally:
        _KERNEL.reset(token)


def _product(
    op_class: OpClass, groups: float, m: float, n: float, k: float, call: Call, element_bytes: int
) -> CostRow:
    read, write, _, _ = traffic(call)
    return CostRow(
        op_class=op_class,
        flops=2.0 * groups * m * n * k,
        read_bytes=read,
        write_bytes=write,
        element_bytes=element_bytes,
        gemm=(groups, m, n, k),
        elements=groups * (m * n + m * k + n * k),
    )


@rule("mm", "addmm", "addmm_", "_addmm_activation", "mv", "addmv", "addmv_")
def _mm(call: Call) -> list[CostRow]:
    """(m, k) x (k, n): 2 m n k FLOP."""
    left, right = call.tensors()[-2:]
    m, k = left.shape
    n = right.shape[1] if len(right.shape) > 1 else 1
    return [_product(OpClass.LINEAR, 1, m, n, k, call, left.element_bytes)]


@rule("add_product_")
def _add_product(call: Call) -> list[CostRow]:
    return _mm(replace(call, outputs=(call.tensors()[0],)))


@rule("bmm", "baddbmm", "baddbmm_")
def _bmm(call: Call) -> list[CostRow]:
    """(g, m, k) x (g, k, n): 2 g m n k FLOP."""
    left, right = call.tensors()[-2:]
    groups, m, k = left.shape
    return [_product(OpClass.BMM, groups, m, right.shape[2], k, call, left.element_bytes)]


@rule("_grouped_mm")
def _grouped_mm(call: Call) -> list[CostRow]:
    """Products of groups of tokens, each with the weights of its expert, evenly many tokens to each.

    (t, k) x (g, k, n) for the tokens, (g, m, k) x (k, t) for their transpose, (m, t) x (t, n) for the gradients
    of the weights, (g, m, n); all 2 x tokens x weights of one expert FLOP. Batched where both have the groups.
    """
    left, right = call.tensors()[:2]
    groups = call.outputs[0].shape[0] if len(left.shape) == len(right.shape) else 0
    groups = groups or (left if len(left.shape) == 3 else right).shape[0]
    m = left.shape[-2] / (groups if len(left.shape) < len(right.shape) else 1)
    n = right.shape[-1] / (groups if len(left.shape) > len(right.shape) else 1)
    k = left.shape[-1] / (groups if len(left.shape) == len(right.shape) == 2 else 1)
    return [_product(OpClass.BMM, groups, m, n, k, call, left.element_bytes)]


@rule("linalg_solve_triangular", "triangular_solve")
def _solve_triangular(call: Call) -> list[CostRow]:
    """(g, n, n) and (g, n, k): g n n k FLOP, half of a product, as the other half of the matrix is zero."""
    matrix, right = call.tensors()[:2]
    *groups, n, _ = matrix.shape
    row = _product(OpClass.BMM, prod(groups), n, right.shape[-1], n, call, matrix.element_bytes)
    return [replace(row, flops=row.flops / 2)]


@rule("_cdist_forward")
def _cdist(call: Call) -> list[CostRow]:
    left, right = call.tensors()[:2]
    *groups, m, k = left.shape
    return [_product(OpClass.BMM, prod(groups), m, right.shape[-2], k, call, left.element_bytes)]


DELTA_PIECE = 64
"""Tokens of a piece in which the gated delta rule is computed."""


@rule("delta_rule", "delta_rule_backward")
def _delta_rule(call: Call) -> list[CostRow]:
    """6 C d + 4 C e + 6 d e FLOP for each token and head, see ``tracing.models.linear_attention``; backward thrice."""
    is_backward = call.name.endswith("backward")
    key, value = call.tensors()[1 + is_backward : 3 + is_backward]
    times = 3.0 if is_backward else 1.0
    places, d, e, piece = prod(value.shape[:-1]), key.shape[-1], value.shape[-1], float(DELTA_PIECE)
    between = times * places * value.element_bytes * (d + 2 * e + d * e / piece)
    depth = times * (6 * piece * d + 4 * piece * e + 6 * d * e) / (2 * e)
    row = _product(OpClass.BMM, places / piece, piece, e, depth, call, value.element_bytes)
    return [
        replace(
            row,
            read_bytes=row.read_bytes + between,
            write_bytes=row.write_bytes + between,
            elements=traffic(call)[2],
        )
    ]


def _saved(call: Call) -> float:
    """Time of plain attention over that of the chosen kernel."""
    kernel, place = _KERNEL.get(), _CAUSAL.get(call.name)
    if kernel is AttentionKernel.PLAIN:
        return 1.0
    is_causal = place is not None and len(call.args) > place and bool(call.args[place])
    return (2.0 if is_causal else 1.0) * (FLASH_3_GAIN if kernel is AttentionKernel.FLASH_3 else 1.0)


@rule(*(f"{name}{part}" for name in operation_facts()["fused_attention"] for part in ("", "_backward")))
def _attention(call: Call) -> list[CostRow]:
    """Two products for each head: 2 B h Lq Lk (d + dv) FLOP; what a kernel saves of it counts as done, for MFU.

    Five in the backward pass, one of them the recomputed scores.
    """
    is_backward = call.name.endswith("backward")
    query, key, value = call.tensors()[is_backward : 3 + is_backward]
    *groups, num_queries, head_size = query.shape
    num_keys, value_size = key.shape[-2], value.shape[-1]
    read, write, elements, _ = traffic(call)
    pairs, saved = prod(groups) * num_queries * num_keys, _saved(call)
    return [
        CostRow(
            op_class=OpClass.ATTENTION,
            flops=(5.0 if is_backward else 2.0) * pairs * (head_size + value_size) / saved,
            speedup=saved,
            read_bytes=read,
            write_bytes=write,
            element_bytes=query.element_bytes,
            gemm=(prod(groups), num_queries, num_keys, head_size),
            elements=elements,
            width=num_keys,
        )
    ]


def _recurrent_row(
    call: Call,
    source: TensorInfo,
    hidden: TensorInfo,
    weights: list[TensorInfo],
    passes: float,
    mode: str,
    num_chains: int,
    batch_first: bool,
    num_steps: int,
) -> CostRow:
    """Row of a recurrent layer: each weight matrix multiplies every token once, 2 tokens x weights FLOP per pass.

    The T steps of each of ``num_chains`` layers and directions depend on each other.
    """
    if num_steps:  # packed sequences
        batch = source.shape[0] / num_steps
    else:
        num_steps, batch = (source.shape[1], source.shape[0]) if batch_first else source.shape[:2]
    num_weights = sum(w.num_elements for w in weights if len(w.shape) == 2)
    read, write, elements, _ = traffic(call)
    hidden_size = hidden.shape[-1]
    return CostRow(
        op_class=OpClass.RECURRENT,
        flops=2.0 * passes * num_steps * batch * num_weights,
        read_bytes=read,
        write_bytes=write,
        element_bytes=source.element_bytes,
        gemm=(1, batch, NUM_GATES[mode] * hidden_size, hidden_size),
        elements=elements,
        width=hidden_size,
        serial_steps=num_steps * num_chains,
    )


@rule("rnn")
def _rnn(call: Call) -> list[CostRow]:
    source, hidden, weights, mode, num_layers, num_directions, batch_first, _, num_steps = call.args
    num_chains = num_layers * num_directions
    return [_recurrent_row(call, source, hidden, weights, 1.0, mode, num_chains, batch_first, num_steps)]


@rule("rnn_backward")
def _rnn_backward(call: Call) -> list[CostRow]:
    _, source, hidden, weights, _, mode, num_layers, num_directions, batch_first, num_steps = call.args
    num_chains = num_layers * num_directions
    return [_recurrent_row(call, source, hidden, weights, 2.0, mode, num_chains, batch_first, num_steps)]


def _in_eight_bits(row: CostRow) -> CostRow:
    """A product of half the depth in 16 bits: the same bytes, and the same time; ``speedup`` keeps the work done."""
    gemm = (*row.gemm[:3], row.gemm[3] / EIGHT_BIT_RATE)
    flops = row.flops / EIGHT_BIT_RATE
    return replace(row, flops=flops, gemm=gemm, element_bytes=2, speedup=EIGHT_BIT_RATE)


@rule(EIGHT_BIT_PRODUCT)
def _eight_bit_product(call: Call) -> list[CostRow]:
    """(m, k) x (k, n) in 8 bits."""
    row = _in_eight_bits(*_mm(call))
    _, m, n, depth = row.gemm
    return [replace(row, elements=m * n + m * depth + n * depth)]


@rule(f"grouped_{EIGHT_BIT_PRODUCT}")
def _grouped_eight_bit_product(call: Call) -> list[CostRow]:
    return [_in_eight_bits(*_grouped_mm(call))]


@rule("to_eight_bits")
def _to_eight_bits(call: Call) -> list[CostRow]:
    largest = Call(call.name, call.args, ())
    return [streaming_row(largest, OpClass.REDUCE), streaming_row(call, OpClass.CAST)]


@rule("to_eight_bits_twice")
def _to_eight_bits_twice(call: Call) -> list[CostRow]:
    looked = [streaming_row(Call(call.name, call.args, ()), OpClass.REDUCE)] if call.args[2] else []
    return [*looked, streaming_row(call, OpClass.CAST)]


@rule("adamw_8bit_")
def _adamw_8bit(call: Call) -> list[CostRow]:
    """One kernel reads weight, gradient and state, and writes weight and state."""
    weight, _, *state = call.tensors()
    changed = (weight, *state)
    return [streaming_row(Call(call.name, call.args, changed), OpClass.OPTIMIZER, 20.0)]


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
