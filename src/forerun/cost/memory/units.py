"""Memory of the units of a step, from its stream: what each keeps for its backward pass, and its own peaks.

A unit's forward pass changes the live bytes by ``kept``, and reaches ``forward_peak`` above its beginning; its backward
pass frees what was kept, with a peak of its own. Any schedule of units on a device is then a sum: the step of one stage
of a pipeline with several micro-steps in flight is replayed unit by unit, without its thousands of allocations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.base.kept import Kept
from forerun.graph.blocks import Blocks, Phase
from forerun.graph.graph import AllocationKind, Floats, Graph, Ints, MemoryEvent
from forerun.graph.shards import Shards, allocation_shares

_KEPT: Kept[UnitMemory] = Kept(1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """Bytes of one micro-step on one device by unit; gradients are counted apart.

    Attributes:
        kept: Live bytes at the end of the forward pass of a unit less those at its begin, (units,) [bytes].
        forward_peak: Most bytes above those at the begin of the forward pass, (units,) [bytes].
        backward_net: Change over the backward pass, (units,) [bytes].
        backward_peak: Most bytes above those at the begin of the backward pass, (units,) [bytes].
        weights: Weights, (units,) [bytes].
        buffers: Tensors beside the weights that no update changes, such as the scales of quantized weights, (units,),
            in proportion to the weights [bytes].
        gradients: Gradients of the weights, (units,) [bytes].
        expert_share: Share of experts in both, if devices divide these: fewer have the same ones, (units,).
        num_gradients: Their number, (units,).
        largest_gradient: Largest gradient of a single weight, (units,) [bytes].
        tied: The embedding that the head holds as well if it is on another device [bytes].
        state_ratio: State of the optimizer over gradients.
        optimizer_ratio: Temporaries of the update over gradients.
        inputs: The batch [bytes].
    """

    kept: Floats
    forward_peak: Floats
    backward_net: Floats
    backward_peak: Floats
    weights: Floats
    buffers: Floats
    gradients: Floats
    expert_share: Floats
    num_gradients: Floats
    largest_gradient: Floats
    tied: float
    state_ratio: float
    optimizer_ratio: float
    inputs: float


def unit_memory(graph: Graph, blocks: Blocks, shards: Shards, batch_size: int) -> UnitMemory:
    """Memory of the units at a batch size, divided by tensor and context parallelism; remembered.

    Args:
        graph: Traced step.
        blocks: Its units.
        shards: Devices that share a sequence.
        batch_size: Samples of a micro-step.
    """
    return _KEPT.get(
        (graph,),
        (shards, batch_size),
        lambda: _found(graph, blocks, shards, batch_size),
    )


def _found(graph: Graph, blocks: Blocks, shards: Shards, batch_size: int) -> UnitMemory:
    stream = graph.memory
    size, kind = _block_sizes(graph, blocks, shards, batch_size)
    ends = np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)
    step = slice(int(ends[0]) + 1, int(ends[1]) + 1)
    event, block, row = stream.event[step], stream.block[step], stream.row[step]
    is_allocation, is_free = event == MemoryEvent.ALLOCATE, event == MemoryEvent.FREE
    moves = (is_allocation | is_free) & (block >= 0)
    changes = np.where(moves, (is_allocation.astype(float) - is_free) * size[block], 0.0)
    kinds = np.where(moves, kind[block], -1)
    # A block is freed after the operation before, which is the last that used it.
    at = np.clip(np.where(is_free, row - 1, row), 0, len(graph.ops) - 1)
    unit, phase = blocks.unit[at], blocks.phase[at]
    # What the step before left behind, such as old gradients, is not this step's.
    own = np.zeros(len(size), dtype=bool)
    own[block[is_allocation]] = True
    is_activation = np.isin(kinds, (AllocationKind.ACTIVATION, AllocationKind.TEMPORARY)) & own[block]
    columns = {
        name: np.zeros(blocks.num_units) for name in ("kept", "forward_peak", "backward_net", "backward_peak")
    }
    for index in range(blocks.num_units):
        for part, net, peak in (
            (Phase.FORWARD, "kept", "forward_peak"),
            (Phase.BACKWARD, "backward_net", "backward_peak"),
        ):
            chosen = changes[is_activation & (unit == index) & (phase == part)]
            columns[net][index] = chosen.sum()
            columns[peak][index] = np.cumsum(chosen).max(initial=0.0)
    is_gradient = is_allocation & (kinds == AllocationKind.GRADIENT)
    # Gradients that come into being at the update belong to no block: the first has them.
    owner = np.maximum(unit[is_gradient], 0)
    gradients = np.bincount(owner, weights=changes[is_gradient], minlength=blocks.num_units)
    largest = np.zeros(blocks.num_units)
    np.maximum.at(largest, owner, changes[is_gradient])
    in_update = changes[is_activation & (phase == Phase.OPTIMIZER)]
    fixed_bytes = stream.size_bytes[stream.event == MemoryEvent.ALLOCATE, 0]
    made = stream.kind[stream.event == MemoryEvent.ALLOCATE]
    # Only the gradients of the second step are known as such.
    whole = max(float(fixed_bytes[made == AllocationKind.GRADIENT].sum()), 1.0)
    state = float(fixed_bytes[made == AllocationKind.OPTIMIZER_STATE].sum())
    has_part = blocks.weight_divided & ~(shards.whole_experts & blocks.weight_expert)
    share = np.where(has_part, 1 / shards.tensor, 1.0)
    share *= np.where(blocks.weight_expert, 1 / shards.expert, 1.0)
    held = blocks.weight_bytes * share
    weights = np.bincount(blocks.weight_unit, weights=held, minlength=blocks.num_units)
    held *= blocks.weight_expert & (shards.expert > 1)
    of_experts = np.bincount(blocks.weight_unit, weights=held, minlength=blocks.num_units)
    buffers = float(fixed_bytes[made == AllocationKind.BUFFER].sum())
    return UnitMemory(
        **columns,
        weights=weights.astype(float),
        buffers=weights.astype(float) * (buffers / max(float(blocks.weight_bytes.sum()), 1.0)),
        gradients=gradients.astype(float),
        expert_share=of_experts / np.maximum(weights, 1.0),
        num_gradients=np.bincount(owner, minlength=blocks.num_units).astype(float),
        largest_gradient=largest,
        tied=blocks.tied_bytes / shards.tensor,
        state_ratio=state / whole,
        optimizer_ratio=float(np.cumsum(in_update).max(initial=0.0)) / whole,
        inputs=float(size[kind == AllocationKind.INPUT].sum()) / shards.context,
    )


def _block_sizes(graph: Graph, blocks: Blocks, shards: Shards, batch_size: int) -> tuple[Floats, Ints]:
    """Size [bytes] and kind of every block on one device, by the number of the block."""
    stream = graph.memory
    made = stream.event == MemoryEvent.ALLOCATE
    number = int(stream.block.max(initial=-1)) + 1
    sizes, kinds = np.zeros(number), np.full(number, -1)
    row = np.clip(stream.row[made], 0, len(graph.ops) - 1)
    known = stream.row[made] >= 0
    growing, fixed = allocation_shares(graph.ops, blocks, shards)
    kind = stream.kind[made]
    plain = ~known | (kind == AllocationKind.INPUT)
    # State and gradients of the first step were not recorded with their operation; they count by ratio only.
    share_growing = np.where(plain, 1.0, growing[row])
    share_fixed = np.where(plain, 1.0, fixed[row])
    size = stream.size_bytes[made]
    sizes[stream.block[made]] = size[:, 0] * share_fixed + size[:, 1] * batch_size * share_growing
    kinds[stream.block[made]] = kind
    return sizes, kinds
