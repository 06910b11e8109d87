"""Tensors of a step that a compiler does not keep, and when it frees the others.

Under ``torch.compile`` a tensor that only one fused kernel writes and reads stays in registers. What the backward pass
reads is either saved, or computed again inside its fused kernels from what is saved. Which is saved is a minimum cut of
the forward pass between what cannot be computed again and what the backward pass reads, where a tensor costs its bytes.
The rules are those of PyTorch's partitioner:

- products, convolutions, attention, pooling, random numbers and gathers are never computed again, nor is a result that
  is a quarter of its inputs or less (the statistics of a norm are saved, its result is not);
- nor what a library kernel of the backward pass reads, which must lie in memory: the inputs of products;
- nor what a chain would have to carry past a library kernel, such as the sums of a residual stream;
- of equal cuts the tensors nearer to the end of the forward pass are saved.

Tensors whose views PyTorch's partitioner counts apart, its limit on the length of chains, and what inductor reuses in
place are left out. A loss that is not compiled keeps what eager code keeps. If the cut would need more than eager
execution, nothing changes.

Source: ``min_cut_rematerialization_partition`` of ``torch/_functorch/partitioners.py``, PyTorch 2.15; Ansel et al.
2024, "PyTorch 2", section 4.2, https://doi.org/10.1145/3620665.3640366
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.graph.graph import AllocationKind, MemoryEvent, OpClass, StepPart
from forerun.graph.passes import AS_IN_EAGER, NEVER_ALLOCATED
from forerun.tracing.fusion import POINTWISE, Access, DataFlow, joined_kernels
from forerun.tracing.recorder import RecordedEvent, RecordedRow

_FUSIBLE = (POINTWISE - {OpClass.EMBEDDING}) | {OpClass.GROUP_NORM}
"""Classes that the backward pass may compute again inside its own kernels."""

_MOST_STEPS_FROM_BACKWARD = 30
_BIAS_PER_STEP = 1.1
_COST_OF_WRITING = 2.0
"""Factor on the cost of a value that would otherwise stay inside fused kernels."""
_REDUCES_BY = 4
_TOTAL_CAPACITY = 1e9
_ENDLESS = 2**31 - 1

Value = tuple[int, int]
"""A block and how often it had been written."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The values of a step's rows.

    Attributes:
        rows: Data flow of each row.
        is_forward: Whether a row is of the forward pass and runs once, per row.
        is_fusible: Whether a compiler can compute the row inside another kernel, per row.
    """

    rows: Sequence[DataFlow]
    is_forward: Sequence[bool]
    is_fusible: Sequence[bool]


def compiled_ends(rows: Sequence[RecordedRow], events: Sequence[RecordedEvent]) -> list[int]:
    """End of the life of each block under a compiler, at the entry that allocates it.

    The end is the number, counted from one within the step, of the allocation before which the block is freed;
    ``NEVER_ALLOCATED`` for one that stays in registers, ``AS_IN_EAGER`` for one that is not concerned and for entries
    that are no allocation. Empty where the rows are not those of the second step.

    Args:
        rows: Rows of the second step.
        events: Allocations and frees of two steps.
    """
    ends = [AS_IN_EAGER] * len(events)
    first, second = _steps(events)
    flow = _flow(rows)
    written = {access.block for row in flow.rows for access in row.writes}
    if written.isdisjoint(_sizes(events, second)):
        return []
    saved = saved_values(flow, _sizes(events, second), _static(events, second))
    by_block = _ends_of_blocks(flow, events, second, saved)
    allocations = [position for position in second if events[position].event is MemoryEvent.ALLOCATE]
    for position in allocations:
        ends[position] = by_block.get(events[position].block, AS_IN_EAGER)
    as_in_eager = [AS_IN_EAGER] * len(events)
    # What needs more than eager execution is no gain that a compiler would take: the model of it has gone wrong.
    if _peak(events, ends, second) > _peak(events, as_in_eager, second):
        return as_in_eager
    # The first step allocates the same up to its update, without rows to look at.
    before = [position for position in first if events[position].event is MemoryEvent.ALLOCATE]
    for one, other in zip(before, allocations, strict=False):
        if events[one].size_bytes != events[other].size_bytes:
            break
        ends[one] = ends[other]
    return ends


def saved_blocks(rows: Sequence[RecordedRow], events: Sequence[RecordedEvent]) -> dict[int, int]:
    """Bytes of the blocks that a compiler keeps for the backward pass of the second step, by block."""
    _, step = _steps(events)
    flow, sizes = _flow(rows), _sizes(events, step)
    saved = saved_values(flow, sizes, _static(events, step))
    return {block: sizes.get(block, 0) for block, _ in saved}


def saved_values(flow: Flow, sizes: dict[int, int], static: frozenset[int]) -> frozenset[Value]:
    """Values of the forward pass that a compiler keeps for the backward pass.

    Args:
        flow: The rows of a step.
        sizes: Bytes of each block.
        static: Blocks that are there anyway: weights, buffers, the input.
    """
    rows, is_fusible = flow.rows, flow.is_fusible
    number_of: dict[Value, int] = {}
    parents: list[set[int]] = []
    writer: list[int] = []
    users: list[list[int]] = []
    read_by_backward: list[bool] = []
    banned: list[bool] = []

    def number(value: Value) -> int:
        if value not in number_of:
            number_of[value] = len(number_of)
            parents.append(set())
            writer.append(-1)
            users.append([])
            read_by_backward.append(False)
            banned.append(True)  # until a row is found that computes it
        return number_of[value]

    for index, row in enumerate(rows):
        if not flow.is_forward[index]:
            for access in _needed_reads(row):
                if access[:2] in number_of:
                    value = number_of[access[:2]]
                    read_by_backward[value] = True
                    banned[value] |= not is_fusible[index]
            continue
        reads = [number(access[:2]) for access in row.reads]
        for value in reads:
            users[value].append(index)
        kept = _kept_results(row) if is_fusible[index] else row.writes
        siblings = {number(access[:2]) for access in kept}
        for access in row.writes:
            value = number(access[:2])
            parents[value] |= {*reads, *siblings} - {value}
            writer[value] = index
            # A value is open to be computed again as soon as a fusible row is known to make it.
            banned[value] = access in kept  # rows of the backward pass, which ban more, come later
    _ban_uses_far_apart(rows, users, is_fusible, number_of, banned)
    values = list(number_of)
    distance = _distances(rows, users, writer, read_by_backward, number_of)
    cost = np.zeros(len(values))
    for index, (block, _) in enumerate(values):
        if block not in static:
            is_inside = all(is_fusible[row] for row in (writer[index], *users[index]))
            bias = _BIAS_PER_STEP ** min(distance[index], _MOST_STEPS_FROM_BACKWARD)
            cost[index] = sizes.get(block, 0) * bias * (_COST_OF_WRITING if is_inside else 1.0)
    cut = _minimum_cut(cost, parents, banned, read_by_backward)
    return frozenset(values[index] for index in cut if values[index][0] not in static)


def _needed_reads(row: DataFlow) -> tuple[Access, ...]:
    """Reads that a row of the backward pass needs: of the window of a maximum the place, not its input."""
    if row.op_class is not OpClass.MAX_POOL or not row.writes:
        return row.reads
    return tuple(access for access in row.reads if access.num_bytes != row.writes[0].num_bytes)


def _kept_results(row: DataFlow) -> tuple[Access, ...]:
    """Results of a fusible row that are not computed again: small ones of large inputs, and the mask of a dropout."""
    if row.op_class is OpClass.DROPOUT and len(row.writes) > 1:
        return row.writes[1:]
    read_bytes = sum(access.num_bytes for access in row.reads)
    return tuple(access for access in row.writes if _REDUCES_BY * access.num_bytes < read_bytes)


def _ban_uses_far_apart(
    rows: Sequence[DataFlow],
    users: Sequence[list[int]],
    is_fusible: Sequence[bool],
    number_of: dict[Value, int],
    banned: list[bool],
) -> None:
    """Bans results of rows that use a value beyond a library kernel that follows from another use of it."""
    for value_users in users:
        if len(value_users) < 2:
            continue
        last = max(value_users)
        # The search goes forward from the first use, in the order of the rows, and ends at the first kernel
        # of a library: fused code on both sides of it would be two kernels.
        first_library = last
        # A sorted list is a heap already.
        heap = sorted(set(value_users))
        seen = set(heap)
        while heap:
            index = heapq.heappop(heap)
            if not is_fusible[index]:
                first_library = index
                break
            for access in rows[index].writes:
                for user in users[number_of[access[:2]]]:
                    if user <= last and user not in seen:
                        seen.add(user)
                        heapq.heappush(heap, user)
        for index in value_users:
            if index > first_library and is_fusible[index]:
                for access in rows[index].writes:
                    banned[number_of[access[:2]]] = True


def _distances(
    rows: Sequence[DataFlow],
    users: Sequence[list[int]],
    writer: Sequence[int],
    read_by_backward: Sequence[bool],
    number_of: dict[Value, int],
) -> list[int]:
    """Rows between each value and the nearest row of the backward pass that needs it or what follows from it."""
    # From the last writer to the first, so that the distance of what follows is known.
    distance = [_MOST_STEPS_FROM_BACKWARD] * len(number_of)
    order = sorted(range(len(number_of)), key=lambda index: -writer[index])
    for index in order:
        if read_by_backward[index]:
            distance[index] = 1
        for user in users[index]:
            for access in rows[user].writes:
                following = distance[number_of[access[:2]]]
                distance[index] = min(distance[index], following + 1)
    return distance


def _minimum_cut(
    cost: np.ndarray, parents: Sequence[set[int]], banned: Sequence[bool], needed: Sequence[bool]
) -> list[int]:
    """Values whose cost is on the cheapest cut between what is banned from being computed again and what is needed."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    number = len(cost)
    if not number:
        return []
    source, sink = 2 * number, 2 * number + 1
    scale = _TOTAL_CAPACITY / max(cost.sum(), 1.0)
    # Each value is two nodes with an edge of its cost between them: a cut through it means that it is kept.
    edges: dict[tuple[int, int], int] = {}
    for index in range(number):
        begin, end = 2 * index, 2 * index + 1
        # Maximum flow takes whole numbers of 32 bits, so that costs are shares of their sum.
        edges[begin, end] = max(1, round(cost[index] * scale))
        if banned[index]:
            edges[source, begin] = _ENDLESS
        if needed[index]:
            edges[end, sink] = _ENDLESS
        for parent in parents[index]:
            edges[2 * parent + 1, begin] = _ENDLESS
    tails, heads = np.asarray(list(edges)).T
    capacities = csr_array(
        (np.asarray(list(edges.values()), dtype=np.int32), (tails, heads)), shape=(sink + 1, sink + 1)
    )
    flow = maximum_flow(capacities, source, sink).flow
    rest = capacities.astype(np.int64) - flow.astype(np.int64)
    # A full edge must not count as a way.
    rest.eliminate_zeros()
    reached = np.zeros(sink + 1, dtype=bool)
    reached[breadth_first_order(rest, source, return_predecessors=False)] = True
    return [index for index in range(number) if reached[2 * index] and not reached[2 * index + 1]]


