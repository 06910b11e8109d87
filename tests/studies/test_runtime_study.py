"""PyTorch's own estimators on a machine without a GPU."""

import dataclasses
import os

import pytest

from forerun.cost.memory.stream import live_peak_bytes
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.optime.pytorch_tools import ToolProcess, estimated_step_s, tracked_peak_bytes

REQUEST = ModelRequest(model="torchvision:resnet18", image_size=64)
SETUP = TrainingSetup(batch_size_per_device=64, precision="amp")


def die():
    os._exit(1)


def fail():
    raise ValueError("expected a wheel\nand more")


@pytest.fixture(scope="module")
def tool():
    with ToolProcess() as process:
        yield process


def test_the_runtime_estimator_runs_without_a_gpu_and_scales_with_the_device(tool):
    device = find_device("rtx-3090")
    half = dataclasses.replace(
        device,
        name="half of it",
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s / 2,
        peak_flops_per_s={name: peak / 2 for name, peak in device.peak_flops_per_s.items()},
    )
    whole, halved = (tool.ask(estimated_step_s, REQUEST, SETUP, each) for each in (device, half))
    assert whole.reason == halved.reason == ""
    assert halved.value == pytest.approx(2 * whole.value)
    assert whole.wall_s > 0


def test_the_memory_tracker_agrees_with_live_bytes_under_the_same_autocast_rules(tool):
    graph = trace(REQUEST, SETUP)
    with_rules = tool.ask(tracked_peak_bytes, REQUEST, SETUP, cuda_rules=True)
    as_it_comes = tool.ask(tracked_peak_bytes, REQUEST, SETUP, cuda_rules=False)
    assert with_rules.value == pytest.approx(live_peak_bytes(graph.memory, 64), rel=0.01)
    assert as_it_comes.value > with_rules.value


def test_a_tool_that_fails_or_ends_its_process_leaves_a_reason(tool):
    assert tool.ask(fail).reason == "ValueError: expected a wheel"
    assert tool.ask(die).reason == "the tool ended its process"
    assert tool.ask(float, 3).value == 3.0
