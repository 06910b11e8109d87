import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import TraceError
from forerun.cost.memory.replay import replay, replay_plan, smallest_limit_bytes
from forerun.cost.memory.stream import (
    CachingAllocator,
    block_sizes_bytes,
    live_peak_bytes,
)
from forerun.graph.graph import MemoryEvent
from memory_streams import MIB, StreamBuilder, steady_state_events, training_stream

streams = st.builds(
    training_stream,
    weights=st.lists(st.integers(1, 40 * MIB), min_size=1, max_size=6).map(tuple),
    activations=st.lists(st.integers(1, 3 * MIB), min_size=1, max_size=6).map(tuple),
    gradients_kept=st.booleans(),
    momentum=st.booleans(),
)
batches = st.integers(1, 40)
TOLERANCE_BYTES = 8 * MIB


def passes_naively(stream, batch_size, limit_bytes, num_steps):
    """The same replay written in the most direct way."""
    allocator, address_of = CachingAllocator(limit_bytes), {}
    steady = steady_state_events(stream, num_steps)
    sizes = block_sizes_bytes(steady.size_bytes, batch_size).tolist()
    for event, block, size in zip(steady.event.tolist(), steady.block.tolist(), sizes, strict=True):
        if event == MemoryEvent.ALLOCATE:
            address_of[block] = allocator.malloc(size)
            if address_of[block] is None:
                return False, allocator.peak_reserved_bytes
        elif event == MemoryEvent.FREE:
            allocator.free(address_of.pop(block))
    return True, allocator.peak_reserved_bytes


def stream_of(*requests):
    """Two equal steps of requests: a number allocates, None frees the oldest block of the step."""
    builder = StreamBuilder()
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        alive = []
        for request in requests:
            if request is None:
                builder.free(alive.pop(0))
            else:
                alive.append(builder.allocate(request))
        builder.free(*alive)
        builder.mark(MemoryEvent.STEP_ENDS)
    return builder.build()


def test_smallest_limit_of_one_block_is_its_segment():
    assert smallest_limit_bytes(replay_plan(stream_of(25 * MIB)), 1) == 26 * MIB


def test_smallest_limit_of_small_and_large_blocks_by_hand():
    # 3 MiB: a 20 MiB segment; 100 bytes: a 2 MiB segment
    assert smallest_limit_bytes(replay_plan(stream_of(3 * MIB, 100)), 1) == 22 * MIB


def test_a_full_card_releases_what_a_roomy_one_keeps():
    # One after the other 30, 40 and 50 MiB: 120 reserved with room, 50 suffice without.
    plan = replay_plan(stream_of(30 * MIB, None, 40 * MIB, None, 50 * MIB, None))
    assert replay(plan, 1).peak_reserved_bytes == 120 * MIB
    assert smallest_limit_bytes(plan, 1) == 50 * MIB


def test_fragmentation_of_the_steady_state_by_hand():
    # First step: 20 + 20 MiB, the first is freed; 22 MiB does not fit there, the segment goes back: 42 MiB.
    # Second step: the second 20 MiB block takes the 22 MiB segment, so that 22 MiB are needed once more.
    plan = replay_plan(stream_of(20 * MIB, 20 * MIB, None, 22 * MIB))
    assert replay(plan, 1, 42 * MIB, num_steps=1).passes
    assert not replay(plan, 1, 42 * MIB, num_steps=2).passes
    assert smallest_limit_bytes(plan, 1) == 44 * MIB


def test_a_block_in_the_middle_pins_its_segment():
    # 9 + 9 MiB share the segment of the first 20 MiB; 12 MiB then find 9 and 2 MiB free, no whole segment.
    plan = replay_plan(stream_of(20 * MIB, None, 9 * MIB, 9 * MIB, None, 12 * MIB))
    assert live_peak_bytes(plan.stream, 1) == 21 * MIB
    assert smallest_limit_bytes(plan, 1) == (20 + 12) * MIB


