"""One set of axes and one answer for every run of several devices, whichever law gives it."""

from __future__ import annotations

from typing import Any

import pytest

import forerun
from forerun.prediction.memory import memory_constants_of
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.run_step import run_step
from forerun.question.run import Run
from forerun.question.sharing import DeviceLayout
from forerun.search.layout_search import layout_point

MODEL = "gpt:depth=4,width=512,vocabulary=4096"
MODELS = TracedModels()
RUNS: list[tuple[str, dict[str, Any]]] = [
    ("h100-sxm", {"accumulation": 3}),
    ("8xh100-sxm", {}),
    ("8xh100-sxm", {"strategy": "zero2"}),
    ("8xh100-sxm", {"strategy": "fsdp"}),
    ("8xh100-sxm", {"parallel": "tp=2,pp=2,dp=2", "accumulation": 4}),
]


def run_of(device: str, **options: Any) -> Run:
    return Run.of(MODEL, device=device, precision="bf16", sequence_length=256, batch_size=4, **options)


@pytest.mark.parametrize(("device", "options"), RUNS)
def test_parts_of_every_divided_step_add_up_to_it(device: str, options: dict[str, Any]) -> None:
    run = run_of(device, **options)
    step = run_step(MODELS.of(run), run, cost_model_of(run))
    assert step.several is not None
    assert sum(part.time_s for part in step.several.parts) == pytest.approx(step.several.step_s.value)
    assert step.several.exposed_s <= step.several.communication_s * (1 + 1e-9)
    assert 0 < step.several.busy_share <= 1


QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    ("torchvision:resnet18", "8xv100-sxm2-16gb", {"precision": "amp", "batch_size": 64}),
    ("torchvision:squeezenet1_1", "2x4xt4", {"inter": "ethernet-25g", "batch_size": 32, "accumulation": 2}),
    (MODEL, "4xrtx-4090", {"precision": "amp-bf16", "sequence_length": 128, "optimizer": "adamw"}),
    (MODEL, "2x8xh100-sxm", {"inter": "8xinfiniband-ndr", "precision": "bf16", "recompute": "full"}),
]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
@pytest.mark.parametrize(("model", "device", "options"), QUESTIONS)
def test_one_data_parallel_run_has_one_answer(
    model: str, device: str, options: dict[str, Any], strategy: str
) -> None:
    """By its strategy, by its axes and among the layouts of its cluster: to the last bit."""
    plain = forerun.predict(model, device=device, strategy=strategy, **options)
    number = plain.run.cluster.num_devices
    as_axes = forerun.predict(model, device=device, strategy=strategy, parallel=f"dp={number}", **options)
    assert as_axes == plain
    run = Run.of(model, device=device, **options).with_(parallel=f"dp={number}", strategy=strategy)
    assert run == plain.run
    point = layout_point(MODELS, run, cost_model_of(run), memory_constants_of(run.cluster.device, run), 1e9)
    assert point is not None
    assert (point.step_time_s, point.peak_memory_bytes) == (plain.step_time_s, plain.peak_memory_bytes)
    assert point.parallel == f"dp={number}"


def test_the_layouts_of_a_cluster_have_the_answers_of_predict() -> None:
    options: dict[str, Any] = {"precision": "amp-bf16", "sequence_length": 128}
    found = forerun.layouts(MODEL, device="4xh100-sxm", batch_size=4, recompute="none", top=1000, **options)
    own = [point for point in found.best if point.parallel == "dp=4"]
    assert {point.strategy for point in own} == {"ddp", "zero1", "fsdp"}
    for point in (*own, *found.front):
        again = forerun.predict(point.run)
        assert (point.step_time_s, point.peak_memory_bytes) == (again.step_time_s, again.peak_memory_bytes)


def test_axes_of_one_device_are_one() -> None:
    run = run_of("h100-sxm")
    assert (run.layout, run.num_shards, run.is_divided) == (DeviceLayout(), 1, False)


def test_data_parallel_devices_are_replicas_of_a_layout_of_ones() -> None:
    for options, num_shards in (({}, 1), ({"parallel": "dp=8"}, 1), ({"strategy": "zero1"}, 8)):
        run = run_of("8xh100-sxm", **options)
        assert (run.layout, run.num_shards) == (DeviceLayout(data=8), num_shards)


def test_only_replicas_cast_their_weights() -> None:
    asked = {"precision": "amp-bf16", "sequence_length": 256}
    for options, precision in (
        ({}, "amp-bf16"),
        ({"parallel": "dp=8"}, "amp-bf16"),
        ({"strategy": "zero1"}, "bf16"),
        ({"parallel": "tp=2"}, "bf16"),
    ):
        assert Run.of(MODEL, device="8xh100-sxm", **asked, **options).compute_setup.precision == precision


def test_a_strategy_of_two_levels_divides_states_inside_a_node() -> None:
    run = run_of("2x8xh100-sxm", strategy="hsdp")
    assert (run.layout.replicated, run.num_shards) == (16, 8)
