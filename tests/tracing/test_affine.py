"""A graph of two traces answers for every batch size, or says that it cannot."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata

import numpy as np
import pytest
import torch
from torch import nn
from traced_steps import graph_of, setup_of

from forerun.graph.affine import are_comparable, join_graphs
from forerun.graph.graph import MemoryEvent, OpClass, StepPart, at_batch
from forerun.question.model import ModelRequest
from forerun.question.setup import OptimizerImplementation
from forerun.tracing.models.sources import build_model
from forerun.tracing.step import record_step
from forerun.tracing.step_graph import step_graph
from forerun.tracing.trace import trace, trace_built

AFFINE_OPS = ("flops", "read_bytes", "write_bytes", "gemm", "elements")


class SmallViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 8, 8)
        self.token = nn.Parameter(torch.empty(1, 1, 64))
        self.position = nn.Parameter(torch.empty(1, 17, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.encoder(x)[:, 0])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.LSTM(12, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, x):
        return self.head(self.layers(x)[0][:, -1])


class BatchSplitter(nn.Module):
    """Runs two samples at a time: more operations for a larger batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return torch.cat([self.layer(part) for part in x.split(2)])


class AllPairs(nn.Module):
    """Compares every sample with every other: work grows with the square of the batch."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return y @ y.transpose(0, 1)


MODELS = {
    "resnet18": ("torchvision:resnet18", {"image_size": 64}),
    "mobilenet_v3_small": ("torchvision:mobilenet_v3_small", {"image_size": 64}),
    "vit": (SmallViT, {"input_shape": (3, 32, 32)}),
    "lstm": (Tagger, {"input_shape": (7, 12)}),
}


def graphs_at(model, *batch_sizes):
    return [step_graph(model, record_step(model, setup_of(), size), ()) for size in batch_sizes]


def built(name):
    model, options = MODELS[name]
    return build_model(model if isinstance(model, str) else model(), **options)


@pytest.mark.parametrize("precision", ["fp32", "amp"])
@pytest.mark.parametrize("name", MODELS)
def test_a_third_batch_size_is_foretold_exactly(name, precision):
    setup = setup_of(precision, "sgd")
    graph = trace_built(built(name), setup)
    direct = record_step(built(name), setup, 7)
    assert graph.only_batch_size is None
    for column in AFFINE_OPS:
        measured = np.asarray([getattr(row.cost, column) for row in direct.rows], dtype=float)
        np.testing.assert_array_equal(at_batch(getattr(graph.ops, column), 7), measured, err_msg=column)
    sizes = [event.size_bytes for event in direct.events]
    np.testing.assert_array_equal(at_batch(graph.memory.size_bytes, 7), sizes)
    np.testing.assert_array_equal(graph.memory.event, [event.event for event in direct.events])
    np.testing.assert_array_equal(graph.memory.block, [event.block for event in direct.events])
    for column in ("count", "kernel_area", "stride", "groups", "width", "serial_steps", "element_bytes"):
        values = [getattr(row.cost, column) for row in direct.rows]
        np.testing.assert_array_equal(getattr(graph.ops, column), values, err_msg=column)


@pytest.mark.parametrize("module", [BatchSplitter, AllPairs])
def test_a_model_that_is_not_affine_holds_for_its_batch_size_only(module):
    graph = graph_of(module(), (8,), batch_size_per_device=6)
    assert graph.only_batch_size == 6
    assert any("depend on the batch size" in note for note in graph.notes)
    direct = record_step(build_model(module(), input_shape=(8,)), setup_of(), 6)
    np.testing.assert_array_equal(graph.ops.flops[:, 0], [row.cost.flops for row in direct.rows])
    assert not graph.ops.flops[:, 1].any()
    assert not graph.memory.size_bytes[:, 1].any()


def test_pairs_of_samples_are_counted_as_pairs():
    flops = [
        graph_of(AllPairs(), (8,), batch_size_per_device=size).total_flops(size) for size in (10, 20, 40)
    ]
    # Linear and square parts: f(40) - 4 f(20) + ... leaves a positive curvature.
    assert flops[2] - flops[1] > 2 * (flops[1] - flops[0])


def test_steps_with_other_operations_are_not_comparable():
    model = build_model(BatchSplitter(), input_shape=(8,))
    small, large = graphs_at(model, 2, 4)
    assert are_comparable(small, small)
    assert not are_comparable(small, large)


def test_growth_faster_than_the_batch_is_noticed():
    model = build_model(AllPairs(), input_shape=(8,))
    small, large = graphs_at(model, 2, 4)
    assert are_comparable(small, large)
    assert join_graphs(small, large) is None
    # Nor does a line that falls: for sizes there is none, for what a compiler may leave out it is the larger one.
    small, large = graphs_at(build_model(nn.Linear(8, 8), input_shape=(8,)), 2, 4)
    fewer = replace(large, ops=replace(large.ops, joined_bytes=small.ops.joined_bytes / 2))
    joined = join_graphs(small, fewer)
    np.testing.assert_array_equal(joined.ops.joined_bytes, small.ops.joined_bytes)
    assert (
        join_graphs(small, replace(fewer, ops=replace(fewer.ops, read_bytes=small.ops.read_bytes / 2)))
        is None
    )
    # What jumps between two batches follows the larger one.
    small, large = graphs_at(build_model(nn.Linear(8, 8), input_shape=(8,)), 32, 64)
    jumps = replace(large, ops=replace(large.ops, joined_bytes=large.ops.joined_bytes * [40, 1]))
    joined = join_graphs(small, jumps).ops.joined_bytes
    np.testing.assert_allclose(joined, np.stack([0 * joined[:, 0], jumps.ops.joined_bytes[:, 0] / 64], -1))


def test_a_graph_keeps_no_tensor_and_counts_parameters():
    graph = graph_of(Tagger(), (7, 12))
    assert graph.num_parameters == sum(p.numel() for p in Tagger().parameters())
    assert graph.input_shape == (7, 12)
    assert dict(graph.versions)["torch"] == metadata.version("torch")


def test_frozen_parameters_are_counted_apart():
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    graph = graph_of(module, (8,), optimizer="sgd")
    assert (graph.num_parameters, graph.num_trainable_parameters) == (72 + 36, 36)
    # Nothing below the first trainable layer is differentiated.
    assert (graph.ops.step_part == StepPart.WEIGHT_GRADIENT).sum() == 1


class SplitMLP(BatchSplitter):
    """As many operations as pairs of samples, and a layer whose gradients are unlike in shape."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 12))


