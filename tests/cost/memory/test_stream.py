import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import TraceError
from forerun.cost.memory.stream import (
    live_peak,
    live_peak_bytes,
    repeating_step,
    steady_state_events,
)
from forerun.graph.graph import AllocationKind, MemoryEvent
from forerun.graph.schema import check_stream
from memory_streams import MIB, StreamBuilder, training_stream


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


def test_live_peak_says_when_and_of_what():
    peak = live_peak(training_stream(momentum=True, gradients_kept=True), 4)
    assert peak.phase == "backward"
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


def test_steady_state_needs_two_steps():
    with pytest.raises(ValueError, match="at least 2"):
        steady_state_events(training_stream(), 1)


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
