"""The memory of a step under a compiler, from that of eager execution and the ends that the tracer found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from forerun.graph.graph import AllocationKind, Graph, Ints, MemoryEvent, MemoryStream

AS_IN_EAGER = -1
"""End of a block that lives as long under a compiler as in eager execution."""
NEVER_ALLOCATED = 0
"""End of a block that a compiler holds in registers."""


_COMPILED_NOTE = (
    "memory is for a compiled step with its loss: values that the backward pass computes again are not kept"
)
_EAGER_NOTE = "memory is for eager execution; torch.compile usually needs less"


def compiled_graph(graph: Graph) -> Graph:
    """The graph with the memory of a compiled step, or with a note where the tracer found no difference."""
    if not (graph.memory.compiled_end != AS_IN_EAGER).any():
        return replace(graph, notes=(*graph.notes, _EAGER_NOTE))
    notes = (*graph.notes, _COMPILED_NOTE)
    return replace(graph, memory=_compiled(graph.memory), eager_memory=graph.memory, notes=notes)


def _compiled(stream: MemoryStream) -> MemoryStream:
    """The stream with blocks left out, and freed where their compiled ends say."""
    order: list[int] = []
    rows = stream.row.copy() if len(stream.row) else stream.row
    freed_before: dict[int, list[int]] = {}
    frees = np.flatnonzero(stream.event == MemoryEvent.FREE)
    free_of = dict(zip(stream.block[frees].tolist(), frees.tolist(), strict=True))
    own_end: dict[int, int] = {}
    number = 0

    def free(positions: list[int], at: int) -> None:
        for position in positions:
            order.append(position)
            if len(rows):
                rows[position] = stream.row[at]

    for position, (event, block, end) in enumerate(
        zip(stream.event.tolist(), stream.block.tolist(), stream.compiled_end.tolist(), strict=True)
    ):
        if event == MemoryEvent.ALLOCATE:
            # Ends count allocations, not positions: they hold for every batch size and for any part of a
            # step.
            number += 1
            free(freed_before.pop(number, []), position)
            own_end[block] = end
            if end > 0 and block in free_of:
                freed_before.setdefault(end, []).append(free_of[block])
            if end == NEVER_ALLOCATED:
                continue
        # Its compiled end frees it, or it was never allocated.
        elif event == MemoryEvent.FREE and own_end.get(block, AS_IN_EAGER) != AS_IN_EAGER:
            continue
        elif event in (MemoryEvent.OPTIMIZER_BEGINS, MemoryEvent.STEP_ENDS):
            # An end beyond the last allocation of the pass is due now.
            for positions in freed_before.values():
                free(positions, position)
            freed_before = {}
        elif event == MemoryEvent.FORWARD_BEGINS:
            number = 0
        order.append(position)
    chosen = np.asarray(order, dtype=np.int64)
    columns = {field.name: getattr(stream, field.name) for field in fields(stream)}
    columns["row"] = rows
    columns["kind"] = _kinds(stream, order)
    taken = {name: column[chosen] for name, column in columns.items() if len(column)}
    return MemoryStream(**(taken | {"compiled_end": np.zeros(0, dtype=np.int64)}))


def _kinds(stream: MemoryStream, order: Sequence[int]) -> Ints:
    """Kinds of the blocks, of which those alive between the passes are activations and the others temporaries."""
    kinds = stream.kind.copy()
    in_forward: dict[int, int] = {}
    for position in order:
        event, block = int(stream.event[position]), int(stream.block[position])
        if event == MemoryEvent.FORWARD_BEGINS:
            in_forward = {}
        elif event == MemoryEvent.BACKWARD_BEGINS:
            kinds[list(in_forward.values())] = AllocationKind.ACTIVATION
            in_forward = {}
        elif event == MemoryEvent.ALLOCATE and stream.compiled_end[position] != AS_IN_EAGER:
            in_forward[block] = position
        elif event == MemoryEvent.FREE and block in in_forward:
            kinds[in_forward.pop(block)] = AllocationKind.TEMPORARY
    return kinds
