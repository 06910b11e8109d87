"""Turns the trace of one step at one batch size into its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.graph.graph import Graph, MemoryStream, OpClass, OpTable, StepPart
from forerun.tracing.compiled_memory import compiled_ends
from forerun.tracing.fusion import joined_kernels
from forerun.tracing.models.built_model import BuiltModel
from forerun.tracing.recorder import RecordedRow
from forerun.tracing.saving.quantized import num_weights
from forerun.tracing.step import RawTrace

_PRODUCTS = frozenset({
    OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV, OpClass.LINEAR, OpClass.BMM, OpClass.ATTENTION,
    OpClass.RECURRENT,
})  # fmt: skip
_COLUMNS = ("count", "element_bytes", "kernel_area", "stride", "groups", "width", "serial_steps", "law_size")
_SIZES = ("flops", "read_bytes", "write_bytes", "elements")
"""Columns of operations that their cost rows have under the same names: plain ones, and sizes."""

NamedShapes = list[tuple[str, tuple[int, ...]]]


def step_graph(built: BuiltModel, trace: RawTrace, versions: Iterable[tuple[str, str]]) -> Graph:
    """Graph of a model from its trace at one batch size.

    Args:
        built: The traced model.
        trace: The trace.
        versions: Libraries that made the trace.
    """
    parameters = list(built.module.parameters())
    repeated = Counter(built.all_blocks)
    shapes = [(n, tuple(p.shape)) for n, p in built.module.named_parameters(remove_duplicate=False)]
    ops = op_table(trace, shapes)
    has_norm = bool(np.any(ops.op_class == OpClass.LAYER_NORM))
    return Graph(
        model=built.name,
        input_shape=built.input_shape,
        num_parameters=num_weights(built.module),
        num_trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        parameter_names=tuple(name for name, _ in built.module.named_parameters()),
        ops=ops,
        memory=memory_stream(trace),
        only_batch_size=trace.batch_size,
        uses_layer_norm=has_norm,
        unsupported_ops=tuple(sorted(trace.unsupported)),
        notes=built.notes,
        versions=tuple(versions),
        tokens_per_sample=built.tokens_per_sample,
        blocks=built.blocks,
        model_flops=product_flops(trace, recomputed=False, repeated=repeated),
        recomputed_flops=product_flops(trace, recomputed=True, repeated=repeated),
    )


_BACKWARD_SCORES = 1 / 5
"""Share of the products of a fused attention's backward pass that compute the scores again."""


def product_flops(
    trace: RawTrace, *, recomputed: bool, repeated: Mapping[str, int] = MappingProxyType({})
) -> tuple[float, float]:
    """Work of the products of a step that training needs, or of those that are computed again, (constant, slope).

    Args:
        trace: Trace of the step.
        recomputed: Whether products that are computed again are meant.
        repeated: Blocks of the model that each traced one stands for; those that it lacks for themselves.
    """
    copies: dict[str, int] = {}
    for name in dict.fromkeys(row.module_name for row in trace.rows) if repeated else ():
        parts = name.split(".")
        block = next((b for end in range(len(parts) + 1) if (b := ".".join(parts[:end])) in repeated), "")
        copies[name] = repeated.get(block, 1)

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
    return total, 0.0


def op_table(trace: RawTrace, named_shapes: NamedShapes) -> OpTable:
    """The operations of a trace; the names of parameters with their shapes tell weight gradients."""
    rows = trace.rows

    def constant(values: list[Any], *shape: int) -> np.ndarray:
        # A model without any operation still has columns of the right shape.
        found = np.asarray(values, dtype=np.float64).reshape(len(rows), *shape)
        return np.stack([found, np.zeros_like(found)], axis=-1)

    def column(name: str, kind: type = np.float64) -> np.ndarray:
        return np.asarray([getattr(row.cost, name) for row in rows], dtype=kind)

    kernels = sorted({row.kernel_name for row in rows})
    modules = sorted({row.module_name for row in rows})
    kernel_index = {name: i for i, name in enumerate(kernels)}
    module_index = {name: i for i, name in enumerate(modules)}
    part = np.asarray([row.step_part for row in rows], dtype=np.int64)
    is_weight = np.isin(column("op_class", np.int64), (OpClass.LINEAR, OpClass.BMM)) & (
        part == StepPart.BACKWARD
    )
    is_weight &= _has_weight_shape(rows, named_shapes)
    joined, kept = joined_kernels([row.flow for row in rows])
    return OpTable(
        op_class=column("op_class", np.int64),
        step_part=np.where(is_weight, int(StepPart.WEIGHT_GRADIENT), part),
        kernel=np.asarray([kernel_index[row.kernel_name] for row in rows], dtype=np.int64),
        module=np.asarray([module_index[row.module_name] for row in rows], dtype=np.int64),
        **{name: column(name) for name in _COLUMNS},
        **{name: constant([getattr(row.cost, name) for row in rows]) for name in _SIZES},
        gemm=constant([row.cost.gemm for row in rows], 4),
        in_place=np.asarray([row.in_place for row in rows], dtype=np.float64),
        permuted=np.asarray([row.permuted for row in rows], dtype=np.float64),
        joined=np.asarray(joined, dtype=np.int64),
        joined_bytes=constant(kept),
        recomputed=np.asarray([row.recomputed for row in rows], dtype=np.float64),
        kernel_names=tuple(kernels),
        module_names=tuple(modules),
    )


def _has_weight_shape(rows: list[RecordedRow], named_shapes: NamedShapes) -> np.ndarray:
    """True for each product whose result has the shape of a weight of its module, or its transpose, (n,).

    One batch size does not show what grows with it. The gradient of the input has that shape too if the batch has as
    many rows as the weight.
    """
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


def memory_stream(trace: RawTrace) -> MemoryStream:
    """The allocations of a trace."""

    def column(name: str, kind: type = np.int64) -> np.ndarray:
        return np.asarray([getattr(event, name) for event in trace.events], dtype=kind)

    size_bytes = column("size_bytes", np.float64)
    return MemoryStream(
        event=column("event"),
        block=column("block"),
        size_bytes=np.stack([size_bytes, np.zeros_like(size_bytes)], axis=-1),
        kind=column("kind"),
        row=column("row"),
        compiled_end=np.asarray(compiled_ends(trace.rows, trace.events), dtype=np.int64),
    )
