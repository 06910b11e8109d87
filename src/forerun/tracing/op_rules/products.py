"""Rules of matrix products, and of attention and recurrent layers as fused kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from math import prod

from forerun.graph.graph import OpClass
from forerun.run.setup import FLASH_3_GAIN, AttentionKernel
from forerun.tracing.calls import Call, CostRow, TensorInfo
from forerun.tracing.op_rules.registry import rule, streaming_row, traffic

__all__ = ["NUM_GATES", "attention_as"]

NUM_GATES = {"lstm": 4, "gru": 3, "rnn": 1}
"""Number of gates of a recurrent cell."""

_KERNEL: ContextVar[AttentionKernel] = ContextVar("kernel", default=AttentionKernel.PLAIN)
# Places of ``is_causal`` in the schemas.
_CAUSAL = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}


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


@rule("dot", "vdot")
def _dot(call: Call) -> list[CostRow]:
    return [streaming_row(call, OpClass.REDUCE, 2.0)]


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


@rule("_cdist_forward")
def _cdist(call: Call) -> list[CostRow]:
    left, right = call.tensors()[:2]
    *groups, m, k = left.shape
    return [_product(OpClass.BMM, prod(groups), m, right.shape[-2], k, call, left.element_bytes)]


def _attention_row(
    query: TensorInfo, key: TensorInfo, value: TensorInfo, call: Call, num_products: float
) -> CostRow:
    """Row of ``num_products`` matrix products of (Lq, Lk) with the head size, for each of B x heads."""
    *groups, num_queries, head_size = query.shape
    num_keys, value_size = key.shape[-2], value.shape[-1]
    read, write, elements, _ = traffic(call)
    pairs = prod(groups) * num_queries * num_keys
    saved = _saved(call)
    return CostRow(
        op_class=OpClass.ATTENTION,
        flops=num_products * pairs * (head_size + value_size) / saved,
        speedup=saved,
        read_bytes=read,
        write_bytes=write,
        element_bytes=query.element_bytes,
        gemm=(prod(groups), num_queries, num_keys, head_size),
        elements=elements,
        width=num_keys,
    )


def _saved(call: Call) -> float:
    """Time of plain attention over that of the chosen kernel."""
    kernel, place = _KERNEL.get(), _CAUSAL.get(call.name)
    if kernel is AttentionKernel.PLAIN:
        return 1.0
    is_causal = place is not None and len(call.args) > place and bool(call.args[place])
    return (2.0 if is_causal else 1.0) * (FLASH_3_GAIN if kernel is AttentionKernel.FLASH_3 else 1.0)


@rule(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
def _attention(call: Call) -> list[CostRow]:
    """Two products: 2 B h Lq Lk (d + dv) FLOP; what a kernel saves of it counts as done, for MFU."""
    query, key, value = call.tensors()[:3]
    return [_attention_row(query, key, value, call, 2.0)]


@rule(
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
def _attention_backward(call: Call) -> list[CostRow]:
    """Five products, one of them the recomputed scores: 5 B h Lq Lk (d + dv) FLOP."""
    query, key, value = call.tensors()[1:4]
    return [_attention_row(query, key, value, call, 5.0)]


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
