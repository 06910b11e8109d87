"""Rules of products, casts and updates in 8 bits, and of Liger's loss."""

from __future__ import annotations

from forerun.graph.blocks import EIGHT_BIT_PRODUCT, EIGHT_BIT_RATE
from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow
from forerun.tracing.op_rules.registry import rule, streaming_row, traffic

__all__: list[str] = []


@rule(EIGHT_BIT_PRODUCT)
def _eight_bit_product(call: Call) -> list[CostRow]:
    """(m, k) x (k, n) in 8 bits, as a product of half the depth in 16 bits: the same bytes, and the same time.

    ``speedup`` keeps the work that is really done.
    """
    left, right = call.tensors()
    m, k = left.shape
    n = right.shape[1]
    read, write, _, _ = traffic(call)
    depth = k / EIGHT_BIT_RATE
    return [
        CostRow(
            op_class=OpClass.LINEAR,
            flops=2.0 * m * n * depth,
            read_bytes=read,
            write_bytes=write,
            element_bytes=2,
            gemm=(1, m, n, depth),
            elements=m * n + m * depth + n * depth,
            speedup=EIGHT_BIT_RATE,
        )
    ]


@rule("to_eight_bits")
def _to_eight_bits(call: Call) -> list[CostRow]:
    largest = Call(call.name, call.args, ())
    return [streaming_row(largest, OpClass.REDUCE), streaming_row(call, OpClass.CAST)]


@rule("to_eight_bits_twice")
def _to_eight_bits_twice(call: Call) -> list[CostRow]:
    looked = [streaming_row(Call(call.name, call.args, ()), OpClass.REDUCE)] if call.args[2] else []
    return [*looked, streaming_row(call, OpClass.CAST)]


@rule("dequantize_weight")
def _dequantize(call: Call) -> list[CostRow]:
    return [streaming_row(call, OpClass.CAST, 2.0)]


@rule("adamw_8bit_")
def _adamw_8bit(call: Call) -> list[CostRow]:
    """One kernel reads weight, gradient and state, and writes weight and state."""
    weight, _, *state = call.tensors()
    changed = (weight, *state)
    return [streaming_row(Call(call.name, call.args, changed), OpClass.OPTIMIZER, 20.0)]


@rule("liger_cross_entropy_")
def _liger_cross_entropy(call: Call) -> list[CostRow]:
    """One kernel reads the logits, a second time from the cache, and overwrites them.

    At one reading and one writing it has the rate of element-wise kernels: 0.74 of the bandwidth of an A100
    (``llm/liger_kernels``, cross_entropy).
    """
    logits = call.tensors()[0]
    return [streaming_row(Call(call.name, call.args, (logits,)), OpClass.ACTIVATION, 10.0)]
