"""Puts the effect of a software stack on a predicted step."""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

from forerun.costs.op_weights import OpTimeWeights
from forerun.costs.software_stack import KERAS_ON_TENSORFLOW, StackEffect
from forerun.hardware.device import Device, DeviceKind
from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.prediction.step import StepPrediction
from forerun.workload.graph import Graph
from forerun.workload.setup import Phase

__all__ = ["is_keras_graph", "stack_of", "with_stack"]


def is_keras_graph(graph: Graph) -> bool:
    """Whether a graph was traced from a Keras model."""
    return any(name == "keras" for name, _ in graph.versions)


def stack_of(graph: Graph, device: Device, weights: OpTimeWeights) -> StackEffect | None:
    """The stack whose effect is not in the cost model yet; None for PyTorch, and where nothing is known of it.

    A calibration was measured with its own stack and needs no other effect.
    """
    if (
        not is_keras_graph(graph)
        or device.kind is not DeviceKind.GPU
        or weights.calibrated_device is not None
    ):
        return None
    return KERAS_ON_TENSORFLOW


def with_stack(step: StepPrediction, effect: StackEffect, phase: Phase) -> StepPrediction:
    """The step in a stack: its device time by a factor, its training loop's cost added, the interval wider.

    The half-widths of both intervals add in squares, in the logarithm; the parts still add up to the step.
    """
    added_s = effect.step_cost_s if phase is Phase.TRAIN else 0.0
    value = effect.factor * step.step_s.value + added_s
    width = hypot(log(step.step_s.high / step.step_s.value), effect.log_spread)
    parts = [BreakdownPart(part.name, effect.factor * part.time_s) for part in step.breakdown]
    if added_s:
        parts.append(BreakdownPart(f"training loop of {effect.name}", added_s))
    return replace(
        step,
        step_s=Interval(value, value * exp(-width), value * exp(width)),
        breakdown=tuple(sorted(parts, key=lambda part: -part.time_s)),
        kernel_s=effect.factor * step.kernel_s,
    )
