"""Live bytes of a stream of allocations, and the repetition of its second step.

Everything here is a function of ``graph.MemoryStream`` and a batch size, vectorised over the entries;
the allocator, which adds fragmentation, is replayed in ``memory.replay``.

``CachingAllocator`` is a model of that of PyTorch, which cuts device memory into blocks. Modelled, as in
``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 1.10 to 2.x with default settings:

* A request is rounded up to 512 bytes. Up to 1 MiB it goes to the small pool, else to the large pool.
* A pool that has no fitting free block takes a segment from the driver: 2 MiB for the small pool; for the
  large pool 20 MiB below 10 MiB, else the request rounded up to 2 MiB.
* The smallest free block that fits is used, the lowest address among equals. Its rest stays free if it is
  at least 512 bytes (small pool) or more than 1 MiB (large pool); otherwise the request keeps it.
* A freed block merges with its free neighbours of the same segment.
* At the limit, segments that are free as a whole go back to the driver and the request for a segment is
  repeated; if it fails again the program is out of memory.

Not modelled: ``expandable_segments``, ``max_split_size_mb``, ``roundup_power2_divisions`` and the garbage
collection threshold (all off by default); several streams (blocks used on a second stream are held back);
private pools of CUDA graphs; page granularity of the driver beyond the 2 MiB that every segment already is a
multiple of.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from forerun.graph.graph import AllocationKind, Bools, Floats, Ints, MemoryEvent, MemoryStream, at_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class LivePeak:
    """The moment at which most bytes are alive.

    Attributes:
        total_bytes: Bytes alive, every block rounded up to 512 [bytes].
        bytes_by_kind: The same bytes by kind of contents [bytes].
    """

    total_bytes: int
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


def block_sizes_bytes(size_bytes: Floats, batch_size: float) -> Ints:
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
    return LivePeak(
        total_bytes=int(alive[moment]),
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
    # Blocks that the second step leaves for good (state of the optimizer) are not allocated again by the
    # third.
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
    # Backwards, since ``pop`` takes the last one, which shall be the block that was allocated first.
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


BLOCK_BYTES = 512
"""Granularity of blocks, ``kMinBlockSize`` [bytes]."""

_MIB = 1024 * 1024 // BLOCK_BYTES  # every quantity below is in blocks of 512 bytes
# kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc and kRoundLarge of CUDACachingAllocator.cpp; of a
# large block only a rest above kSmallSize is split off.
_SMALL_REQUEST = _MIB
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT_FROM = 10 * _MIB
_SEGMENT_GRANULARITY = 2 * _MIB
_SMALLEST_LARGE_REST = _MIB + 1

# A free block is one integer, size above address, so that a sorted list of integers answers "best fit,
# lowest address first" with one bisection. 40 bits of blocks address 512 TiB.
_ADDRESS_BITS = 40
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_UNLIMITED = 1 << _ADDRESS_BITS


def round_to_blocks(size_bytes: int) -> int:
    """Blocks of 512 bytes that hold a request; 0 for an empty one."""
    return -(-size_bytes // BLOCK_BYTES)


def _segment_blocks(num_blocks: int) -> int:
    if num_blocks <= _SMALL_REQUEST:
        return _SMALL_SEGMENT
    if num_blocks < _OWN_SEGMENT_FROM:
        return _LARGE_SEGMENT
    return -(-num_blocks // _SEGMENT_GRANULARITY) * _SEGMENT_GRANULARITY


class CachingAllocator:
    """State of the allocator of one device.

    Addresses are small integers, 0 is the null pointer of an empty request. The driver is assumed to hand
    out address ranges that were given back before new ones, the lowest first.

    Attributes:
        peak_reserved_bytes: Most bytes held from the driver so far [bytes].
        num_segments_released: Segments given back to the driver so far.
    """

    __slots__ = (
        "_free_large",
        "_free_size_at",
        "_free_small",
        "_free_start_before",
        "_limit",
        "_next_address",
        "_peak_reserved",
        "_reserved",
        "_returned",
        "_segments",
        "_shortfall",
        "_used_size_at",
        "num_segments_released",
    )

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = _UNLIMITED if limit_bytes is None else limit_bytes // BLOCK_BYTES
        self._free_small: list[int] = []
        self._free_large: list[int] = []
        self._free_size_at: dict[int, int] = {}  # first address of a free block -> size
        self._free_start_before: dict[int, int] = {}  # address after a free block -> its first address
        self._used_size_at: dict[int, int] = {}
        self._segments: dict[int, int] = {}
        self._returned: dict[int, list[int]] = {}  # size -> heap of address ranges given back
        self._next_address = 1
        self._reserved = 0
        self._peak_reserved = 0
        self._shortfall = 0
        self.num_segments_released = 0

    def malloc(self, size_bytes: int) -> int | None:
        """Address of a new block, or None if the limit does not allow it."""
        return self.malloc_blocks(-(-size_bytes // BLOCK_BYTES))

    def malloc_blocks(self, num_blocks: int) -> int | None:
        """``malloc`` of a request in blocks of 512 bytes, the form that replays use."""
        if num_blocks <= 0:
            assert num_blocks == 0, f"a request cannot be negative, got {num_blocks} blocks"
            return 0
        if num_blocks <= _SMALL_REQUEST:
            pool, smallest_rest = self._free_small, 1
        else:
            pool, smallest_rest = self._free_large, _SMALLEST_LARGE_REST
        # Size and address in one number: the first entry from here on is the smallest that fits, at the
        # lowest address.
        place = bisect_left(pool, num_blocks << _ADDRESS_BITS)
        if place < len(pool):
            found = pool.pop(place)
            address, size = found & _ADDRESS_MASK, found >> _ADDRESS_BITS
            del self._free_size_at[address]
        else:
            found = 0
            size = _segment_blocks(num_blocks)
            address = self._new_segment(size)
            if address == 0:
                return None
        rest = size - num_blocks
        if rest >= smallest_rest:
            start = address + num_blocks
            insort(pool, rest << _ADDRESS_BITS | start)
            self._free_size_at[start] = rest
            # The rest ends where the whole did, whose entry it takes.
            self._free_start_before[start + rest] = start
            size = num_blocks
        elif found:
            del self._free_start_before[address + size]
        self._used_size_at[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a block back to its pool."""
        if address == 0:
            return
        size = self._used_size_at.pop(address, 0)
        assert size, f"address {address} is not allocated"
        # Small requests always split off their rest, so the size of a used block tells its pool.
        pool = self._free_small if size <= _SMALL_REQUEST else self._free_large
        size_after = self._free_size_at.pop(address + size, 0)
        if size_after:
            del pool[bisect_left(pool, size_after << _ADDRESS_BITS | (address + size))]
            size += size_after
        start_before = self._free_start_before.pop(address, 0)
        if start_before:
            size_before = address - start_before
            del pool[bisect_left(pool, size_before << _ADDRESS_BITS | start_before)]
            address = start_before
            size += size_before
        insort(pool, size << _ADDRESS_BITS | address)
        self._free_size_at[address] = size
        self._free_start_before[address + size] = address

    def empty_cache(self) -> None:
        """Give every segment without a used block back to the driver."""
        free_size_at = self._free_size_at
        for start in [s for s, size in self._segments.items() if free_size_at.get(s) == size]:
            size = self._segments.pop(start)
            # No large request gets a segment as small as 2 MiB, so the size tells the pool.
            pool = self._free_small if size == _SMALL_SEGMENT else self._free_large
            del pool[bisect_left(pool, size << _ADDRESS_BITS | start)]
            del free_size_at[start]
            del self._free_start_before[start + size]
            heapq.heappush(self._returned.setdefault(size, []), start)
            self._reserved -= size
            self.num_segments_released += 1

    def raise_limit_to_need(self) -> None:
        """Raise the limit just as far as the last failed request needs."""
        self._limit = max(self._limit, self._shortfall)

    @property
    def limit_bytes(self) -> int | None:
        """Most bytes that may be held from the driver [bytes], None without a limit."""
        return None if self._limit == _UNLIMITED else self._limit * BLOCK_BYTES

    @property
    def reserved_bytes(self) -> int:
        """Bytes held from the driver now [bytes]."""
        return self._reserved * BLOCK_BYTES

    @property
    def peak_reserved_bytes(self) -> int:
        """Most bytes held from the driver so far [bytes]."""
        return self._peak_reserved * BLOCK_BYTES

    @property
    def allocated_bytes(self) -> int:
        """Bytes of used blocks, including the rest beyond each request [bytes]."""
        return sum(self._used_size_at.values()) * BLOCK_BYTES

    @property
    def num_free_blocks(self) -> int:
        """Free blocks in both pools."""
        return len(self._free_size_at)

    def fingerprint(self) -> int:
        """Hash of segments, free blocks and limit; with the places of the used blocks, the whole state."""
        segments = frozenset(self._segments.items())
        return hash(
            (segments, tuple(self._free_small), tuple(self._free_large), self._next_address, self._limit)
        )

    def _new_segment(self, size: int) -> int:
        """Address of a segment from the driver, 0 if the limit forbids it."""
        if self._reserved + size > self._limit:
            self.empty_cache()
            if self._reserved + size > self._limit:
                self._shortfall = self._reserved + size
                return 0
        self._reserved += size
        if self._reserved > self._peak_reserved:
            self._peak_reserved = self._reserved
        returned = self._returned.get(size)
        if returned:
            address = heapq.heappop(returned)
        else:
            address = self._next_address
            self._next_address += size + 1  # the gap keeps neighbours of other segments from merging
        self._segments[address] = size
        return address
