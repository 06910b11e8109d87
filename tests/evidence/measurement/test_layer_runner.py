"""Single layers: their figures against the modules, and every kind run for real."""

import pytest
import torch
from layer_sizes import SIZES
from real_jobs import run_here
from torch.utils.flop_counter import FlopCounterMode

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.layer_figures import LAYER_KINDS, layer_figures, output_size
from forerun.evidence.measurement.layer_modules import build_layer
from forerun.evidence.measurement.runners import step_runner
from forerun.evidence.records.measurement import JobKind
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace

WITH_PRODUCTS = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "dense")


def test_every_kind_is_tested_here():
    assert set(SIZES) == set(LAYER_KINDS)


@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_figures_are_those_of_the_module(kind):
    figures = layer_figures(kind, SIZES[kind])
    layer = build_layer(kind, SIZES[kind])
    assert layer(torch.randn(figures.input_shape)).shape == figures.output_shape
    assert sum(p.numel() for p in layer.parameters()) == figures.num_parameters


@pytest.mark.parametrize("kind", WITH_PRODUCTS)
def test_work_is_what_pytorch_counts(kind):
    figures = layer_figures(kind, SIZES[kind])
    with FlopCounterMode(display=False) as counter:
        build_layer(kind, SIZES[kind])(torch.randn(figures.input_shape))
    assert figures.flops == counter.get_total_flops()


def test_attention_is_its_products_and_a_softmax():
    asked = SIZES["attention"]
    batch, tokens, width, heads = 2, 5, 8, 2
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        build_layer("attention", asked)(torch.randn(batch, tokens, width))
    softmax = 5 * batch * heads * tokens**2
    assert layer_figures("attention", asked).flops == counter.get_total_flops() + softmax


@pytest.mark.parametrize("mode", step_runner.MODES)
@pytest.mark.parametrize("kind", LAYER_KINDS)
def test_every_kind_runs(kind, mode):
    optimizer = "adam" if mode == "train_step" else "none"
    found = run_here(JobKind.LAYER, kind, **SIZES[kind], mode=mode, optimizer=optimizer)
    assert len(found.repetitions_s) == 3
    assert min(found.repetitions_s) > 0
    assert found.results["num_parameters"] == layer_figures(kind, SIZES[kind]).num_parameters
    assert found.results["peak_rss_delta_bytes"] >= 4 * found.results["num_parameters"]


@pytest.mark.parametrize(("precision", "layout"), [("bf16", "nchw"), ("amp-bf16", "nhwc"), ("fp32", "nhwc")])
def test_precisions_and_layouts(precision, layout):
    asked = {**SIZES["conv2d"], "precision": precision, "layout": layout}
    found = run_here(JobKind.LAYER, "conv2d", **asked, mode="train_step", optimizer="sgd")
    assert len(found.repetitions_s) == 3


def test_a_training_step_moves_the_weights_and_not_the_input(monkeypatch):
    """The input gets a gradient, and only a gradient: earlier benchmarks let the optimizer change it."""
    seen = {}
    original = step_runner._train_step

    def watched(layers, inputs, *rest):
        step = original(layers, inputs, *rest)
        [layer], [given] = layers, inputs
        seen.update(layer=layer, given=given, weight=layer[0].weight.clone(), input=given.detach().clone())
        return step

    monkeypatch.setattr(step_runner, "_train_step", watched)
    run_here(JobKind.LAYER, "dense", **SIZES["dense"], mode="train_step", optimizer="sgd-plain")
    assert not torch.equal(seen["layer"][0].weight, seen["weight"])
    assert torch.equal(seen["given"].detach(), seen["input"])
    assert seen["given"].grad.abs().sum() > 0


def test_the_first_layer_of_a_network_needs_no_gradient_of_its_input(monkeypatch):
    seen = []
    original = step_runner._train_step
    monkeypatch.setattr(
        step_runner,
        "_train_step",
        lambda layers, inputs, *rest: [seen.extend(inputs), original(layers, inputs, *rest)][1],
    )
    run_here(JobKind.LAYER, "dense", **SIZES["dense"], mode="train_step", input_gradient=False)
    assert [given.grad for given in seen] == [None]


def test_copies_have_weights_and_inputs_of_their_own(monkeypatch):
    result = run_here(
        JobKind.LAYER, "conv2d", **SIZES["conv2d"], mode="train_step", optimizer="adam", copies=3
    )
    figures = layer_figures("conv2d", SIZES["conv2d"])
    assert result.results["num_parameters"] == 3 * figures.num_parameters


@pytest.mark.parametrize(
    "kind", [kind for kind in LAYER_KINDS if layer_figures(kind, SIZES[kind]).num_parameters]
)
def test_a_layer_can_be_traced_from_its_parameters(kind):
    """What calibration does with a record: the same layer, without its values."""
    figures = layer_figures(kind, SIZES[kind])
    batch_size, *sample = figures.input_shape
    graph = trace(
        ModelRequest(model=f"layer {kind}", input_shape=tuple(sample)),
        TrainingSetup(batch_size_per_device=batch_size, optimizer="sgd"),
        module=build_layer(kind, SIZES[kind]),
    )
    assert graph.num_parameters == figures.num_parameters


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "expected"),
    [(32, 3, 1, "same", 32), (32, 3, 2, "same", 16), (32, 3, 1, "valid", 30), (5, 7, 1, "valid", -1)],
)
def test_output_sizes(size, kernel, stride, padding, expected):
    assert output_size(size, kernel, stride, padding) == expected


@pytest.mark.parametrize(
    ("kind", "changed", "told"),
    [
        ("conv3d", {}, "did you mean conv2d"),
        ("conv2d", {"in_size": 2, "kernel": 5, "padding": "valid"}, "no output"),
        ("conv2d", {"kernel": None}, "whole number as kernel"),
        ("conv2d", {"in_size": 2.5}, "whole number as in_size"),
        ("grouped_conv2d", {"groups": 5}, "5 groups divide"),
        ("group_norm", {"groups": 3}, "3 groups divide"),
        ("batch_norm", {"batch_size": 1, "in_size": 1}, "more than one value"),
        ("group_norm", {"batch_size": 1, "in_size": 1, "groups": 8}, "more than one value"),
        ("attention", {"num_heads": 3}, "3 heads divide"),
        ("dense", {"activation": "swish"}, "unknown activation"),
        ("dense", {"mode": "backward"}, "forward or train_step"),
        ("dense", {"mode": "train_step", "optimizer": "adm"}, "did you mean adam"),
        ("dense", {"precision": "fp4"}, "unknown precision"),
        ("dense", {"precision": "fp8"}, "fp8 is predicted but not measured: expected one of fp32"),
        ("dense", {"mode": "train_step", "optimizer": "lion"}, "lion is predicted but not measured"),
    ],
)
def test_layers_that_cannot_be_meant(kind, changed, told):
    with pytest.raises(InvalidSetupError, match=told):
        run_here(JobKind.LAYER, kind, **{**SIZES.get(kind, {}), **changed})
