"""Joins the graphs of one step at two batch sizes into a graph for any batch size.

Every size of the step is assumed affine in the batch, ``f(B) = c + s B``; two graphs give c and s. The assumption is
checked as far as two graphs allow: the same operations and the same allocations in the same order, and no size that
grew faster than the batch. A third batch size checks the rest in the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from forerun.graph.file import SMALLEST_BATCHES
from forerun.graph.graph import Graph, OpClass, StepPart

_SIZES = ("flops", "read_bytes", "write_bytes", "gemm", "elements")
_SAME = ("kernel", "module", "op_class", "recomputed", "count", "element_bytes", "kernel_area", "stride", "groups",
         "serial_steps", "law_size")  # fmt: skip
_LEAST = -0.5
"""Rounding of whole bytes or elements. Faster growth than the batch has a negative constant, shrinking a slope."""
_BATCH_SIZES = (2, 4)
"""From two, because batch norm after global pooling refuses a single value per channel."""


def graph_for(graph_at: Callable[[int], Graph], batch_size: int) -> Graph:
    """The graph of a step for any batch size; for one alone if its operations depend on the batch size.

    Args:
        graph_at: Makes the graph of one batch size.
        batch_size: The batch size of that one.
    """
    # Two batches give every size as a line; a third would cost half as much again.
    small, large = (graph_at(size) for size in _BATCH_SIZES)
    if not are_comparable(small, large):  # a first step may also fill the model's own caches
        small = graph_at(_BATCH_SIZES[0])
    if (joined := join_graphs(small, large)) is not None:
        return joined
    alone = graph_at(batch_size)
    note = "the operations of this model depend on the batch size: it is traced for each batch size"
    return replace(alone, notes=(*alone.notes, note))


def join_graphs(first: Graph, second: Graph) -> Graph | None:
    """The graph for any batch size from those of two sizes; None if no line goes through them.

    value = constant + slope * batch.

    Args:
        first: Graph of one batch size.
        second: The same step at another batch size.
    """
    low, high = first.only_batch_size, second.only_batch_size
    if low is None or high is None or low == high or not are_comparable(first, second):
        return None
    apart = high - low

    def affine(a: Any, b: Any) -> Any:
        slope = (b[..., 0] - a[..., 0]) / apart
        return np.stack([a[..., 0] - slope * low, slope], axis=-1)

    def work(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
        constant, slope = affine(np.asarray(a), np.asarray(b))
        return float(constant), float(slope)

    ops: dict[str, Any] = {n: affine(getattr(first.ops, n), getattr(second.ops, n)) for n in _SIZES}
    size_bytes = affine(first.memory.size_bytes, second.memory.size_bytes)
    if any(value.min(initial=0.0) < _LEAST for value in (size_bytes, *ops.values())):
        return None
    # What a kernel that a compiler makes of several rows moves may fall short, shrink where it takes in one more, and
    # jump where it takes in one less: no line, so that of the larger batch through nothing.
    one, other = first.ops.joined_bytes, second.ops.joined_bytes
    line, of_more = affine(one, other), (other if high > low else one)[..., :1] / max(low, high)
    constant, slope = line[..., :1], line[..., 1:]
    through_nothing = np.concatenate([0 * of_more, of_more], axis=-1)
    line = np.where((slope >= 0) & (constant < -SMALLEST_BATCHES * slope), through_nothing, line)
    ops["joined_bytes"] = np.where(slope < 0, np.maximum(one, other), line)
    _, m, n, k = np.moveaxis(ops["gemm"], 1, 0)
    part = _without_weight_gradients(first)
    is_product = np.isin(first.ops.op_class, (OpClass.LINEAR, OpClass.BMM)) & (part == StepPart.BACKWARD)
    # A weight gradient sums over the batch; its result does not grow with it.
    is_weight = is_product & (m[:, 1] == 0) & (n[:, 1] == 0) & (k[:, 1] != 0)
    ops["step_part"] = np.where(is_weight, int(StepPart.WEIGHT_GRADIENT), part)
    return replace(
        first,
        only_batch_size=None,
        ops=replace(first.ops, **ops),
        memory=replace(first.memory, size_bytes=size_bytes),
        model_flops=work(first.model_flops, second.model_flops),
        recomputed_flops=work(first.recomputed_flops, second.recomputed_flops),
    )


def are_comparable(first: Graph, second: Graph) -> bool:
    """True if both graphs hold the same operations and memory events in the same order."""
    ops, others = first.ops, second.ops
    names = (ops.kernel_names, ops.module_names) == (others.kernel_names, others.module_names)
    columns = [(getattr(ops, name), getattr(others, name)) for name in _SAME]
    columns += [(getattr(first.memory, name), getattr(second.memory, name)) for name in ("event", "block")]
    columns.append((_without_weight_gradients(first), _without_weight_gradients(second)))
    return names and all(np.array_equal(a, b) for a, b in columns)


def _without_weight_gradients(graph: Graph) -> Any:
    """Parts of the step, with weight gradients among the other backward products: one batch size cannot tell them."""
    part = graph.ops.step_part
    is_guess = (part == StepPart.WEIGHT_GRADIENT) & np.isin(graph.ops.op_class, (OpClass.LINEAR, OpClass.BMM))
    return np.where(is_guess, int(StepPart.BACKWARD), part)
