from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cost.memory.allocator import CachingAllocator, round_to_blocks

KIB, MIB = 1024, 1024**2


@pytest.mark.parametrize(("size_bytes", "num_blocks"), [(0, 0), (1, 1), (512, 1), (513, 2), (1024, 2)])
def test_requests_are_rounded_up_to_512_bytes(size_bytes, num_blocks):
    assert round_to_blocks(size_bytes) == num_blocks


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),  # the small pool ends here
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),  # from here on a segment of its own, in steps of 2 MiB
        (10 * MIB + 1, 12 * MIB),
        (25 * MIB, 26 * MIB),
    ],
)
def test_segment_sizes(request_bytes, segment_bytes):
    # kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge in c10/cuda/CUDACachingAllocator.cpp
    allocator = CachingAllocator()
    allocator.malloc(request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_empty_request_is_a_null_pointer():
    allocator = CachingAllocator(limit_bytes=0)
    assert allocator.malloc(0) == 0
    allocator.free(0)
    assert allocator.reserved_bytes == 0


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.num_free_blocks == 0
    allocator.malloc(1)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_pool_do_not_share():
    allocator = CachingAllocator()
    allocator.malloc(2 * MIB)  # leaves 18 MiB free in the large pool
    allocator.malloc(1)
    assert allocator.reserved_bytes == 22 * MIB


def test_rest_of_a_large_block_splits_off_above_one_mib():
    kept = CachingAllocator()
    kept.malloc(11 * MIB)  # 12 MiB segment, 1 MiB left: not more than 1 MiB
    assert kept.num_free_blocks == 0
    assert kept.allocated_bytes == 12 * MIB
    split = CachingAllocator()
    split.malloc(11 * MIB - 512)
    assert split.num_free_blocks == 1
    assert split.allocated_bytes == 11 * MIB - 512


def test_best_fit_takes_the_smallest_block_then_the_lowest_address():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MIB) for size in (40, 30, 30, 50)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(29 * MIB) == blocks[1]
    assert allocator.malloc(29 * MIB) == blocks[2]
    assert allocator.malloc(41 * MIB) == blocks[3]


def test_neighbours_merge_into_the_whole_segment():
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]
    assert allocator.reserved_bytes == 20 * MIB
    for index in (1, 3, 0, 4, 2):
        allocator.free(blocks[index])
    assert allocator.num_free_blocks == 1
    assert allocator.malloc(20 * MIB) == blocks[0]


def test_blocks_of_different_segments_do_not_merge():
    allocator = CachingAllocator()
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    allocator.free(second)
    assert allocator.num_free_blocks == 2


def test_at_the_limit_cached_segments_are_released_first():
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    first, second = allocator.malloc(20 * MIB), allocator.malloc(20 * MIB)
    allocator.free(first)
    assert allocator.malloc(30 * MIB) is not None
    assert allocator.num_segments_released == 1
    assert allocator.reserved_bytes == 50 * MIB
    allocator.free(second)


def test_a_segment_in_use_is_not_released():
    allocator = CachingAllocator(limit_bytes=50 * MIB)
    allocator.malloc(2 * MIB)  # pins 20 MiB
    big = allocator.malloc(20 * MIB)
    allocator.free(big)
    assert allocator.malloc(32 * MIB) is None
    assert allocator.num_segments_released == 1
    assert allocator.malloc(30 * MIB) is not None


def test_raising_the_limit_to_the_need_is_just_enough():
    allocator = CachingAllocator(limit_bytes=20 * MIB)
    allocator.malloc(15 * MIB)
    assert allocator.malloc(25 * MIB) is None
    allocator.raise_limit_to_need()
    assert allocator.limit_bytes == (16 + 26) * MIB
    assert allocator.malloc(25 * MIB) is not None


def test_empty_cache_returns_only_free_segments():
    allocator = CachingAllocator()
    large, small = allocator.malloc(20 * MIB), allocator.malloc(100)
    allocator.free(large)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.peak_reserved_bytes == 22 * MIB
    allocator.free(small)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize("address", [5, -1])
def test_freeing_what_is_not_allocated_is_caught(address):
    with pytest.raises(AssertionError, match="not allocated"):
        CachingAllocator().free(address)


def test_double_free_is_caught():
    allocator = CachingAllocator()
    block = allocator.malloc(100)
    allocator.free(block)
    with pytest.raises(AssertionError, match="not allocated"):
        allocator.free(block)


# A program: a positive number requests as many bytes, a negative one frees one of the blocks alive.
sizes = st.one_of(st.integers(1, 2 * MIB), st.integers(MIB, 64 * MIB))
programs = st.lists(st.one_of(sizes, st.integers(-1000, -1)), max_size=60)
limits = st.one_of(st.none(), st.integers(0, 300 * MIB))


def run(program, limit_bytes):
    """The allocator after a program, and (address, size) of the blocks alive; stops where memory runs out."""
    allocator, alive = CachingAllocator(limit_bytes), []
    for step in program:
        if step > 0:
            address = allocator.malloc(step)
            if address is None:
                return allocator, alive, False
            alive.append((address, step))
        elif alive:
            allocator.free(alive.pop(-step % len(alive))[0])
    return allocator, alive, True


@given(programs, limits)
@settings(max_examples=60, deadline=None)
def test_reserved_bounds_allocated_bounds_requested(program, limit_bytes):
    allocator, alive, _ = run(program, limit_bytes)
    requested = sum(size for _, size in alive)
    assert requested <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
    if limit_bytes is not None:
        assert allocator.peak_reserved_bytes <= limit_bytes


@given(programs, limits)
@settings(max_examples=60, deadline=None)
def test_blocks_alive_never_overlap(program, limit_bytes):
    _, alive, _ = run(program, limit_bytes)
    spans = sorted((address, address + round_to_blocks(size)) for address, size in alive)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@given(programs, limits)
@settings(max_examples=60, deadline=None)
def test_freeing_everything_leaves_whole_segments(program, limit_bytes):
    allocator, alive, _ = run(program, limit_bytes)
    for address, _ in alive:
        allocator.free(address)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert allocator.num_free_blocks == 0


@given(programs, st.integers(0, 300 * MIB))
@settings(max_examples=60, deadline=None)
def test_a_limit_at_or_above_the_unlimited_peak_changes_nothing(program, extra_bytes):
    unlimited, alive, _ = run(program, None)
    limited, alive_limited, passes = run(program, unlimited.peak_reserved_bytes + extra_bytes)
    assert passes
    assert alive_limited == alive
    assert limited.num_segments_released == 0
