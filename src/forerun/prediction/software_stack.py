"""Puts the effect of a software stack on a predicted step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from forerun.graph.graph import Graph
from forerun.hardware.device import Device, DeviceKind
from forerun.optime.software_stack import KERAS_ON_TENSORFLOW, StackEffect, calibrated_effect
from forerun.optime.weights import DEFAULT_STACK, OpTimeWeights
from forerun.prediction.estimate import BreakdownPart, Interval
from forerun.prediction.step import StepPrediction
from forerun.run.setup import Phase

Floats = npt.NDArray[np.float64]

__all__ = ["is_keras_graph", "stack_name", "stack_of", "with_stack", "with_stack_times"]


def is_keras_graph(graph: Graph) -> bool:
    """Whether a graph was traced from a Keras model."""
    return any(name == "keras" for name, _ in graph.versions)


def stack_name(graph: Graph) -> str:
    """The framework a graph is of, ``keras`` or ``pytorch``, as calibrations name it."""
    return "keras" if is_keras_graph(graph) else DEFAULT_STACK


def stack_of(graph: Graph, device: Device, weights: OpTimeWeights) -> StackEffect | None:
    """The stack whose effect is not in the cost model yet; None for PyTorch, and where nothing is known of it.

    A calibration with Keras holds the times of its operations; only the cost of its loop is added.
    """
    if not is_keras_graph(graph):
        return None
    if weights.calibrated_stack == "keras":
        return calibrated_effect(weights)
    return KERAS_ON_TENSORFLOW if device.kind is DeviceKind.GPU else None


def with_stack(step: StepPrediction, effect: StackEffect, phase: Phase) -> StepPrediction:
    """The step in a stack: its device time by a factor, its training loop's cost added, the interval wider.

    The half-widths of both intervals add in squares, in the logarithm; the parts still add up to the step.
    """
    added_s = effect.step_cost_s if phase is Phase.TRAIN else 0.0
    times = (np.asarray(time_s) for time_s in (step.step_s.value, step.step_s.low, step.step_s.high))
    value, low, high = (float(time_s) for time_s in with_stack_times(tuple(times), effect, phase))
    parts = [BreakdownPart(part.name, effect.factor * part.time_s) for part in step.breakdown]
    if added_s:
        parts.append(BreakdownPart(f"training loop of {effect.name}", added_s))
    return replace(
        step,
        step_s=Interval(value, low, high),
        breakdown=tuple(sorted(parts, key=lambda part: -part.time_s)),
        kernel_s=effect.factor * step.kernel_s,
    )


def with_stack_times(times: tuple[Floats, ...], effect: StackEffect, phase: Phase) -> tuple[Floats, ...]:
    """Value, low and high of step times in a stack, arrays of one shape [s].

    With w the half-width of the interval in the logarithm: value' = factor * value + cost of a step,
    w' = sqrt(w^2 + spread^2).
    """
    value, _, high = times
    changed = effect.factor * value + (effect.step_cost_s if phase is Phase.TRAIN else 0.0)
    width = np.hypot(np.log(high / value), effect.log_spread)
    return changed, changed * np.exp(-width), changed * np.exp(width)
