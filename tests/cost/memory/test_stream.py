from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import TraceError
from forerun.cost.memory.stream import (
    CachingAllocator,
    live_peak,
    live_peak_bytes,
    repeating_step,
    round_to_blocks,
)
from forerun.graph.file import check_stream
from forerun.graph.graph import AllocationKind, MemoryEvent
from memory_streams import MIB, StreamBuilder, steady_state_events, training_stream


def live_bytes_at_step_ends(stream, batch_size):
    sizes = dict(
        zip(
            stream.block[stream.event == MemoryEvent.ALLOCATE].tolist(),
            (stream.size_bytes @ [1, batch_size])[stream.event == MemoryEvent.ALLOCATE].tolist(),
            strict=True,
        )
    )
    alive, found = 0.0, []
    for event, block in zip(stream.event.tolist(), stream.block.tolist(), strict=True):
        alive += {MemoryEvent.ALLOCATE: 1, MemoryEvent.FREE: -1}.get(event, 0) * sizes.get(block, 0.0)
        if event == MemoryEvent.STEP_ENDS:
            found.append(alive)
    return found


def test_live_peak_of_a_chain_by_hand():
    # weights 4 + 6 MiB, input 4000 B (8 blocks of 512), activations 4 + 8 MiB, first gradient 6 MiB
    assert live_peak_bytes(training_stream(), 4) == (10 + 12 + 6) * MIB + 8 * 512


def test_live_peak_says_of_what():
    peak = live_peak(training_stream(momentum=True, gradients_kept=True), 4)
    assert peak.total_bytes == sum(peak.bytes_by_kind.values())
    assert peak.bytes_by_kind[AllocationKind.WEIGHT] == 10 * MIB
    assert peak.bytes_by_kind[AllocationKind.OPTIMIZER_STATE] == 10 * MIB
    assert peak.bytes_by_kind[AllocationKind.ACTIVATION] == 12 * MIB
    assert peak.bytes_by_kind[AllocationKind.GRADIENT] == 16 * MIB
    assert peak.bytes_by_kind[AllocationKind.INPUT] == 8 * 512


def test_of_equal_peaks_the_second_step_counts():
    builder = StreamBuilder()
    for kind in (AllocationKind.TEMPORARY, AllocationKind.GRADIENT):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        builder.free(builder.allocate(MIB, kind=kind))
        builder.mark(MemoryEvent.STEP_ENDS)
    assert live_peak(builder.build(), 1).bytes_by_kind[AllocationKind.GRADIENT] == MIB


def test_sizes_are_exact_where_the_affine_form_is_not():
    builder = StreamBuilder()
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        builder.free(builder.allocate(0.1, 51.19))  # 0.1 + 51.19 * 10 is 512.0000000000001 in floats
        builder.mark(MemoryEvent.STEP_ENDS)
    assert live_peak_bytes(builder.build(), 10) == 512


