"""Joins the traces of one step at two batch sizes into a graph for any batch size.

Every size of the step is assumed affine in the batch, ``f(B) = c + s B``; two traces give c and s. The
assumption is checked as far as two traces allow: the same operations and the same allocations in the same
order, and no size that grew faster than the batch. A third trace checks the rest in the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np

from forerun.graph.graph import Graph, MemoryStream, OpClass, OpTable, StepPart
from forerun.tracing.compiled_memory import compiled_ends
from forerun.tracing.fusion import joined_kernels
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.recorder import RecordedEvent, RecordedRow
from forerun.tracing.saving.quantized import num_weights
from forerun.tracing.step import RawTrace

_PRODUCTS = frozenset({
    OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV, OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION,
    OpClass.RECURRENT,
})  # fmt: skip
_COLUMNS = ("count", "element_bytes", "kernel_area", "stride", "groups", "width", "serial_steps", "law_size")
_AFFINE = ("flops", "read_bytes", "write_bytes", "elements")
"""Columns of operations that their cost rows have under the same names: plain ones, and sizes."""
_MIN_GEMM = (OpClass.LINEAR, OpClass.BMM)

NamedShapes = list[tuple[str, tuple[int, ...]]]


def are_comparable(small: RawTrace, large: RawTrace) -> bool:
    """True if both traces hold the same operations and memory events in the same order."""
    if len(small.rows) != len(large.rows) or len(small.events) != len(large.events):
        return False
    same_rows = all(_identity(a) == _identity(b) for a, b in zip(small.rows, large.rows, strict=True))
    return same_rows and all(
        a.event == b.event and a.block == b.block for a, b in zip(small.events, large.events, strict=True)
    )


def is_affine(graph: Graph) -> bool:
    """True if no size of a joined graph grew faster than the batch.

    A size that more than doubled from batch 2 to 4, such as the similarities of all pairs of samples, has a
    negative constant.
    """
    ops, memory = graph.ops, graph.memory
    sizes = (ops.flops, ops.read_bytes, ops.write_bytes, ops.elements, ops.gemm, memory.size_bytes)
    return all(size[..., 0].min(initial=0.0) > -0.5 for size in sizes)


def join_traces(
    built: BuiltModel, small: RawTrace, large: RawTrace | None, versions: Iterable[tuple[str, str]]
) -> Graph:
    """Graph of a model from its traces at one or two batch sizes.

    Args:
        built: The traced model.
        small: Trace at the smaller batch.
        large: Trace at the larger batch, comparable with ``small``; None for a graph of one batch size.
        versions: Libraries that made the trace.
    """
    parameters = list(built.module.parameters())
    repeated = Counter(built.all_blocks)
    ops = op_table(
        small, large, [(n, tuple(p.shape)) for n, p in built.module.named_parameters(remove_duplicate=False)]
    )
    has_norm = bool(np.any(ops.op_class == OpClass.LAYER_NORM))
    return Graph(
        model=built.name,
        input_shape=built.input_shape,
        num_parameters=num_weights(built.module),
        num_trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_names=tuple(name for name, _ in built.module.named_parameters()),
        ops=ops,
        memory=memory_stream(small, large),
        only_batch_size=small.batch_size if large is None else None,
        uses_layer_norm=has_norm,
        unsupported_ops=tuple(sorted(small.unsupported)),
        notes=built.notes,
        versions=tuple(versions),
        tokens_per_sample=built.tokens_per_sample,
        blocks=built.blocks,
        model_flops=product_flops(small, large, recomputed=False, repeated=repeated),
        recomputed_flops=product_flops(small, large, recomputed=True, repeated=repeated),
    )


_BACKWARD_SCORES = 1 / 5
"""Share of the products of a fused attention's backward pass that compute the scores again."""


def product_flops(
    small: RawTrace,
    large: RawTrace | None,
    *,
    recomputed: bool,
    repeated: Mapping[str, int] = MappingProxyType({}),
) -> tuple[float, float]:
    """Work of the products of a step that training needs, or of those that are computed again, (constant, slope).

    Args:
        small: Trace at the smaller batch.
        large: Trace at the larger one.
        recomputed: Whether products that are computed again are meant.
        repeated: Blocks of the model that each traced one stands for; those that it lacks for themselves.
    """
    copies: dict[str, int] = {}
    for name in dict.fromkeys(row.module_name for row in small.rows) if repeated else ():
        parts = name.split(".")
        block = next((b for end in range(len(parts) + 1) if (b := ".".join(parts[:end])) in repeated), "")
        copies[name] = repeated.get(block, 1)

    def work(trace: RawTrace) -> float:
        total = 0.0
        for row in trace.rows:
            if row.cost.op_class not in _PRODUCTS:
                continue
            flops = row.cost.flops * row.cost.count * row.cost.speedup
            again = 1.0 if row.recomputed else 0.0
            if row.cost.op_class is OpClass.ATTENTION and row.step_part is StepPart.BACKWARD:
                # A fused kernel computes the scores again: one of the five products of its backward pass.
                again = _BACKWARD_SCORES
            total += copies.get(row.module_name, 1) * flops * (again if recomputed else 1.0 - again)
        return total

    sizes = (small.batch_size, large.batch_size if large else small.batch_size + 1)
    (constant, slope) = _affine([work(small)], None if large is None else [work(large)], sizes)[0]
    return float(constant), float(slope)


