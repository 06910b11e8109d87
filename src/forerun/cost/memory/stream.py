"""Live bytes of a stream of allocations, and the repetition of its second step.

Everything here is a function of ``graph.MemoryStream`` and a batch size, vectorised over the entries;
the allocator, which adds fragmentation, is replayed in ``memory.replay``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.cost.memory.allocator import BLOCK_BYTES
from forerun.graph.graph import AllocationKind, MemoryEvent, MemoryStream, at_batch

__all__ = [
    "LivePeak",
    "RepeatingStep",
    "block_sizes_bytes",
    "live_peak",
    "live_peak_bytes",
    "repeating_step",
    "steady_state_events",
]

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_PHASES = {
    MemoryEvent.FORWARD_BEGINS: "forward",
    MemoryEvent.BACKWARD_BEGINS: "backward",
    MemoryEvent.OPTIMIZER_BEGINS: "optimizer",
    MemoryEvent.STEP_ENDS: "between steps",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePeak:
    """The moment at which most bytes are alive.

    Attributes:
        total_bytes: Bytes alive, every block rounded up to 512 [bytes].
        phase: forward, backward, optimizer, between steps, or setup.
        bytes_by_kind: The same bytes by kind of contents [bytes].
    """

    total_bytes: int
    phase: str
    bytes_by_kind: Mapping[AllocationKind, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatingStep:
    """The second step in a form that can be repeated any number of times.

    Attributes:
        entries: Positions in the stream of the entries that repeat, in order, (k,).
        frees_previous: True if an entry frees a block that the step before allocated, (k,).
        block: Identity in the stream of the block that an entry allocates or frees; if the freed block is of the
            step before, the block of the second step that takes its place; -1 for markers, (k,).
    """

    entries: Ints
    frees_previous: Bools
    block: Ints


def block_sizes_bytes(size_bytes: npt.NDArray[np.float64], batch_size: float) -> Ints:
    """Sizes at a batch size, rounded up to the allocator's 512 bytes [bytes]."""
    # rint first: 3 + 0.1 * 10 must not become 5 blocks because of the last bit of a float.
    requested = np.rint(at_batch(size_bytes, batch_size)).astype(np.int64)
    sizes: Ints = -(-requested // BLOCK_BYTES) * BLOCK_BYTES
    return sizes


def live_peak_bytes(stream: MemoryStream, batch_size: float) -> int:
    """Most bytes alive at any moment of the two steps [bytes].

    max over entries of the running sum of +size at an allocation and -size at its free. Every block
    counts as PyTorch's ``memory_allocated`` does, rounded up to 512 bytes. Fragmentation is left out.

    Args:
        stream: Two traced steps.
        batch_size: Samples in the step.
    """
    changes, _ = _changes_bytes(stream, batch_size)
    return int(np.cumsum(changes).max(initial=0))


def live_peak(stream: MemoryStream, batch_size: float) -> LivePeak:
    """The moment of ``live_peak_bytes`` and the blocks alive at that moment.

    Args:
        stream: Two traced steps.
        batch_size: Samples in the step.
    """
    changes, kinds = _changes_bytes(stream, batch_size)
    alive = np.cumsum(changes)
    # Of equal moments take the last: it lies in the second step, where gradients and state are in place.
    moment = len(alive) - 1 - int(np.argmax(alive[::-1]))
    # float64 sums of bytes are exact below 2**53.
    by_kind = np.bincount(
        kinds[: moment + 1], weights=changes[: moment + 1], minlength=len(AllocationKind)
    ).astype(np.int64)
    phase = "setup"
    for event in stream.event[moment::-1].tolist():
        if MemoryEvent(event) in _PHASES:
            phase = _PHASES[MemoryEvent(event)]
            break
    return LivePeak(
        total_bytes=int(alive[moment]),
        phase=phase,
        bytes_by_kind={kind: int(by_kind[kind]) for kind in AllocationKind},
    )


def repeating_step(stream: MemoryStream) -> RepeatingStep:
    """The second step, with the blocks it inherits tied to the blocks it leaves behind.

    A block of the first step that the second step frees (an old gradient, the loss still held by a name) has
    a twin: the block of the second step that the third will free at the same place. Twins have the same size;
    among equals the order of allocation decides, which both steps share. A block that is freed in the second
    step and has no twin belongs to the first step alone: its free does not repeat. A block that outlives
    the second step and has no twin is state that has settled: its allocation does not repeat.

    Args:
        stream: Two traced steps.
    """
    first_end, second_end = np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)[:2].tolist()
    events, blocks = stream.event.tolist(), stream.block.tolist()
    allocated_at = {blocks[i]: i for i in range(second_end) if events[i] == MemoryEvent.ALLOCATE}
    step = range(first_end + 1, second_end + 1)
    freed = {blocks[i] for i in step if events[i] == MemoryEvent.FREE}
    inherited = sorted((b for b in freed if allocated_at[b] <= first_end), key=allocated_at.__getitem__)
    left = [blocks[i] for i in step if events[i] == MemoryEvent.ALLOCATE and blocks[i] not in freed]
    twins = _twins(stream, [allocated_at[b] for b in inherited], [allocated_at[b] for b in left])
    settled = set(left) - set(twins.values())
    one_off = set(inherited) - set(twins)
    entries = [i for i in step if blocks[i] not in settled and blocks[i] not in one_off]
    return RepeatingStep(
        entries=np.array(entries, dtype=np.int64),
        frees_previous=np.array(
            [events[i] == MemoryEvent.FREE and blocks[i] in twins for i in entries], dtype=np.bool_
        ),
        block=np.array([twins.get(blocks[i], blocks[i]) for i in entries], dtype=np.int64),
    )


