"""The rows of a traced layer that belong to the layer itself."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from forerun.graph.graph import OpTable, StepPart

__all__ = ["only_modules"]


def only_modules(ops: OpTable) -> OpTable:
    """The rows that a module or the optimizer caused; those that make up a loss for the trace are left out."""
    has_module = np.asarray([bool(ops.module_names[i]) for i in ops.module], dtype=bool)
    keep = has_module | (ops.step_part == StepPart.OPTIMIZER)
    arrays = {
        field.name: value[keep]
        for field in fields(OpTable)
        if isinstance(value := getattr(ops, field.name), np.ndarray)
    }
    return replace(ops, **arrays)
