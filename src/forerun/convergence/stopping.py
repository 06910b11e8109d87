"""Gain of going on: by the next hour, or the next tenth of the run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.convergence.forecast import CurveForecast

__all__ = ["HOPELESS", "Advice", "stop_advice"]

HOPELESS = 0.05
"""Probability of reaching the target below which a run is advised to stop."""

_WORTH_SHARE = 0.01
"""A rest of the run that removes less than this share of the present error, at its likely best, buys nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice on a run.

    Attributes:
        should_stop: Whether to stop it.
        reason: Why, a sentence.
        gain_next: What the metric gains in the next hour, or the next tenth of the run without times.
        gain_unit: "hour" or "tenth of the run".
        gain_rest: What it gains until the end.
    """

    should_stop: bool
    reason: str
    gain_next: float
    gain_unit: str
    gain_rest: float


def stop_advice(forecast: CurveForecast, epoch_time_s: float | None) -> Advice:
    """Advice for a run.

    Args:
        forecast: Of the run.
        epoch_time_s: Time of an epoch [s], or None.
    """
    curve = forecast.curve
    sign = 1.0 if curve.is_rising else -1.0
    best = float(np.max(sign * curve.values))
    step = 0.1 * forecast.end_epoch if not epoch_time_s else 3600.0 / epoch_time_s
    gain_next = max(0.0, _forecast_at(forecast, float(curve.epochs[-1]) + step, sign) - best)
    gain_rest = max(0.0, sign * forecast.final.value - best)
    should_stop, reason = _verdict(forecast, best, gain_rest, sign)
    return Advice(
        should_stop=should_stop,
        reason=reason,
        gain_next=gain_next,
        gain_unit="hour" if epoch_time_s else "tenth of the run",
        gain_rest=gain_rest,
    )


def _forecast_at(forecast: CurveForecast, epoch: float, sign: float) -> float:
    if not len(forecast.epochs):
        return sign * float(forecast.curve.values[-1])
    last = forecast.curve
    places = np.concatenate([[last.epochs[-1]], forecast.epochs])
    values = np.concatenate([[float(np.max(sign * last.values))], sign * forecast.values])
    return float(np.interp(epoch, places, values))


def _verdict(forecast: CurveForecast, best: float, gain_rest: float, sign: float) -> tuple[bool, str]:
    if forecast.reached_epoch is not None:
        return True, f"the target was reached at {forecast.curve.unit} {forecast.reached_epoch:g}"
    if forecast.target is not None and forecast.probability_at_end <= HOPELESS:
        return True, (
            f"the target is reached by the end with a probability of at most {HOPELESS:.0%}: likely end "
            f"{forecast.final.value:.4g}"
        )
    likely_best = sign * (forecast.final.high_90 if sign > 0 else forecast.final.low_90)
    level = (1.0 - best) if sign > 0 and best <= 1 else abs(best)
    if forecast.target is None and likely_best - best < _WORTH_SHARE * level:
        return True, "even the favourable end of the interval is hardly better than the best so far"
    return False, f"the rest of the run is expected to gain {gain_rest:.3g}"
