"""One set of axes and one answer for every run of several devices, whichever law gives it."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.prediction.division import Axes, is_divided
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.prediction.run_step import STEP_LAWS, run_step
from forerun.question.run import Run

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


@pytest.mark.parametrize(("device", "options"), RUNS)
def test_a_law_holds_for_every_divided_run(device: str, options: dict[str, Any]) -> None:
    run = run_of(device, **options)
    assert is_divided(run)
    assert any(holds(run) for holds, _ in STEP_LAWS)


def test_axes_of_one_device_are_one() -> None:
    assert Axes.of(run_of("h100-sxm")) == Axes()
    assert not is_divided(run_of("h100-sxm"))


def test_data_parallel_devices_are_replicas_of_a_layout_of_ones() -> None:
    assert Axes.of(run_of("8xh100-sxm")) == Axes(replicated=8)
    assert Axes.of(run_of("8xh100-sxm", parallel="dp=8")) == Axes(replicated=8)
    assert Axes.of(run_of("8xh100-sxm", strategy="zero1")) == Axes(replicated=8, shard=8)


def test_a_strategy_of_two_levels_divides_states_inside_a_node() -> None:
    assert Axes.of(run_of("2x8xh100-sxm", strategy="hsdp")) == Axes(replicated=16, shard=8)
