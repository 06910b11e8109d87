"""The update of a fused optimizer, made from the multi-tensor update, which can be traced."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from forerun.graph.graph import AllocationKind, Graph, OpClass, OpTable, StepPart

__all__ = ["fuse_optimizer"]

_PARAMETERS_PER_LAUNCH = 320 * 65536
"""320 blocks of 65,536 elements."""


def fuse_optimizer(graph: Graph, num_kernels: int | None = None) -> Graph:
    """Replaces the optimizer rows by kernels that read and write each tensor once.

    The multi-tensor update reads and writes every list several times; the fused kernel reads weights,
    gradients and states and writes weights and states. With S state bytes and W weight bytes:
    read = 2 W + S, written = W + S. S is taken from the memory stream.

    Args:
        graph: A traced step.
        num_kernels: Number of kernels; those of PyTorch's multi-tensor launches if not given.
    """
    ops = graph.ops
    chosen = np.flatnonzero(ops.step_part == StepPart.OPTIMIZER)
    if not len(chosen):
        return graph
    weight_bytes = float(ops.element_bytes[chosen].max()) * graph.num_trainable_parameters
    state_bytes = _optimizer_state_bytes(graph)
    first = chosen[0]
    columns: dict[str, Any] = {}
    keep = np.append(np.flatnonzero(ops.step_part != StepPart.OPTIMIZER), first)
    for field in fields(OpTable):
        value = getattr(ops, field.name)
        if isinstance(value, np.ndarray):
            columns[field.name] = value[keep].copy()
    columns["count"][-1] = num_kernels or max(
        1.0, np.ceil(graph.num_trainable_parameters / _PARAMETERS_PER_LAUNCH)
    )
    # With master weights the first row is a conversion of gradients.
    columns["op_class"][-1] = OpClass.OPTIMIZER
    share = 1.0 / columns["count"][-1]
    columns["read_bytes"][-1] = ((2 * weight_bytes + state_bytes) * share, 0.0)
    columns["write_bytes"][-1] = ((weight_bytes + state_bytes) * share, 0.0)
    columns["elements"][-1] = (graph.num_trainable_parameters * share, 0.0)
    return replace(graph, ops=replace(ops, **columns))


def _optimizer_state_bytes(graph: Graph) -> float:
    is_state = graph.memory.kind == AllocationKind.OPTIMIZER_STATE
    return float(graph.memory.size_bytes[is_state, 0].sum())
