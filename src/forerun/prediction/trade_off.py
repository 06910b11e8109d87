"""Accuracy against time over configurations: predicted time of an epoch times forecast epochs, and the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    def as_dict(self, is_on_front: bool) -> dict[str, Any]:
        """Plain values for JSON."""

        def known(value: float) -> float | None:
            return value if math.isfinite(value) else None

        return {
            "name": self.name,
            "device": self.device,
            "epoch_time_s": self.epoch_time_s.as_dict(),
            "epochs_to_target": known(self.epochs_to_target),
            "time_to_target_s": dict(
                zip(("p10", "p50", "p90"), (known(t) for t in self.time_to_target_s), strict=True)
            ),
            "final_value": self.final_value.as_dict(),
            "end_time_s": self.end_time_s.as_dict(),
            "cost_usd": self.cost_usd,
            "is_on_pareto_front": is_on_front,
        }


def pareto_front(points: Sequence[TradeOffPoint]) -> list[bool]:
    """Whether each point is beaten by no other in both end time and final value."""

    def beats(a: TradeOffPoint, b: TradeOffPoint) -> bool:
        sign = 1.0 if a.is_rising else -1.0
        faster = b.end_time_s.value - a.end_time_s.value
        better = sign * (a.final_value.value - b.final_value.value)
        return faster >= 0 and better >= 0 and (faster > 0 or better > 0)

    return [not any(beats(other, point) for other in points) for point in points]
