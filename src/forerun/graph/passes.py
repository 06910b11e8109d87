"""Steps of several passes: graphs put one after another, with samples that are several of their own.

A pass is a graph without an update, such as the forward pass of a reference model. Its operations stand before those of
the step, under module names that begin with the name of the pass; what it allocates is freed at its end.

Last stands the memory of a step under a compiler, from that of eager execution and the ends that the tracer found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from forerun.graph.graph import (
    AllocationKind,
    Floats,
    Graph,
    Ints,
    MemoryEvent,
    MemoryStream,
    OpClass,
    OpTable,
    StepPart,
    within_of,
)

_MARK = ": "


@dataclass(frozen=True, slots=True)
class Held:
    """A block of memory, affine in the batch: (constant, slope) [bytes]."""

    size_bytes: tuple[float, float]
    kind: AllocationKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of a step.

    Attributes:
        name: Its name, such as "reference".
        ops: Its operations.
        memory: Two of its steps, of which the second is what it allocates; None if that is next to nothing.
        held: Blocks it holds beside these while it runs.
        kept: Blocks that stay from step to step, such as the weights of its model.
    """

    name: str
    ops: OpTable
    memory: MemoryStream | None = None
    held: tuple[Held, ...] = ()
    kept: tuple[Held, ...] = field(default=())


def with_samples(graph: Graph, number: int) -> Graph:
    """The graph of a step whose sample is ``number`` samples of the model, in all that grows with the batch."""
    if number == 1:
        return graph
    tokens = graph.tokens_per_sample
    return replace(
        graph,
        ops=of_samples(graph.ops, number),
        memory=of_samples(graph.memory, number),
        tokens_per_sample=None if tokens is None else tokens * number,
        model_flops=(graph.model_flops[0], graph.model_flops[1] * number),
        recomputed_flops=(graph.recomputed_flops[0], graph.recomputed_flops[1] * number),
        eager_memory=None if graph.eager_memory is None else of_samples(graph.eager_memory, number),
    )


def of_samples(table: Any, number: float) -> Any:
    """A table whose sizes grow so many times as fast with the batch."""
    columns = {
        column.name: getattr(table, column.name) * np.array([1.0, number])
        for column in fields(table)
        if (within := within_of(column)) is not None and within.tail[-1:] == (2,)
    }
    return replace(table, **columns)


def step_of_passes(step: Graph, passes: Sequence[Pass]) -> Graph:
    """The step with passes before it, in their order."""
    if not passes:
        return step
    tables = [_named(item.ops, item.name) for item in passes]
    before = sum(len(table) for table in tables)
    flops = np.sum([product_flops(item.ops) for item in passes], axis=0)
    return replace(
        step,
        ops=joined_tables([*tables, step.ops]),
        memory=_joined_memory(step.memory, passes, before),
        eager_memory=None if step.eager_memory is None else _joined_memory(step.eager_memory, passes, before),
        model_flops=(step.model_flops[0] + float(flops[0]), step.model_flops[1] + float(flops[1])),
    )


def product_flops(ops: OpTable) -> Floats:
    """Work of the matrix products of a table, (constant, slope) in the batch [FLOP]."""
    is_product = ops.gemm[:, 0].sum(axis=-1) > 0
    found: Floats = (ops.flops * (ops.count * is_product)[:, None]).sum(axis=0)
    return found


def pass_rows(ops: OpTable) -> dict[str, Ints]:
    """Rows of each pass of a step by its name, in their order; the step's own have the empty name."""
    owner = [name.partition(_MARK)[0] if _MARK in name else "" for name in ops.module_names]
    of_row = np.asarray(owner, dtype=object)[ops.module]
    return {name: np.flatnonzero(of_row == name) for name in dict.fromkeys(of_row.tolist())}


def taken_rows(ops: OpTable, rows: Any, **columns: Any) -> OpTable:
    """A copy of some rows of a table, by number or flag, with other columns in place of theirs.

    Joined kernels are numbered anew: a table has no more of them than rows.
    """
    taken = {
        column.name: getattr(ops, column.name)[rows]
        for column in fields(OpTable)
        if not column.name.endswith("_names")
    }
    taken["joined"] = np.unique(taken["joined"], return_inverse=True)[1].reshape(-1)
    return replace(ops, **{**taken, **columns})


def forward_pass(graph: Graph) -> Graph:
    """The forward pass of a training step without dropout, as a validation runs it; its memory stays the step's."""
    ops = graph.ops
    is_forward = (
        (ops.step_part == StepPart.FORWARD) & (ops.recomputed == 0) & (ops.op_class != OpClass.DROPOUT)
    )
    taken = taken_rows(ops, is_forward)
    constant, slope = product_flops(taken)
    memory = replace(graph.memory, row=graph.memory.row[:0])
    return replace(
        graph,
        ops=taken,
        memory=memory,
        model_flops=(float(constant), float(slope)),
        recomputed_flops=(0.0, 0.0),
    )