def test_weight_gradients_are_told_apart_from_one_batch_too():
    graph = graph_of(SplitMLP(), (8,), batch_size_per_device=6)
    assert graph.only_batch_size == 6
    ops = graph.ops
    sizes = {
        part: sorted(tuple(row) for row in ops.gemm[(ops.step_part == part) & (ops.gemm[:, 1, 0] > 0), :, 0])
        for part in (StepPart.WEIGHT_GRADIENT, StepPart.BACKWARD)
    }
    # Three pairs of samples; the input needs no gradient.
    assert sizes[StepPart.WEIGHT_GRADIENT] == [(1, 12, 24, 2)] * 3 + [(1, 24, 8, 2)] * 3
    assert sizes[StepPart.BACKWARD] == [(1, 2, 24, 12)] * 3


def test_a_weight_of_another_layer_does_not_make_a_weight_gradient():
    # The gradient of the middle layer's input is (6, 24), the shape of the last layer's weight.
    module = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 16), nn.Linear(16, 24), nn.Linear(24, 6))
    model = build_model(module, input_shape=(8,))
    alone, large = graphs_at(model, 6, 12)
    joined = join_graphs(alone, large)
    middle = alone.ops.module_names.index("1")
    in_middle = (alone.ops.module == middle) & (alone.ops.gemm[:, 1, 0] > 0)
    np.testing.assert_array_equal(alone.ops.step_part[in_middle], joined.ops.step_part[in_middle])
    assert (6, 24) in {tuple(sizes) for sizes in alone.ops.gemm[in_middle, 1:3, 0]}


