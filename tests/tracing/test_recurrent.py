"""Recurrent layers as fused operations: shapes, gradients, what is kept for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from traced_steps import allocated_bytes, graph_of, record, rows_named

from forerun.graph.graph import AllocationKind, OpClass, StepPart, at_batch
from forerun.question.setup import Phase
from forerun.tracing.cuda_semantics import cuda_semantics

KINDS = {"lstm": (nn.LSTM, 4), "gru": (nn.GRU, 3), "rnn": (nn.RNN, 1)}


class LastState(nn.Module):
    """Classifies by the final hidden state."""

    def __init__(self, kind, **options):
        super().__init__()
        self.layers = kind(12, 16, batch_first=True, **options)
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        state = self.layers(x)[1]
        return self.head((state[0] if isinstance(state, tuple) else state)[-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_shapes_and_gradients_are_those_of_pytorch(kind, bidirectional, batch_first, num_layers):
    options = {"bidirectional": bidirectional, "batch_first": batch_first, "num_layers": num_layers}
    layer = KINDS[kind][0](5, 6, device="meta", **options)
    source = torch.empty(4, 7, 5, device="meta", requires_grad=True)
    expected = KINDS[kind][0](5, 6, **options)(torch.zeros(4, 7, 5))
    with cuda_semantics(None, fused_attention=True):
        output, state = layer(source)
        output.sum().backward()
    assert output.shape == expected[0].shape
    for ours, theirs in zip(
        state if kind == "lstm" else [state], expected[1] if kind == "lstm" else [expected[1]], strict=True
    ):
        assert ours.shape == theirs.shape
    assert source.grad.shape == source.shape
    assert all(p.grad is not None and p.grad.shape == p.shape for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_a_stack(kind):
    layer, num_gates = KINDS[kind]
    graph = graph_of(LastState(layer, num_layers=2), (9, 12), batch_size_per_device=8)
    recurrent = graph.ops.op_class == OpClass.RECURRENT
    flops = at_batch(graph.ops.flops, 8)[recurrent]
    forward = 2 * 9 * 8 * num_gates * 16 * ((12 + 16) + (16 + 16))
    assert flops.tolist() == [forward, 2 * forward]
    assert graph.ops.step_part[recurrent].tolist() == [StepPart.FORWARD, StepPart.BACKWARD]
    assert graph.ops.serial_steps[recurrent].tolist() == [9 * 2, 9 * 2]


@pytest.mark.parametrize("kind", KINDS)
def test_gates_and_cells_are_kept_for_training_only(kind):
    layer, num_gates = KINDS[kind]
    kept = (num_gates + 1) * 16 * 2 * 9 * 4 * 4
    training = record(LastState(layer, num_layers=2), (9, 12))
    inference = record(LastState(layer, num_layers=2), (9, 12), phase=Phase.INFERENCE)
    assert kept in allocated_bytes(training, AllocationKind.ACTIVATION)
    assert kept not in allocated_bytes(inference)


def test_a_loss_on_the_final_state_reaches_the_weights():
    raw = record(LastState(nn.LSTM), (9, 12))
    assert len(rows_named(raw, "rnn_backward")) == 1
    weights = (64 * 12 + 64 * 16 + 64 + 64 + 16 * 3 + 3) * 4
    assert sum(allocated_bytes(raw, AllocationKind.GRADIENT)) == weights


def test_layers_without_bias_take_as_many_steps():
    with_bias, without = (graph_of(LastState(nn.LSTM, num_layers=2, bias=b), (9, 12)) for b in (True, False))
    for graph in (with_bias, without):
        assert graph.ops.serial_steps.max() == 18