def _named(ops: OpTable, name: str) -> OpTable:
    return replace(ops, module_names=tuple(f"{name}{_MARK}{module}" for module in ops.module_names))


def joined_tables(tables: Sequence[OpTable]) -> OpTable:
    """One table of several; names and numbers of joined kernels stay apart."""
    columns: dict[str, Any] = {"kernel_names": (), "module_names": ()}
    shifted = []
    number = 0
    for table in tables:
        shifted.append(
            replace(
                table,
                kernel=table.kernel + len(columns["kernel_names"]),
                module=table.module + len(columns["module_names"]),
                joined=table.joined + number,
            )
        )
        columns["kernel_names"] += table.kernel_names
        columns["module_names"] += table.module_names
        number += int(table.joined.max(initial=-1)) + 1
    for column in fields(OpTable):
        if column.name not in columns:
            columns[column.name] = np.concatenate([getattr(table, column.name) for table in shifted])
    return OpTable(**columns)


_Entry = tuple[int, int, tuple[float, float], int]
"""Event, block, size and kind of an entry of a stream, in the order of its columns."""


def _allocated(block: int, held: Held) -> _Entry:
    return int(MemoryEvent.ALLOCATE), block, held.size_bytes, int(held.kind)


def _freed(block: int, size_bytes: tuple[float, float]) -> _Entry:
    return int(MemoryEvent.FREE), block, size_bytes, -1


def _joined_memory(stream: MemoryStream, passes: Sequence[Pass], num_rows: int) -> MemoryStream:
    """The stream with the passes' blocks: those that stay before all else, the others where each step begins."""
    # Numbers of blocks are unique over the whole stream; those of the passes start after the step's own.
    blocks = iter(range(int(stream.block.max(initial=-1)) + 1, 1 << 62))
    pieces = [(0, [_allocated(next(blocks), held) for item in passes for held in item.kept])]
    begins = np.flatnonzero(stream.event == MemoryEvent.FORWARD_BEGINS)[:2].tolist()
    pieces += [(at + 1, [entry for item in passes for entry in _run_of(item, blocks)]) for at in begins]
    columns = {}
    for place, name in enumerate(("event", "block", "size_bytes", "kind")):
        column = getattr(stream, name)
        for position, entries in reversed(pieces):
            added = np.asarray([entry[place] for entry in entries], dtype=column.dtype)
            column = np.insert(column, position, added.reshape(-1, *column.shape[1:]), axis=0)
        columns[name] = column
    for name in ("row", "compiled_end"):
        column = getattr(stream, name)
        if len(column):
            column = np.where(column >= 0, column + num_rows, column) if name == "row" else column
            for position, entries in reversed(pieces):
                column = np.insert(column, position, np.full(len(entries), -1, dtype=column.dtype))
        columns[name] = column
    return MemoryStream(**columns)


def _run_of(item: Pass, blocks: Iterator[int]) -> Iterator[_Entry]:
    """Allocations and frees of one run of a pass, whose blocks have new numbers."""
    held = [(next(blocks), own) for own in item.held]
    for number, own in held:
        yield _allocated(number, own)
    alive: dict[int, tuple[int, tuple[float, float]]] = {}
    for event, block, size, kind in _second_step(item.memory):
        if event == MemoryEvent.ALLOCATE:
            alive[block] = (next(blocks), size)
            yield event, alive[block][0], size, kind
        elif block in alive:  # a block of the step before is not of this run
            yield _freed(*alive.pop(block))
    for number, size in alive.values():
        yield _freed(number, size)
    for number, own in reversed(held):
        yield _freed(number, own.size_bytes)


def _second_step(stream: MemoryStream | None) -> Iterator[_Entry]:
    """Allocations and frees of the second step of a stream."""
    if stream is None:
        return
    first, second = np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)[:2].tolist()
    for position in range(first + 1, second):
        if stream.event[position] in (MemoryEvent.ALLOCATE, MemoryEvent.FREE):
            constant, slope = stream.size_bytes[position].tolist()
            yield (
                int(stream.event[position]),
                int(stream.block[position]),
                (constant, slope),
                int(stream.kind[position]),
            )


AS_IN_EAGER = -1
"""End of a block that lives as long under a compiler as in eager execution."""
NEVER_ALLOCATED = 0
"""End of a block that a compiler holds in registers."""


_COMPILED_NOTE = (
    "memory is for a compiled step {} its loss: values that the backward pass computes again are not kept"
)
_EAGER_NOTE = "memory is for eager execution; torch.compile usually needs less"


def compiled_graph(graph: Graph, *, with_loss: bool = True) -> Graph:
    """The graph with the memory of a compiled step, or with a note where the tracer found no difference."""
    if not (graph.memory.compiled_end != AS_IN_EAGER).any():
        return replace(graph, notes=(*graph.notes, _EAGER_NOTE))
    notes = (*graph.notes, _COMPILED_NOTE.format("with" if with_loss else "without"))
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