@given(
    st.lists(st.integers(1, 50 * MIB), min_size=1, max_size=5),
    st.lists(st.integers(1, 5 * MIB), min_size=1, max_size=5),
    st.integers(1, 64),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_a_larger_batch_never_needs_fewer_live_bytes(weights, activations, batch_size, gradients_kept):
    stream = training_stream(weights, activations, gradients_kept=gradients_kept)
    assert live_peak_bytes(stream, batch_size) <= live_peak_bytes(stream, batch_size + 1)


def test_freed_gradients_are_tied_to_those_of_the_step_before():
    stream = training_stream(weights=(4 * MIB, 6 * MIB))
    step = repeating_step(stream)
    assert int(step.frees_previous.sum()) == 2
    inherited = step.block[step.frees_previous]
    made = stream.block[
        (stream.event == MemoryEvent.ALLOCATE) & (stream.kind == AllocationKind.GRADIENT)
    ].tolist()
    assert inherited.tolist() == made[2:]  # the twins, made in the second step


def test_kept_gradients_are_not_made_again():
    stream = training_stream(gradients_kept=True, momentum=True)
    assert not repeating_step(stream).frees_previous.any()


@pytest.mark.parametrize("gradients_kept", [False, True])
@pytest.mark.parametrize("momentum", [False, True])
def test_steady_state_is_a_sound_stream_that_does_not_grow(gradients_kept, momentum):
    stream = training_stream(gradients_kept=gradients_kept, momentum=momentum)
    steady = steady_state_events(stream, 7)
    sound_to_the_second_step = steady_state_events(stream, 2)
    check_stream(sound_to_the_second_step)
    seen, alive = set(), set()
    for event, block in zip(steady.event.tolist(), steady.block.tolist(), strict=True):
        if event == MemoryEvent.ALLOCATE:
            assert block not in seen
            seen.add(block)
            alive.add(block)
        elif event == MemoryEvent.FREE:
            alive.remove(block)
    ends = live_bytes_at_step_ends(steady, 4)
    assert len(ends) == 7
    assert set(ends[1:]) == {ends[1]}


def test_repeating_the_second_step_adds_no_live_peak():
    stream = training_stream(momentum=True)
    assert live_peak_bytes(steady_state_events(stream, 5), 8) == live_peak_bytes(stream, 8)


def test_twins_of_one_size_are_paired_in_the_order_of_their_allocation():
    builder = StreamBuilder()
    left = []
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        first, second = builder.allocate(MIB), builder.allocate(MIB)
        builder.free(*reversed(left))
        left = [first, second]
        builder.mark(MemoryEvent.STEP_ENDS)
    step = repeating_step(builder.build())
    # The old pair is freed last first, and after the new one is made: blocks 3 and 2 stand for 1 and 0.
    assert step.block[step.frees_previous].tolist() == [3, 2]


def test_what_only_the_first_step_left_is_freed_once():
    builder = StreamBuilder()
    builder.mark(MemoryEvent.FORWARD_BEGINS)
    scratch = builder.allocate(MIB)
    builder.mark(MemoryEvent.STEP_ENDS)
    builder.mark(MemoryEvent.FORWARD_BEGINS)
    builder.free(scratch)
    builder.mark(MemoryEvent.STEP_ENDS)
    steady = steady_state_events(builder.build(), 4)
    assert int((steady.event == MemoryEvent.FREE).sum()) == 1


def test_what_the_second_step_leaves_for_good_is_made_once():
    builder = StreamBuilder()
    for step in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        if step == 1:
            builder.allocate(3 * MIB)
        builder.mark(MemoryEvent.STEP_ENDS)
    steady = steady_state_events(builder.build(), 5)
    assert int((steady.event == MemoryEvent.ALLOCATE).sum()) == 1


def test_an_output_held_until_the_next_step_is_inherited():
    # A name keeps the old output until the new one is made: the old block dies after the new one lives.
    builder = StreamBuilder()
    held = None
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        output = builder.allocate(0, 100)
        if held is not None:
            builder.free(held)
        held = output
        builder.mark(MemoryEvent.STEP_ENDS)
    builder.free(held)  # after the end: ignored
    steady = steady_state_events(builder.build(), 6)
    assert live_bytes_at_step_ends(steady, 10) == [1000.0] * 6


def damaged(stream, position, **changes):
    columns = {name: getattr(stream, name).copy() for name in ("event", "block", "size_bytes", "kind")}
    for name, value in changes.items():
        columns[name][position] = value
    return type(stream)(**columns)


def test_a_free_before_its_allocation_is_refused():
    stream = training_stream()
    first_free = int(np.flatnonzero(stream.event == MemoryEvent.FREE)[0])
    with pytest.raises(TraceError, match="frees block 999"):
        check_stream(damaged(stream, first_free, block=999))


def test_a_block_allocated_twice_is_refused():
    with pytest.raises(TraceError, match="repeats block 0"):
        check_stream(damaged(training_stream(), 1, block=0))


def test_a_stream_of_one_step_is_refused():
    stream = training_stream()
    last = int(np.flatnonzero(stream.event == MemoryEvent.STEP_ENDS)[-1])
    with pytest.raises(TraceError, match="two training steps, got 1"):
        check_stream(damaged(stream, last, event=MemoryEvent.OPTIMIZER_BEGINS))


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
