"""The memory of a compiled step: what is saved, what stays in registers, and the laws."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import forerun
from forerun.cost.memory.stream import live_peak_bytes
from forerun.graph.file import check_stream
from forerun.graph.graph import OpClass
from forerun.graph.passes import compiled_graph
from forerun.question.run import Run
from forerun.tracing.compiled_memory import Flow, saved_values
from forerun.tracing.fusion import Access, DataFlow
from forerun.tracing.trace import trace

MODELS = [
    ("cifar-resnet:8", "fp32"),
    ("gpt:depth=2,width=128,vocabulary=500", "amp-bf16"),
    ("torchvision:mobilenet_v2", "amp"),
]


def flow(op_class, reads, writes, sizes):
    def access(blocks):
        return tuple(Access(block, 0, 0, sizes[block]) for block in blocks)

    moved = [sum(sizes[block] for block in blocks) for blocks in (reads, writes)]
    return DataFlow(op_class, *moved, access(reads), access(writes))


def saved(forward, backward, sizes, static):
    rows = [flow(*row, sizes) for row in (*forward, *backward)]
    is_forward = [True] * len(forward) + [False] * len(backward)
    is_fusible = [row.op_class not in (OpClass.LINEAR, OpClass.CONV) for row in rows]
    found = saved_values(Flow(rows, is_forward, is_fusible), sizes, frozenset(static))
    return {block for block, _ in found}


def test_a_gate_is_computed_again_and_inputs_of_products_are_saved():
    x, gate, up, opened, product, out, gradient = range(7)
    forward = [
        (OpClass.LINEAR, [x], [gate]),
        (OpClass.LINEAR, [x], [up]),
        (OpClass.ACTIVATION, [gate], [opened]),
        (OpClass.MUL, [opened, up], [product]),
        (OpClass.LINEAR, [product], [out]),
    ]
    backward = [
        (OpClass.LINEAR, [product], [gradient]),
        (OpClass.MUL, [opened, up, gradient], [7]),
        (OpClass.ACTIVATION, [gate, gradient], [8]),
    ]
    assert saved(forward, backward, dict.fromkeys(range(9), 1000), [x]) == {gate, up, product}


def test_a_narrow_value_is_saved_in_place_of_what_follows_from_it():
    x, half, wide, root, out = range(5)
    sizes = {x: 1, half: 1000, wide: 2000, root: 2000, out: 1000, 5: 2000, 6: 2000}
    forward = [
        (OpClass.LINEAR, [x], [half]),
        (OpClass.CAST, [half], [wide]),
        (OpClass.ELEMENTWISE, [wide], [root]),
        (OpClass.CAST, [root], [out]),
    ]
    backward = [(OpClass.ELEMENTWISE, [wide, root], [5])]
    assert saved(forward, backward, sizes, [x]) == {half}


def test_the_result_of_a_reduction_is_saved():
    x, wide, mean, out = range(4)
    sizes = {x: 1, wide: 1000, mean: 10, out: 1000, 4: 1000}
    forward = [
        (OpClass.LINEAR, [x], [wide]),
        (OpClass.REDUCE, [wide], [mean]),
        (OpClass.MUL, [wide, mean], [out]),
    ]
    assert saved(forward, [(OpClass.MUL, [mean], [4])], sizes, [x]) == {mean}


@pytest.fixture(scope="module", params=MODELS, ids=lambda pair: pair[0])
def graphs(request):
    model, precision = request.param
    run = Run.of(model, device="t4", precision=precision, image_size=32 if "net" in model else None)
    eager = trace(run.model, run.setup, use_cache=False)
    return eager, compiled_graph(eager)


def test_a_compiled_step_never_needs_more_than_an_eager_one(graphs):
    eager, compiled = graphs
    check_stream(compiled.memory)
    for batch_size in (1, 2, 8, 64, 1024):
        assert live_peak_bytes(compiled.memory, batch_size) <= live_peak_bytes(eager.memory, batch_size)
    assert live_peak_bytes(compiled.memory, 1024) < live_peak_bytes(eager.memory, 1024)
    assert compiled.eager_memory is eager.memory


def entries(stream):
    sizes = map(tuple, stream.size_bytes.tolist())
    return set(zip(stream.event.tolist(), stream.block.tolist(), sizes, strict=True))


def test_a_compiled_step_allocates_nothing_of_its_own(graphs):
    eager, compiled = graphs
    assert entries(compiled.memory) < entries(eager.memory)
    assert len(compiled.memory.row) == len(compiled.memory)


def test_the_answer_of_a_compiled_run_needs_less_and_says_so():
    answers = [
        forerun.predict("gpt:depth=2,width=128", device="t4", batch_size=8, compile=compiled)
        for compiled in (False, True)
    ]
    eager, compiled = (answer.peak_memory_bytes.value for answer in answers)
    assert compiled < eager
    assert answers[1].max_batch_size.value > answers[0].max_batch_size.value
    assert any("memory is for a compiled step" in note for note in answers[1].notes)
    assert answers[0].tokens_per_s.value == pytest.approx(512 * answers[0].throughput_samples_per_s.value)


def test_the_memory_of_a_compiled_image_network_is_less_certain():
    peaks = [
        forerun.predict("cnn", device="t4", batch_size=64, compile=compiled).peak_memory_bytes
        for compiled in (False, True)
    ]
    eager, compiled = (peak.high / peak.value - 1 for peak in peaks)
    assert compiled > 1.5 * eager


def test_a_graph_without_ends_keeps_the_memory_of_eager_execution(graphs):
    eager, _ = graphs
    old = dataclasses.replace(
        eager, memory=dataclasses.replace(eager.memory, compiled_end=np.zeros(0, dtype=np.int64))
    )
    found = compiled_graph(old)
    assert found.memory is old.memory
    assert any("eager execution" in note for note in found.notes)
