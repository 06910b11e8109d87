"""A model of PyTorch's CUDA caching allocator, which cuts device memory into blocks.

Modelled, as in ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 1.10 to 2.x with default settings:

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

__all__ = ["BLOCK_BYTES", "CachingAllocator", "round_to_blocks"]

BLOCK_BYTES = 512
"""Granularity of blocks, ``kMinBlockSize`` [bytes]."""

_MIB = 1024 * 1024 // BLOCK_BYTES  # every quantity below is in blocks of 512 bytes
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
        place = bisect_left(pool, num_blocks << _ADDRESS_BITS)
        if place < len(pool):
            found = pool.pop(place)
            address, size = found & _ADDRESS_MASK, found >> _ADDRESS_BITS
            del self._free_size_at[address]
            del self._free_start_before[address + size]
        else:
            size = _segment_blocks(num_blocks)
            address = self._new_segment(size)
            if address == 0:
                return None
        rest = size - num_blocks
        if rest >= smallest_rest:
            start = address + num_blocks
            insort(pool, rest << _ADDRESS_BITS | start)
            self._free_size_at[start] = rest
            self._free_start_before[start + rest] = start
            size = num_blocks
        self._used_size_at[address] = size
        return address

    def free(self, address: int) -> None:
        """Give a block back to its pool."""
        if address == 0:
            return
        assert address in self._used_size_at, f"address {address} is not allocated"
        size = self._used_size_at.pop(address)
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
