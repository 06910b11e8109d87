"""The memory stream of captured steps is that which the trace of a model would have."""

import pytest
from torch import nn, zeros

from forerun.graph.graph import AllocationKind, MemoryEvent
from forerun.script.capturing.result import stream_of_steps
from forerun.script.capturing.steps import is_sample
from forerun.tracing.recorder import RecordedEvent

KINDS = {
    "w": AllocationKind.WEIGHT,
    "a": AllocationKind.ACTIVATION,
    "g": AllocationKind.GRADIENT,
    "i": AllocationKind.INPUT,
}
MARKS = {
    "forward": MemoryEvent.FORWARD_BEGINS,
    "backward": MemoryEvent.BACKWARD_BEGINS,
    "update": MemoryEvent.OPTIMIZER_BEGINS,
    "end": MemoryEvent.STEP_ENDS,
}


def events(words: str) -> list[RecordedEvent]:
    """A stream: ``+a7`` allocates block 7 with an activation, ``-7`` frees it, other words are marks."""
    found = []
    for row, word in enumerate(words.split()):
        if word in MARKS:
            found.append(RecordedEvent(MARKS[word], -1, 0, -1, -1))
        elif word[0] == "+":
            found.append(RecordedEvent(MemoryEvent.ALLOCATE, int(word[2:]), 100, KINDS[word[1]], row))
        else:
            found.append(RecordedEvent(MemoryEvent.FREE, int(word[1:]), 100, -1, row))
    return found


def shown(stream: list[RecordedEvent]) -> str:
    """The stream in the words of ``events``, with temporary blocks as ``t``."""
    letters = {int(kind): letter for letter, kind in KINDS.items()} | {int(AllocationKind.TEMPORARY): "t"}
    marks = {mark: word for word, mark in MARKS.items()}
    return " ".join(
        f"+{letters[event.kind]}{event.block}"
        if event.event is MemoryEvent.ALLOCATE
        else f"-{event.block}"
        if event.event is MemoryEvent.FREE
        else marks[event.event]
        for event in stream
    )


STEP = "forward +a{0} backward -{0} +g{1} update -{1} end"


def steps(before: str, *bodies: str, **more) -> tuple[str, list[int]]:
    begin = len(before.split())
    stream, weights = stream_of_steps(events(" ".join([before, *bodies])), begin, **more)
    return shown(stream), weights


def test_what_is_alive_stands_first_once_and_then_there_are_two_whole_steps():
    third = STEP.format(30, 31)
    stream, weights = steps("+w5 +a8 -8 +w6", STEP.format(10, 11), STEP.format(20, 21), third)
    assert stream == (
        "+w0 +w1 forward +a2 backward -2 +t3 update -3 end forward +a4 backward -4 +t5 update -5 end"
    )
    assert weights == [5, 6]


def test_a_first_step_frees_nothing_of_a_step_before_it():
    stream, _ = steps("+w5 +a9", f"forward -9 {STEP.format(10, 11)[8:]}", STEP.format(20, 21))
    assert stream.startswith("+w0 forward +a1 ")
    assert stream.count("-") == 4


def test_gradients_that_stay_are_made_by_the_first_backward_pass_last_layer_first():
    step = "forward +a{0} backward -{0} update end"
    stream, _ = steps("+w5 +w6 +g7 +g8", step.format(10), step.format(20))
    assert stream == "+w0 +w1 forward +a2 backward +g3 +g4 -2 update end forward +a5 backward -5 update end"


def test_a_gradient_lives_at_the_end_and_only_the_second_step_knows_its_operations():
    kept = "forward +a{0} backward -{0} +g{1} update end"
    stream, _ = stream_of_steps(
        events(f"+w5 {kept.format(10, 11)} {kept.format(20, 21)}"), 1, place=lambda row: row
    )
    end = next(index for index, event in enumerate(stream) if event.event is MemoryEvent.STEP_ENDS)
    assert all(event.row == -1 for event in stream[: end + 1])
    assert any(event.row >= 0 for event in stream[end + 1 :])
    assert shown(stream).count("+g") == 2


@pytest.mark.parametrize("num_earlier", [1, 2])
def test_blocks_of_earlier_micro_steps_are_left_out(num_earlier):
    micro = "+a{0} backward -{0}"
    first = " ".join(micro.format(40 + number) for number in range(num_earlier))
    second = " ".join(micro.format(60 + number) for number in range(num_earlier))
    words = f"+w5 forward {first} {micro.format(50)} end forward {second} {micro.format(70)} end"
    length = 2 + 3 * num_earlier + 3
    spans = [(1, 2 + 3 * num_earlier), (1 + length, 1 + length + 1 + 3 * num_earlier)]
    stream, _ = stream_of_steps(events(words), 1, spans)
    assert shown(stream).count("+a") == 2


def test_a_vector_as_long_as_the_first_layer_takes_is_one_sample():
    policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    assert is_sample(policy, (zeros(4),), {})
    assert not is_sample(policy, (zeros(128),), {})  # such as the times of a batch
    assert not is_sample(policy, (zeros(4), zeros(4, 3)), {})