def _identity(row: RecordedRow) -> tuple[object, ...]:
    return row.kernel_name, row.module_name, row.step_part, row.cost.op_class, row.recomputed


def _affine(small: list[float], large: list[float] | None, batch_sizes: tuple[int, int]) -> np.ndarray:
    first = np.asarray(small, dtype=np.float64)
    if large is None:
        return np.stack([first, np.zeros_like(first)], axis=-1)
    low, high = batch_sizes
    slope = (np.asarray(large, dtype=np.float64) - first) / (high - low)
    return np.stack([first - slope * low, slope], axis=-1)


def op_table(small: RawTrace, large: RawTrace | None, named_shapes: NamedShapes) -> OpTable:
    """The operations of one or two traces; the names of parameters with their shapes tell weight gradients in one."""
    rows = small.rows
    batch_sizes = (small.batch_size, large.batch_size if large else small.batch_size + 1)

    def affine(name: str) -> np.ndarray:
        values = [getattr(row.cost, name) for row in rows]
        others = [getattr(row.cost, name) for row in large.rows] if large else None
        if not rows:
            # A model without any operation still has columns of the right shape.
            return np.zeros((0, 4, 2) if name == "gemm" else (0, 2))
        return _affine(values, others, batch_sizes)

    def column(name: str, kind: type = np.float64) -> np.ndarray:
        return np.asarray([getattr(row.cost, name) for row in rows], dtype=kind)

    kernels = sorted({row.kernel_name for row in rows})
    modules = sorted({row.module_name for row in rows})
    kernel_index = {name: i for i, name in enumerate(kernels)}
    module_index = {name: i for i, name in enumerate(modules)}
    gemm = affine("gemm")
    part = np.asarray([row.step_part for row in rows], dtype=np.int64)
    has_weight_shape = None if large else _has_weight_shape(rows, named_shapes)
    joined, kept = joined_kernels([row.flow for row in rows])
    kept_of_large = joined_kernels([row.flow for row in large.rows])[1] if large else None
    return OpTable(
        op_class=column("op_class", np.int64),
        step_part=_with_weight_gradients(part, column("op_class", np.int64), gemm, has_weight_shape),
        kernel=np.asarray([kernel_index[row.kernel_name] for row in rows], dtype=np.int64),
        module=np.asarray([module_index[row.module_name] for row in rows], dtype=np.int64),
        **{name: column(name) for name in _COLUMNS},
        **{name: affine(name) for name in _AFFINE},
        gemm=gemm,
        in_place=np.asarray([row.in_place for row in rows], dtype=np.float64),
        permuted=np.asarray([row.permuted for row in rows], dtype=np.float64),
        joined=np.asarray(joined, dtype=np.int64),
        joined_bytes=_affine(kept, kept_of_large, batch_sizes) if rows else np.zeros((0, 2)),
        recomputed=np.asarray([row.recomputed for row in rows], dtype=np.float64),
        kernel_names=tuple(kernels),
        module_names=tuple(modules),
    )


def _has_weight_shape(rows: list[RecordedRow], named_shapes: NamedShapes) -> np.ndarray:
    """True for each product whose result has the shape of a weight of its module, or its transpose, (n,)."""
    shapes = {
        module: {shape for name, shape in named_shapes if name.startswith(f"{module}." if module else "")}
        for module in {row.module_name for row in rows}
    }
    found = []
    for row in rows:
        groups, m, n, _ = row.cost.gemm
        lead = () if row.cost.op_class is OpClass.LINEAR else (groups,)
        found.append(not shapes[row.module_name].isdisjoint({(*lead, m, n), (*lead, n, m)}))
    return np.asarray(found, dtype=bool)


def _with_weight_gradients(
    part: np.ndarray, op_class: np.ndarray, gemm: np.ndarray, has_weight_shape: np.ndarray | None
) -> np.ndarray:
    """The operations with weight gradients marked: backward products whose sum, but not result, grows with the batch.

    A single trace does not show growth: there a weight gradient is a product whose result has the shape of a weight of
    its module. The gradient of the input has that shape too if the batch has as many rows as the weight.
    """
    _, m, n, k = np.moveaxis(gemm, 1, 0)
    if has_weight_shape is None:
        is_weight = (m[:, 1] == 0) & (n[:, 1] == 0) & (k[:, 1] != 0)
    else:
        is_weight = has_weight_shape.copy()
    is_weight &= np.isin(op_class, _MIN_GEMM) & (part == StepPart.BACKWARD)
    return np.where(is_weight, int(StepPart.WEIGHT_GRADIENT), part)


def memory_stream(small: RawTrace, large: RawTrace | None) -> MemoryStream:
    """The allocations of one or two traces."""
    events = small.events

    def column(name: str, source: list[RecordedEvent]) -> list[int]:
        return [getattr(event, name) for event in source]

    batch_sizes = (small.batch_size, large.batch_size if large else small.batch_size + 1)
    sizes: list[float] = [float(size) for size in column("size_bytes", events)]
    others = [float(size) for size in column("size_bytes", large.events)] if large else None
    return MemoryStream(
        event=np.asarray(column("event", events), dtype=np.int64),
        block=np.asarray(column("block", events), dtype=np.int64),
        size_bytes=_affine(sizes, others, batch_sizes) if events else np.zeros((0, 2)),
        kind=np.asarray(column("kind", events), dtype=np.int64),
        row=np.asarray(column("row", events), dtype=np.int64),
        compiled_end=np.asarray(compiled_ends(small.rows, events), dtype=np.int64),
    )
