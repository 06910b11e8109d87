"""Laws of a divided step: shares add up, an axis of one changes nothing, and compiled kernels are divided too."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from forerun.graph.blocks import Division, blocks_of, weight_products
from forerun.graph.graph import OpTable, Share, divided_of
from forerun.graph.shards import Shards, sharded_ops
from forerun.question.model import ModelRequest
from forerun.question.setup import Precision, TrainingSetup
from forerun.tracing.trace import trace

SIZES = [
    column.name
    for column in fields(OpTable)
    if divided_of(column).tensor in (Share.WORK, Share.READ, Share.WRITTEN, Share.MOVED, Share.OPERANDS)
]


@pytest.fixture(scope="module")
def graph():
    request = ModelRequest(model="gpt:depth=4,width=512,vocabulary=4096", sequence_length=256)
    return trace(request, TrainingSetup(precision=Precision.BF16))


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("number", [2, 4])
def test_streams_inside_divided_pairs_leave_their_part_to_each_device(graph, name, number):
    blocks = blocks_of(graph)
    inside = (blocks.division == Division.INSIDE) & (blocks.unit >= 0) & ~weight_products(graph.ops)
    before = getattr(graph.ops, name)[inside, 1]
    after = getattr(sharded_ops(graph, blocks, Shards(tensor=number)), name)[inside, 1]
    assert before.sum() > 0
    np.testing.assert_allclose(number * after, before)


@pytest.mark.parametrize("name", SIZES)
def test_sequence_parallelism_divides_all_that_grows_with_the_batch(graph, name):
    blocks = blocks_of(graph)
    stream = (blocks.unit >= 0) & ~weight_products(graph.ops)
    ops = sharded_ops(graph, blocks, Shards(tensor=2, context=2))
    np.testing.assert_allclose(4 * getattr(ops, name)[stream, 1], getattr(graph.ops, name)[stream, 1])


@pytest.mark.parametrize(
    "shards", [Shards(tensor=4), Shards(context=2), Shards(tensor=2, sequence_parallel=False)]
)
def test_a_compiler_moves_no_more_than_eager_execution_on_any_device(graph, shards):
    ops = sharded_ops(graph, blocks_of(graph), shards)
    eager = ops.read_bytes + ops.write_bytes
    whole = graph.ops.read_bytes + graph.ops.write_bytes
    saves = (graph.ops.joined_bytes <= whole * (1 + 1e-9)).all(axis=1)
    assert saves.mean() > 0.9
    assert (ops.joined_bytes[saves] <= eager[saves] * (1 + 1e-6) + 1.0).all()


def test_axes_of_one_change_nothing(graph):
    assert sharded_ops(graph, blocks_of(graph), Shards()) is graph.ops
    ops = sharded_ops(graph, blocks_of(graph), Shards(context=2))
    np.testing.assert_array_equal(ops.width, graph.ops.width)  # no axis of the head's columns


def test_kinds_and_flags_are_those_of_the_graph(graph):
    ops = sharded_ops(graph, blocks_of(graph), Shards(tensor=2, context=2))
    for column in fields(OpTable):
        if divided_of(column).tensor is Share.WHOLE:
            assert getattr(ops, column.name) is getattr(graph.ops, column.name)