def steady_state_events(stream: MemoryStream, num_steps: int) -> MemoryStream:
    """The stream with its second step repeated until there are ``num_steps`` steps.

    Repeated allocations get identities above all others; a free of a block of the step before frees the block
    which that step allocated in the same place.

    Args:
        stream: Two traced steps.
        num_steps: Steps in the result, at least 2.
    """
    if num_steps < 2:
        raise ValueError(f"a steady state takes at least 2 steps, got {num_steps}")
    step = repeating_step(stream)
    end = int(np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)[1]) + 1
    entries = np.concatenate([np.arange(end), *[step.entries] * (num_steps - 2)])
    stride = int(stream.block.max(initial=-1)) + 1
    block = [stream.block[:end]]
    for repetition in range(1, num_steps - 1):
        # Repetition 0 is the traced second step, whose blocks keep their identity.
        made_in = repetition - step.frees_previous.astype(np.int64)
        block.append(np.where(step.block < 0, -1, step.block + stride * made_in))
    return MemoryStream(
        event=stream.event[entries],
        block=np.concatenate(block),
        size_bytes=stream.size_bytes[entries],
        kind=stream.kind[entries],
    )


def _changes_bytes(stream: MemoryStream, batch_size: float) -> tuple[Ints, Ints]:
    """Change of the live bytes at every entry of the two steps, and the kind of the block, each (n,)."""
    is_allocation = stream.event == MemoryEvent.ALLOCATE
    is_free = stream.event == MemoryEvent.FREE
    size_of_block = np.zeros(int(stream.block.max(initial=-1)) + 1, dtype=np.int64)
    size_of_block[stream.block[is_allocation]] = block_sizes_bytes(
        stream.size_bytes[is_allocation], batch_size
    )
    kind_of_block = np.zeros_like(size_of_block)
    kind_of_block[stream.block[is_allocation]] = stream.kind[is_allocation]
    sign = is_allocation.astype(np.int64) - is_free.astype(np.int64)
    return sign * size_of_block[stream.block], kind_of_block[stream.block]


def _twins(stream: MemoryStream, inherited: list[int], left: list[int]) -> dict[int, int]:
    """Map from blocks of the first step to their twins of the second; arguments are positions of allocations."""
    waiting: dict[tuple[float, float], list[int]] = defaultdict(list)
    for position in reversed(left):
        waiting[_size(stream, position)].append(position)
    twins: dict[int, int] = {}
    for position in inherited:
        candidates = waiting[_size(stream, position)]
        if candidates:
            twins[int(stream.block[position])] = int(stream.block[candidates.pop()])
    return twins


def _size(stream: MemoryStream, position: int) -> tuple[float, float]:
    constant, slope = stream.size_bytes[position].tolist()
    return constant, slope
