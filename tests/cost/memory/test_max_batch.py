from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.cost.memory.peak import MemoryConstants, estimate_memory, fits, max_batch_size, nearest_passing
from forerun.question.setup import MAX_BATCH_SIZE, TrainingSetup
from memory_streams import MIB, graph_of, training_stream

GIB = 1024**3
CONSTANTS = MemoryConstants(
    overhead_bytes=500 * MIB,
    live_factor=1.02,
    workspace_factor=1.0,
    uses_caching_allocator=True,
)
PROCESS_ONLY = replace(CONSTANTS, live_factor=1.0, uses_caching_allocator=False)
GRAPH = graph_of(training_stream(momentum=True))


def setup_of(batch_size):
    return TrainingSetup(batch_size_per_device=batch_size)


@pytest.mark.parametrize("memory_bytes", [700 * MIB, GIB, 3 * GIB])
@pytest.mark.parametrize(
    "constants", [CONSTANTS, replace(CONSTANTS, uses_caching_allocator=False), PROCESS_ONLY]
)
def test_the_largest_batch_agrees_with_the_verdicts(memory_bytes, constants):
    found = max_batch_size(GRAPH, setup_of(1), memory_bytes, constants)

    def estimate(batch_size):
        return estimate_memory(GRAPH, setup_of(batch_size), constants)

    assert 0 < found.low <= found.value <= found.high
    assert estimate(found.value).peak_bytes <= memory_bytes < estimate(found.value + 1).peak_bytes
    low, high = estimate(found.low), estimate(found.high + 1)
    assert fits(low.low_bytes, low.high_bytes, memory_bytes) == "yes"
    assert fits(high.low_bytes, high.high_bytes, memory_bytes) == "no"


@given(st.integers(600 * MIB, 4 * GIB))
@settings(max_examples=15, deadline=None)
def test_more_memory_never_allows_a_smaller_batch(memory_bytes):
    smaller = max_batch_size(GRAPH, setup_of(1), memory_bytes, CONSTANTS)
    larger = max_batch_size(GRAPH, setup_of(1), memory_bytes * 1.1, CONSTANTS)
    assert smaller.value <= larger.value


@given(*[st.integers(0, 10_000_000)] * 3)
def test_the_edge_is_found_from_anywhere_by_few_looks(edge, start, upper):
    looks = []

    def passes(batch_size):
        looks.append(batch_size)
        return batch_size <= edge

    assert nearest_passing(passes, min(start, upper), upper) == min(edge, upper)
    assert len(looks) < 80


def test_not_even_one_sample():
    found = max_batch_size(GRAPH, setup_of(1), 510 * MIB, CONSTANTS)
    assert (found.low, found.value, found.high) == (0, 0, 0)
    assert "not even one sample" in found.reason


def test_memory_that_does_not_grow_with_the_batch():
    stream = training_stream()
    constant = replace(stream, size_bytes=stream.size_bytes * [1, 0])
    found = max_batch_size(graph_of(constant), setup_of(1), GIB, CONSTANTS)
    assert found.value == MAX_BATCH_SIZE
    assert "not considered" in found.reason


def test_a_graph_of_one_batch_size_leaves_the_rest_unknown():
    graph = graph_of(training_stream(), only_batch_size=8)
    found = max_batch_size(graph, setup_of(8), GIB, CONSTANTS)
    assert (found.low, found.value, found.high) == (None, None, None)
    assert "batch size 8 only" in found.reason
