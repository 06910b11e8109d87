"""The same networks in PyTorch and in Keras have the same parameters and the same work."""

from dataclasses import replace
from importlib import util

import pytest

from forerun.graph.graph import OpClass
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.keras.parity import PAIRS, compare_graphs, keras_parity, parity_markdown

needs_keras = pytest.mark.skipif(util.find_spec("keras") is None, reason="the extra 'keras' is not installed")


@needs_keras
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0])
def test_parameters_and_work_are_the_same_and_every_difference_has_a_reason(pair):
    (row,) = keras_parity([pair], batch_size=32)
    assert row.is_equal, parity_markdown([row])
    assert row.unexplained == (), parity_markdown([row])


def test_a_network_equals_itself_and_not_another():
    small, large = (
        trace(ModelRequest(model=name), TrainingSetup()) for name in ("cnn:depth=1", "cnn:depth=2")
    )
    same = compare_graphs(small, small, 8)
    assert same.is_equal
    assert {c.reason for c in same.classes} == {""}
    assert not compare_graphs(small, large, 8).is_equal
    assert not compare_graphs(small, replace(small, num_trainable_parameters=1), 8).is_equal


def test_the_table_names_both_and_says_what_differs():
    small, large = (
        trace(ModelRequest(model=name), TrainingSetup()) for name in ("cnn:depth=1", "cnn:depth=2")
    )
    row = compare_graphs(small, large, 8)
    text = parity_markdown([row])
    assert "NOT the same" in text
    assert "cnn:depth=2" in text
    flops = next(c.flops for c in row.classes if c.op_class is OpClass.CONV)
    assert flops[1] > flops[0]
    assert row.as_dict()["is_equal"] is False
