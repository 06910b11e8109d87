"""One framework call as plain numbers, the cost row of its kernels, and the registry of rules from one to the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from forerun.base.tables import own_table
from forerun.graph.graph import OpClass


def operation_facts() -> Mapping[str, Any]:
    """Lists and places of ``operations.toml``."""
    return own_table(__file__, "operations.toml")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape and storage of one tensor argument.

    Attributes:
        shape: Sizes of the axes.
        element_bytes: Bytes of one element.
        num_touched: Number of elements in memory; expanded axes (stride 0) count once.
        is_floating: True if the elements are floating point.
        strides: Distance between neighbours along each axis, in elements; empty if not known.
    """

    shape: tuple[int, ...]
    element_bytes: int
    num_touched: int
    is_floating: bool = True
    strides: tuple[int, ...] = ()

    @classmethod
    def dense(cls, *shape: int, element_bytes: int = 4, is_floating: bool = True) -> TensorInfo:
        """A contiguous tensor of this shape."""
        return cls(shape, element_bytes, prod(shape), is_floating)

    @property
    def num_elements(self) -> int:
        """Number of elements as the operation sees them."""
        return prod(self.shape)

    def memory_order(self) -> tuple[int, ...]:
        """Axes from the slowest to the fastest in memory, without axes of one element."""
        axes = [axis for axis, size in enumerate(self.shape) if size > 1]
        return tuple(sorted(axes, key=lambda axis: -self.strides[axis])) if self.strides else tuple(axes)

    @property
    def touched_bytes(self) -> int:
        """Size of the elements in memory [bytes]."""
        return self.num_touched * self.element_bytes


@dataclass(frozen=True, slots=True)
class Call:
    """A dispatched operation.

    Attributes:
        name: Name without namespace and overload, such as ``convolution_backward``.
        args: Arguments in schema order, defaults filled in; tensors as ``TensorInfo``.
        outputs: Returned tensors.
        in_place: True if an argument is overwritten.
    """

    name: str
    args: tuple[Any, ...]
    outputs: tuple[TensorInfo, ...]
    in_place: bool = False

    def is_permuted(self) -> bool:
        """True if an operand of the result's shape lies in memory in another order than the result."""
        if not self.outputs or self.outputs[0].num_elements < 2:
            return False
        out = self.outputs[0]
        return any(
            t.shape == out.shape
            and t.num_touched == out.num_touched
            and t.memory_order() != out.memory_order()
            for t in self.tensors()
        )

    def tensors(self) -> list[TensorInfo]:
        """All tensor arguments, lists flattened."""
        found: list[TensorInfo] = []
        for value in self.args:
            if isinstance(value, TensorInfo):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found.extend(item for item in value if isinstance(item, TensorInfo))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """Cost of one or more equal kernels at one batch size; fields as in ``graph.OpTable``.

    ``speedup`` is the rate of a product's format over that of 16 bits, where the product stands as a smaller one.
    """

    op_class: OpClass
    flops: float = 0.0
    read_bytes: float = 0.0
    write_bytes: float = 0.0
    element_bytes: int = 4
    gemm: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    elements: float = 0.0
    count: float = 1.0
    kernel_area: float = 1.0
    stride: float = 1.0
    groups: float = 1.0
    width: float = 0.0
    serial_steps: float = 1.0
    law_size: float = 1.0
    is_weight_gradient: bool = False
    speedup: float = 1.0
    is_supported: bool = True


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
