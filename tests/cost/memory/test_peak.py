from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError, TraceError
from forerun.cost.memory.peak import (
    MemoryConstants,
    estimate_memory,
    fits,
    memory_width,
    plans_for_setup,
)
from forerun.cost.memory.replay import replay_plan
from forerun.graph.graph import MemoryEvent, MemoryStream
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, Precision, TrainingSetup
from forerun.tracing.trace import trace
from memory_streams import MIB, graph_of, training_stream

CONSTANTS = MemoryConstants(
    overhead_bytes=500 * MIB,
    live_factor=1.02,
    workspace_factor=1.0,
    uses_caching_allocator=True,
)
WITHOUT_REPLAY = replace(CONSTANTS, uses_caching_allocator=False)
PROCESS_ONLY = replace(WITHOUT_REPLAY, live_factor=1.0)
GRAPH = graph_of(training_stream(momentum=True))


def setup_of(batch_size, **changes):
    return TrainingSetup(batch_size_per_device=batch_size, **changes)


def estimate_at(batch_size, graph=GRAPH, constants=CONSTANTS, **changes):
    return estimate_memory(graph, setup_of(batch_size, **changes), constants)


def sizes_of(estimate):
    return {part.name: part.size_bytes for part in estimate.parts}


def test_parts_add_up_to_the_peak():
    estimate = estimate_at(50)
    assert sum(part.size_bytes for part in estimate.parts) == pytest.approx(estimate.peak_bytes)
    assert estimate.peak_bytes == (
        estimate.live_peak_bytes + sizes_of(estimate)["fragmentation"] + estimate.overhead_bytes
    )
    sizes = sizes_of(estimate)
    assert sizes["weights"] == sizes["optimizer state"] == 10 * MIB
    assert sizes["activations"] == 150 * MIB
    assert sizes["context"] == 500 * MIB
    assert sizes["fragmentation"] >= 0


def test_the_interval_contains_the_peak_and_says_why():
    estimate = estimate_at(50)
    assert estimate.low_bytes < estimate.peak_bytes < estimate.high_bytes
    assert estimate.low_bytes > estimate.overhead_bytes


def test_without_replay_live_bytes_times_a_factor():
    estimate = estimate_at(50, constants=WITHOUT_REPLAY)
    assert (estimate.peak_bytes - estimate.overhead_bytes) == pytest.approx(1.02 * estimate.live_peak_bytes)


def test_without_a_caching_allocator_live_bytes_and_the_process():
    estimate = estimate_at(50, constants=PROCESS_ONLY)
    assert sizes_of(estimate)["fragmentation"] == 0
    assert estimate.peak_bytes == estimate.live_peak_bytes + 500 * MIB


@pytest.mark.parametrize(
    ("layout", "precision", "is_asked"),
    [
        (Layout.NCHW, Precision.AMP, True),
        (Layout.NCHW, Precision.BF16, True),
        (Layout.NHWC, Precision.AMP, False),
        (Layout.NCHW, Precision.FP32, False),
    ],
)
def test_workspace_in_half_precision_nchw_only(layout, precision, is_asked):
    (plan,) = plans_for_setup(GRAPH, setup_of(10, layout=layout, precision=precision), CONSTANTS)
    assert (len(plan.size_bytes) > len(replay_plan(GRAPH.memory).size_bytes)) is is_asked


@given(st.integers(1, 300))
@settings(max_examples=20, deadline=None)
def test_a_larger_batch_never_needs_less_live_memory(batch_size):
    smaller = estimate_at(batch_size, constants=WITHOUT_REPLAY)
    larger = estimate_at(batch_size + 1, constants=WITHOUT_REPLAY)
    assert smaller.peak_bytes <= larger.peak_bytes


@pytest.mark.parametrize(
    ("name", "options"),
    [("vit_b_32", {"precision": "amp"}), ("vit_b_32", {}), ("resnet18", {"layout": "nhwc"})],
)
def test_twice_the_batch_never_needs_less_memory(name, options):
    graph = trace(ModelRequest(model=f"torchvision:{name}"), TrainingSetup(**options))
    peaks = [estimate_at(2**exponent, graph, **options).peak_bytes for exponent in range(7)]
    assert peaks == sorted(peaks)


def test_verdict_has_three_values():
    estimate = estimate_at(100)

    def verdict(device_bytes):
        return fits(estimate.low_bytes, estimate.high_bytes, device_bytes)

    assert verdict(estimate.overhead_bytes + (estimate.peak_bytes - estimate.overhead_bytes) / 0.969) == "yes"
    assert (
        verdict(estimate.overhead_bytes + (estimate.peak_bytes - estimate.overhead_bytes) / 0.971) == "close"
    )
    assert verdict(estimate.peak_bytes) == "close"
    assert (
        verdict(estimate.overhead_bytes + (estimate.peak_bytes - estimate.overhead_bytes) / 1.029) == "close"
    )
    assert verdict(estimate.overhead_bytes + (estimate.peak_bytes - estimate.overhead_bytes) / 1.031) == "no"


def test_unusual_fragmentation_refuses_no_language_model():
    estimate = estimate_at(100, graph=replace(graph_of(training_stream()), tokens_per_sample=8))
    least = min(
        (estimate.peak_bytes - estimate.overhead_bytes), CONSTANTS.live_factor * estimate.live_peak_bytes
    )
    assert estimate.low_bytes == pytest.approx(estimate.overhead_bytes + least / 1.15)


def test_the_interval_is_as_wide_as_published_bytes_of_such_steps_scatter():
    images = graph_of(training_stream())
    language, few = replace(images, tokens_per_sample=8), replace(images, num_trainable_parameters=0)
    widths = [memory_width(graph) for graph in (images, language, few)]
    assert [width.high for width in widths] == sorted(width.high for width in widths)
    assert all(0.8 <= width.low < 1 < width.high <= 1.5 for width in widths)


def test_a_device_smaller_than_the_overhead_fits_nothing():
    assert fits(estimate_at(1).low_bytes, estimate_at(1).high_bytes, 100 * MIB) == "no"


def test_a_graph_of_one_batch_size_knows_no_other():
    graph = graph_of(training_stream(), only_batch_size=8)
    assert estimate_at(8, graph=graph).peak_bytes > 0
    with pytest.raises(InvalidSetupError, match="traced for batch size 8 only, got 9"):
        estimate_at(9, graph=graph)


@pytest.mark.parametrize("constants", [CONSTANTS, WITHOUT_REPLAY])
def test_a_damaged_stream_is_refused(constants):
    stream = training_stream()
    block = stream.block.copy()
    block[stream.event == MemoryEvent.FREE] = 0
    broken = MemoryStream(event=stream.event, block=block, size_bytes=stream.size_bytes, kind=stream.kind)
    with pytest.raises(TraceError, match="trace the model again"):
        estimate_memory(graph_of(broken), setup_of(4), constants)
