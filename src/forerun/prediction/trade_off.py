"""Accuracy against time over configurations: predicted time of an epoch times forecast epochs, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from forerun.prediction.estimate import Interval

__all__ = ["TradeOffPoint", "pareto_front"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOffPoint:
    """One configuration.

    Attributes:
        name: What it is called.
        device: Where it runs.
        epoch_time_s: Predicted time of an epoch [s].
        epochs_to_target: At probability one half; infinite if not by the end, or without a target.
        time_to_target_s: At probabilities 0.1, 0.5 and 0.9 [s].
        final_value: Value at the end.
        end_time_s: Time of the whole run [s].
        cost_usd: Price of the whole run, or None.
        is_rising: Whether a larger value is better.
    """

    name: str
    device: str
    epoch_time_s: Interval
    epochs_to_target: float
    time_to_target_s: tuple[float, float, float]
    final_value: Interval
    end_time_s: Interval
    cost_usd: float | None
    is_rising: bool


def pareto_front(points: Sequence[TradeOffPoint]) -> list[bool]:
    """True if each point is beaten by no other in both end time and final value."""

    def beats(a: TradeOffPoint, b: TradeOffPoint) -> bool:
        sign = 1.0 if a.is_rising else -1.0
        faster = b.end_time_s.value - a.end_time_s.value
        better = sign * (a.final_value.value - b.final_value.value)
        return faster >= 0 and better >= 0 and (faster > 0 or better > 0)

    return [not any(beats(other, point) for other in points) for point in points]