def _flow(rows: Sequence[RecordedRow]) -> Flow:
    flows = [row.flow for row in rows]
    return Flow(
        flows,
        [row.step_part is StepPart.FORWARD and not row.recomputed for row in rows],
        [flow.op_class in _FUSIBLE and not flow.is_eager for flow in flows],
    )


def _steps(events: Sequence[RecordedEvent]) -> tuple[range, range]:
    """Positions of the entries of the first and the second step; empty where there are no two steps."""
    begins = [i for i, event in enumerate(events) if event.event is MemoryEvent.FORWARD_BEGINS]
    stops = [i for i, event in enumerate(events) if event.event is MemoryEvent.STEP_ENDS]
    if len(begins) != 2 or len(stops) != 2:
        return range(0), range(0)
    return range(begins[0], stops[0]), range(begins[1], stops[1])


def _sizes(events: Sequence[RecordedEvent], step: Iterable[int]) -> dict[int, int]:
    chosen = (events[position] for position in step)
    return {event.block: event.size_bytes for event in chosen if event.event is MemoryEvent.ALLOCATE}


def _static(events: Sequence[RecordedEvent], step: range) -> frozenset[int]:
    """Blocks that were there before the step."""
    before = (events[position] for position in range(step.start))
    return frozenset(event.block for event in before if event.event is MemoryEvent.ALLOCATE)