@given(streams, batches)
@settings(max_examples=30, deadline=None)
def test_smallest_limit_passes_and_a_little_less_does_not(stream, batch_size):
    plan = replay_plan(stream)
    limit_bytes = smallest_limit_bytes(plan, batch_size)
    assert live_peak_bytes(stream, batch_size) <= limit_bytes
    assert replay(plan, batch_size, limit_bytes).passes
    assert any(
        not replay(plan, batch_size, limit_bytes - less).passes
        for less in range(2 * MIB, TOLERANCE_BYTES + 1, 2 * MIB)
    )


@given(streams, batches, st.integers(0, 100 * MIB))
@settings(max_examples=30, deadline=None)
def test_below_live_bytes_fails_and_above_the_reserved_peak_passes(stream, batch_size, offset_bytes):
    plan = replay_plan(stream)
    live_bytes = live_peak_bytes(stream, batch_size)
    assert not replay(plan, batch_size, max(0, live_bytes - 1 - offset_bytes)).passes
    assert replay(plan, batch_size, replay(plan, batch_size).peak_reserved_bytes + offset_bytes).passes


@given(streams, batches, st.one_of(st.none(), st.integers(20 * MIB, 400 * MIB)))
@settings(max_examples=40, deadline=None)
def test_the_fast_replay_equals_the_direct_one(stream, batch_size, limit_bytes):
    outcome = replay(replay_plan(stream), batch_size, limit_bytes, num_steps=8)
    passes, peak_bytes = passes_naively(stream, batch_size, limit_bytes, 8)
    assert (outcome.passes, outcome.peak_reserved_bytes) == (passes, peak_bytes)


@given(streams, batches)
@settings(max_examples=20, deadline=None)
def test_a_recurring_state_covers_all_later_steps(stream, batch_size):
    plan = replay_plan(stream)
    outcome = replay(plan, batch_size, num_steps=20)
    assert outcome.recurs
    assert passes_naively(stream, batch_size, None, 20)[1] == outcome.peak_reserved_bytes


@given(streams, batches)
@settings(max_examples=20, deadline=None)
def test_a_growing_limit_never_fails(stream, batch_size):
    outcome = replay(replay_plan(stream), batch_size, 0, grows=True)
    assert outcome.passes
    assert outcome.limit_bytes >= live_peak_bytes(stream, batch_size)


def test_workspace_is_elastic():
    stream = training_stream(weights=(4 * MIB,), activations=(20 * MIB,))
    with_workspace = replay_plan(stream, workspace_factor=1.0)
    limit_bytes = smallest_limit_bytes(replay_plan(stream), 2)
    assert replay(with_workspace, 2, limit_bytes).passes  # no room for 80 MiB, done without
    assert replay(with_workspace, 2).peak_reserved_bytes > replay(replay_plan(stream), 2).peak_reserved_bytes


def test_first_step_empties_the_cache_where_later_ones_take_workspace():
    builder = StreamBuilder()
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        builder.free(builder.allocate(40 * MIB))
        builder.mark(MemoryEvent.CONV_WORKSPACE, 10 * MIB)
        builder.free(builder.allocate(60 * MIB))
        builder.mark(MemoryEvent.STEP_ENDS)
    plan = replay_plan(builder.build(), workspace_factor=1.0)
    assert replay(replay_plan(builder.build()), 1).peak_reserved_bytes == 100 * MIB
    assert replay(plan, 1, num_steps=1).peak_reserved_bytes == 60 * MIB


def test_a_damaged_stream_is_refused():
    builder = StreamBuilder()
    for _ in range(2):
        builder.mark(MemoryEvent.FORWARD_BEGINS)
        builder.free(7)
        builder.mark(MemoryEvent.STEP_ENDS)
    with pytest.raises(TraceError, match="frees block 7"):
        replay_plan(builder.build())
