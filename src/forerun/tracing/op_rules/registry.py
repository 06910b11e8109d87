"""The registry of cost rules, and the row of an operation that streams its operands."""

from __future__ import annotations

from collections.abc import Callable

from forerun.graph.graph import OpClass
from forerun.tracing.calls import Call, CostRow, TensorInfo

__all__ = ["RULES", "Rule", "rule", "streaming_row", "streaming_rules", "traffic"]

Rule = Callable[[Call], list[CostRow]]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Registers a rule; two rules for one operation are refused."""

    def register(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return register


def traffic(call: Call) -> tuple[float, float, float, int]:
    """Traffic as (read bytes, written bytes, elements of the largest operand, its element bytes)."""
    inputs, outputs = call.tensors(), call.outputs
    largest = max((*inputs, *outputs), key=lambda t: t.num_elements, default=TensorInfo((), 4, 0))
    read = float(sum(t.touched_bytes for t in inputs))
    written = float(sum(t.touched_bytes for t in outputs))
    return read, written, float(largest.num_elements), largest.element_bytes


def streaming_row(
    call: Call,
    op_class: OpClass,
    flops_per_element: float = 1.0,
    width: float = 0.0,
    is_supported: bool = True,
) -> CostRow:
    """Row of a kernel that reads its tensor arguments once and writes its results once."""
    read, write, elements, element_bytes = traffic(call)
    return CostRow(
        op_class=op_class,
        flops=flops_per_element * elements,
        read_bytes=read,
        write_bytes=write,
        element_bytes=element_bytes,
        elements=elements,
        width=width,
        is_supported=is_supported,
    )


def streaming_rules(op_class: OpClass, flops_per_element: float, names: str) -> None:
    """Registers operations that read and write each operand once.

    Args:
        op_class: Class of all these operations.
        flops_per_element: Work per element of the largest operand [FLOP].
        names: Names of the operations, separated by blanks.
    """

    @rule(*names.split())
    def stream(call: Call) -> list[CostRow]:
        return [streaming_row(call, op_class, flops_per_element)]