@pytest.mark.parametrize(("precision", "element_bytes"), [("fp32", 4), ("amp", 4), ("bf16", 2), ("fp16", 2)])
def test_a_fused_optimizer_moves_weights_of_their_own_size(precision, element_bytes):
    graph = graph_of(
        nn.Linear(100, 50),
        (100,),
        precision=precision,
        optimizer="adam",
        optimizer_implementation=OptimizerImplementation.FUSED,
    )
    row = np.flatnonzero(graph.ops.step_part == StepPart.OPTIMIZER)[0]
    weights = element_bytes * 5050
    # Weights, gradients and two states are read; weights and states are written.
    assert graph.ops.read_bytes[row, 0] == 4 * weights
    assert graph.ops.write_bytes[row, 0] == 3 * weights
    begins = np.flatnonzero(graph.memory.event == MemoryEvent.OPTIMIZER_BEGINS)[-1]
    assert not graph.memory.size_bytes[begins:].any()  # it works in place


def test_a_fused_optimizer_is_one_kernel_that_moves_each_tensor_once():
    graphs = {
        kind: graph_of(
            nn.Linear(100, 50),
            (100,),
            optimizer="adam",
            optimizer_implementation=OptimizerImplementation(kind),
        )
        for kind in ("fused", "foreach", "for-loop")
    }
    updates = {
        kind: np.flatnonzero(graph.ops.step_part == StepPart.OPTIMIZER) for kind, graph in graphs.items()
    }
    assert len(updates["fused"]) == 1
    assert 1 < len(updates["foreach"]) < len(updates["for-loop"])
    row, ops = updates["fused"][0], graphs["fused"].ops
    assert ops.joined.max() < len(ops)  # kernels keep numbers below that of rows, as files ask
    weights = 4 * 5050
    assert ops.read_bytes[row] @ (1, 0) == weights * (1 + 1 + 2)
    assert ops.write_bytes[row] @ (1, 0) == weights * (1 + 2)
    others = graphs["fused"].ops.step_part != StepPart.OPTIMIZER
    same = graphs["foreach"].ops.step_part != StepPart.OPTIMIZER
    np.testing.assert_array_equal(ops.flops[others], graphs["foreach"].ops.flops[same])


# ---------------------------------------------------------------------------------------------------------
# published values


@pytest.mark.parametrize(
    ("name", "giga_macs", "num_parameters"),
    [
        # Operations and parameters as torchvision's weights document them (GFLOPS there are multiply-adds).
        ("resnet50", 4.089, 25_557_032),
        ("vgg16", 15.470, 138_357_544),
        ("mobilenet_v2", 0.301, 3_504_872),
        ("resnext50_32x4d", 4.230, 25_028_904),
        ("densenet121", 2.834, 7_978_856),
    ],
)
def test_forward_work_and_parameters_of_published_networks(name, giga_macs, num_parameters):
    graph = trace(ModelRequest(model=f"torchvision:{name}"), setup_of(phase="forward"), use_cache=False)
    products = np.isin(
        graph.ops.op_class, (OpClass.CONV, OpClass.DEPTHWISE_CONV, OpClass.GROUPED_CONV, OpClass.LINEAR)
    )
    flops = at_batch(graph.ops.flops, 8)[products] @ graph.ops.count[products]
    assert flops / 8 / 2e9 == pytest.approx(giga_macs, abs=6e-4)
    assert graph.num_parameters == num_parameters


def test_a_transformer_step_takes_six_flop_per_parameter_and_token():
    # Kaplan et al. 2020, arXiv 2001.08361, section 2.1: C = 6 N D without embeddings and attention scores.
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    graph = graph_of(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), (64, 256))
    linear = graph.ops.op_class == OpClass.LINEAR
    flops = at_batch(graph.ops.flops, 4)[linear] @ graph.ops.count[linear]
    weights = 3 * (4 * 256 * 256 + 2 * 256 * 1024)
    # The input needs no gradient, so the first layer's projection of it saves a third of its work.
    saved = 2 * 3 * 256 * 256 * 4 * 64
    assert flops == 6 * weights * 4 * 64 - saved