def _ends_of_blocks(
    flow: Flow, events: Sequence[RecordedEvent], step: range, saved: frozenset[Value]
) -> dict[int, int]:
    """End of each activation and temporary of a step, as ``compiled_ends`` counts it."""
    kernels, _ = joined_kernels(flow.rows)
    forward: defaultdict[int, list[int]] = defaultdict(list)
    backward: defaultdict[int, list[int]] = defaultdict(list)
    needed: defaultdict[Value, int] = defaultdict(lambda: -1)
    for index, row in enumerate(flow.rows):
        for access in (*row.reads, *row.writes):
            (forward if flow.is_forward[index] else backward)[access.block].append(index)
        if not flow.is_forward[index]:
            for access in _needed_reads(row):
                needed[access[:2]] = index
    for index in range(len(flow.rows) - 1, -1, -1):
        if flow.is_forward[index]:
            # A value that is not saved is computed again in the backward pass, so all that it is made from is
            # needed until then: walking from the last row to the first hands this on.
            again = [needed[access[:2]] for access in flow.rows[index].writes if access[:2] not in saved]
            for access in flow.rows[index].reads:
                needed[access[:2]] = max(needed[access[:2]], *again, -1)
    allocations = [events[position] for position in step if events[position].event is MemoryEvent.ALLOCATE]
    rows_of_allocations = [event.row for event in allocations]
    # Blocks that outlive the step (weights, state) are not the compiler's to move.
    freed = {events[position].block for position in step if events[position].event is MemoryEvent.FREE}
    marks = {events[position].event: position for position in step if events[position].block < 0}
    backward_begins = marks.get(MemoryEvent.BACKWARD_BEGINS, step.stop)
    update_begins = marks.get(MemoryEvent.OPTIMIZER_BEGINS, step.stop)
    saved_of: defaultdict[int, list[Value]] = defaultdict(list)
    for value in saved:
        saved_of[value[0]].append(value)

    def after(index: int) -> int:
        return bisect_right(rows_of_allocations, index) + 1

    def stays_in_registers(touching: list[int]) -> bool:
        # Written and read by one generated kernel alone: such a value never reaches memory.
        return len({kernels[index] for index in touching}) == 1 and all(
            flow.rows[index].is_joined for index in touching
        )

    found = {}
    for position in step:
        event = events[position]
        if event.event is not MemoryEvent.ALLOCATE or position > update_begins or event.block not in freed:
            continue
        if event.kind not in (AllocationKind.ACTIVATION, AllocationKind.TEMPORARY):
            continue
        if position > backward_begins:
            touching = backward[event.block]
            if touching and stays_in_registers(touching):
                found[event.block] = NEVER_ALLOCATED
            continue
        touching = forward[event.block]
        if not touching:
            continue
        if event.block in saved_of:
            # A saved value lives until its last reader of the backward pass, even if eager code would free it
            # earlier.
            found[event.block] = after(max(touching[-1], *(needed[value] for value in saved_of[event.block])))
        else:
            found[event.block] = NEVER_ALLOCATED if stays_in_registers(touching) else after(touching[-1])
    return found


def _peak(events: Sequence[RecordedEvent], ends: Sequence[int], step: range) -> int:
    """Most bytes of a step above those at its begin [bytes]."""
    moved: defaultdict[int, int] = defaultdict(int)
    own: dict[int, tuple[int, int]] = {}
    alive = peak = number = 0
    for position in step:
        event = events[position]
        if event.event is MemoryEvent.ALLOCATE:
            number += 1
            alive -= moved.pop(number, 0)
            end = ends[position]
            own[event.block] = (event.size_bytes, end)
            if end == NEVER_ALLOCATED:
                continue
            alive += event.size_bytes
            if end != AS_IN_EAGER:
                moved[end] += event.size_bytes
            peak = max(peak, alive)
        elif event.event is MemoryEvent.FREE:
            size, end = own.get(event.block, (0, AS_IN_EAGER))
            alive -= size if end == AS_IN_EAGER else 0
    return peak
