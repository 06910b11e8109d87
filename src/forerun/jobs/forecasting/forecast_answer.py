"""A forecast of a curve, with the clock and the price of each device it might go on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from forerun.base.answers import Answer, fields_of
from forerun.jobs.forecasting.curve import Curve, Floats, clean, evaluation_noise, final_error
from forerun.jobs.forecasting.forecast import CurveForecast, finished_of
from forerun.jobs.forecasting.next_trial import chance_to_win
from forerun.jobs.forecasting.prior import CUTS
from forerun.prediction.estimate import Interval

HOPELESS = 0.05
"""Probability of reaching the target below which a run is advised to stop."""

_CLEAR_SPREADS = 3.0

_WORTH_SHARE = 0.01
"""A rest of the run that removes less than this share of the present error, at its likely best, buys nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice on whether to stop a run, with what it would still gain.

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
    """Advice on whether to let a run go on.

    Args:
        forecast: Of the run.
        epoch_time_s: Time of an epoch [s], or None.
    """
    curve = forecast.curve
    sign = 1.0 if curve.is_rising else -1.0
    best = sign * curve.best
    step = 0.1 * forecast.end_epoch if not epoch_time_s else 3600.0 / epoch_time_s
    places = np.concatenate([[curve.epochs[-1]], forecast.epochs])
    gains = np.concatenate([[0.0], sign * forecast.values - best])
    gain_rest = max(0.0, sign * forecast.final.value - best)
    should_stop, reason = _verdict(forecast, best, gain_rest, sign)
    return Advice(
        should_stop=should_stop,
        reason=reason,
        gain_next=max(0.0, float(np.interp(curve.epochs[-1] + step, places, gains))),
        gain_unit="hour" if epoch_time_s else "tenth of the run",
        gain_rest=gain_rest,
    )


def _verdict(forecast: CurveForecast, best: float, gain_rest: float, sign: float) -> tuple[bool, str]:
    curve = forecast.curve
    if forecast.reached_epoch is not None:
        return True, f"the target was reached at {curve.unit} {forecast.reached_epoch:g}"
    if forecast.target is not None and forecast.probability_at_end <= HOPELESS:
        return True, (
            f"the target is reached by the end with a probability of at most {HOPELESS:.0%}: likely end "
            f"{forecast.final.value:.4g}"
        )
    likely_best = sign * (forecast.final.high_90 if sign > 0 else forecast.final.low_90)
    level = (1.0 - best) if sign > 0 and best <= 1 else abs(best)
    if forecast.target is None and likely_best - best < _WORTH_SHARE * level:
        return True, "even the favourable end of the interval is hardly better than the best so far"
    if forecast.target is None and gain_rest == 0 and (best_at := _past_best(curve)) is not None:
        return True, f"it has been worse since its best, {curve.best:.4g} at {curve.unit} {best_at:g}"
    return False, f"the rest of the run is expected to gain {gain_rest:.3g}"


def _past_best(curve: Curve) -> float | None:
    """Place of the best point of a run that has turned, as one that overfits does; None of any other.

    The last fifth of the points, four or more, are each worse than the best by over three times the spread of single
    evaluations, and their later half by more than their earlier half.
    """
    losses = -curve.values if curve.is_rising else curve.values
    best_at, num_late = int(np.argmin(losses)), max(4, round(0.2 * len(losses)))
    late = losses[-num_late:]
    clear = losses[best_at] + _CLEAR_SPREADS * evaluation_noise(losses)
    has_turned = late.min() > clear and late[num_late // 2 :].mean() > late[: num_late // 2].mean()
    return float(curve.epochs[best_at]) if has_turned else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence(Answer):
    """Chance that a run ends in NaN, or far worse than it was, with its evidence.

    Attributes:
        probability: Of it, in what is left of the run.
        num_diverged: Finished runs of the job that did from this share on.
        num_finished: Finished runs that had not diverged before.
    """

    probability: float
    num_diverged: int
    num_finished: int


_DIVERGES = (0.0226, 0.0142, 0.0127, 0.0086, 0.0070, 0.0047)
"""Share of AlgoPerf's trials that diverge after each of ``CUTS``: 22 of 973 at the first, 6 of 1,278 at the last."""

_TRIALS_WORTH = 2.0
"""Finished runs of a job that as many trials of other jobs are worth."""


def chance_to_diverge(
    diverged: Sequence[bool], progress: float, base: Sequence[float] = _DIVERGES
) -> Divergence:
    """Chance that a run diverges later.

        P = (k + 2 p) / (n + 2)

    k of the n finished runs of its job that had not diverged at its share of the run did so later; p is what trials of
    other jobs do. AlgoPerf's trials that diverge late are some jobs': with workload families left out, the Brier score
    is .0086, that of p alone .0112. Spikes, set-backs and NaN of the run itself tell no more.

    Args:
        diverged: Of each finished run of ``diverged_later``.
        progress: Share of the run that is done.
        base: p at ``CUTS``.
    """
    usual = _TRIALS_WORTH * float(np.interp(progress, CUTS, base))
    return Divergence(
        probability=(sum(diverged) + usual) / (len(diverged) + _TRIALS_WORTH),
        num_diverged=sum(diverged),
        num_finished=len(diverged),
    )


def diverged_later(finished: Iterable[Curve], progress: float) -> list[bool]:
    """For each finished run, as logged, that had not diverged at a share of it: whether it has in the end."""
    then = ((run, clean(run.first(run.num_seen(progress)))) for run in finished)
    ends = [clean(run) for run, early in then if early is not None and not early.has_diverged]
    return [end is None or end.has_diverged for end in ends]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Answer):
    """The figures that a decision to stop the run now rests on.

    Attributes:
        best_finished: Best value at the end among the finished runs of the job, or None without any.
        probability_beats_best: Probability that this run ends better, or None.
        divergence: Chance that it diverges in what is left.
        expected_gain: Expected part of its end that is better than the best finished run, or than its own best
            without any, in units of the metric.
        saved_epochs: Epochs, or steps, that stopping now saves.
        saved_s: Their time on the first clock [s], or None without one.
        saved_usd: Their price there, or None.
    """

    best_finished: float | None
    probability_beats_best: float | None
    divergence: Divergence
    expected_gain: float
    saved_epochs: float
    saved_s: Interval | None
    saved_usd: Interval | None


def decision_of(forecast: CurveForecast, siblings: Sequence[Curve], clock: Clock | None) -> Decision:
    """The decision on a run.

    Args:
        forecast: Of the run.
        siblings: Finished runs of its job, as logged.
        clock: Time and price of an epoch, or None.
    """
    curve = forecast.curve
    finished = finished_of(siblings)
    better = max if curve.is_rising else min
    best = better((final_error(run.values) for run in finished), default=None)
    left = max(0.0, forecast.end_epoch - float(curve.epochs[-1]))
    saved_s = None if clock is None else clock.epoch_time_s.scaled(left)
    price = None if clock is None else clock.price_usd_per_hour
    return Decision(
        best_finished=best,
        probability_beats_best=chance_to_win(curve, finished, forecast.progress),
        divergence=chance_to_diverge(diverged_later(siblings, forecast.progress), forecast.progress),
        expected_gain=forecast.expected_gain_over(curve.best if best is None else best),
        saved_epochs=left,
        saved_s=saved_s,
        saved_usd=None if saved_s is None or price is None else saved_s.scaled(price / 3600),
    )


_RANK_90 = 1.2816 / 1.6449
"""Distance of the 90 % rank from the middle over that of the 95 % rank, where a 90 % interval ends; normal."""

_RANKS = ("p10", "p50", "p90")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Time and price of an epoch on a device.

    Attributes:
        device: Name of the device, or of the log.
        source: "predicted" or "logged".
        epoch_time_s: Time of an epoch [s].
        price_usd_per_hour: Price of the whole system, or None.
    """

    device: str
    source: str
    epoch_time_s: Interval
    price_usd_per_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeToTarget(Answer):
    """Time and money until a target, at probabilities 0.1, 0.5 and 0.9; infinite if not by the end.

    Attributes:
        clock: The clock it goes by.
        total_s: From the start of training [s].
        left_s: From now [s].
        cost_usd: Price of the whole, or None.
        end_s: Time of the whole run [s].
    """

    clock: Clock
    total_s: tuple[float, float, float]
    left_s: tuple[float, float, float]
    cost_usd: tuple[float, float, float] | None
    end_s: Interval

    def json_fields(self) -> dict[str, Any]:
        """The clock and the times; None where the target is not reached with that probability."""
        return {
            "device": self.clock.device,
            "source": self.clock.source,
            "epoch_time_s": self.clock.epoch_time_s,
            "time_to_target_s": ranked(self.total_s),
            "time_left_s": ranked(self.left_s),
            "cost_to_target_usd": None if self.cost_usd is None else ranked(self.cost_usd),
            "time_to_end_s": self.end_s,
        }


def time_to_target(forecast: CurveForecast, clock: Clock) -> TimeToTarget:
    """Time and money until the target on one clock.

    Epochs and time of an epoch are independent: away from the middle their logarithmic distances add in squares.

        t_q = e_50 t exp(+-sqrt(log(e_q / e_50)^2 + (0.78 log(t_end / t))^2))

    Where the target is not reached with a probability of one half, the likely time of an epoch is taken throughout.
    """
    now = float(forecast.curve.epochs[-1])
    epochs = forecast.epochs_to_target
    total = _times(epochs, clock.epoch_time_s)
    left = _times(tuple(max(0.0, e - now) for e in epochs), clock.epoch_time_s)
    price = clock.price_usd_per_hour
    return TimeToTarget(
        clock=clock,
        total_s=total,
        left_s=left,
        cost_usd=None if price is None else (*(t / 3600 * price for t in total),),  # type: ignore[arg-type]
        end_s=clock.epoch_time_s.scaled(forecast.end_epoch),
    )


def _times(epochs: tuple[float, ...], epoch_s: Interval) -> tuple[float, float, float]:
    p10, p50, p90 = epochs
    if not math.isfinite(p50) or p50 <= 0:
        return p10 * epoch_s.value, p50 * epoch_s.value, p90 * epoch_s.value
    # Errors of the epochs and of the time of one are independent, so their logarithms add as squares.
    below = math.hypot(_log(p50, max(p10, 1e-9 * p50)), _RANK_90 * _log(epoch_s.value, epoch_s.low))
    middle = p50 * epoch_s.value
    if not math.isfinite(p90):
        return middle * math.exp(-below), middle, math.inf
    above = math.hypot(_log(p90, p50), _RANK_90 * _log(epoch_s.high, epoch_s.value))
    return middle * math.exp(-below), middle, middle * math.exp(above)


def _log(larger: float, smaller: float) -> float:
    return math.log(larger / smaller) if smaller > 0 else 0.0


def ranked(values: Sequence[float]) -> dict[str, float]:
    """Values at probabilities 0.1, 0.5 and 0.9 by the names of these ranks."""
    return dict(zip(_RANKS, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Answer):
    """Outcome of a run that was forecast from its beginning.

    Attributes:
        epochs, values: The points that came, (m,) each.
        final_value: Mean over the last 5 % of the run.
        is_inside_90: Whether it lies in the 90 % interval.
        reached_epoch: First epoch at which the target was reached, or None.
    """

    epochs: Floats
    values: Floats
    final_value: float
    is_inside_90: bool
    reached_epoch: float | None

    def json_fields(self) -> dict[str, Any]:
        """The fields; the points that came as rows."""
        names = ("final_value", "is_inside_90", "reached_epoch")
        return {
            **{name: getattr(self, name) for name in names},
            "points": _rows(epoch=self.epochs, value=self.values),
        }


def outcome_of(whole: Curve, forecast: CurveForecast) -> RunOutcome:
    """Outcome of a run, beside a forecast from its first points.

    Args:
        whole: The finished run, all numbers.
        forecast: From its beginning.
    """
    final = final_error(whole.values)
    later = whole.epochs > forecast.curve.epochs[-1]
    return RunOutcome(
        epochs=whole.epochs[later],
        values=whole.values[later],
        final_value=final,
        is_inside_90=forecast.final.low_90 <= final <= forecast.final.high_90,
        reached_epoch=whole.reached(forecast.target),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecast(Answer):
    """Answer of ``forerun.forecast``.

    Attributes:
        run: Name of the file.
        curve_forecast: The forecast.
        times: Time and money to the target, one entry per clock.
        steps_per_epoch: Steps of an epoch, or None.
        advice: Whether to go on.
        decision: What stopping now saves, and gives up.
        coverage: Empirical coverage of 90 % intervals of this tier, jobs left out in turn, or None.
        notes: What a reader must know.
        outcome: What came, if the run was forecast from its beginning only.
    """

    run: str
    curve_forecast: CurveForecast
    times: tuple[TimeToTarget, ...]
    steps_per_epoch: float | None
    advice: Advice
    decision: Decision
    coverage: float | None
    notes: tuple[str, ...]
    outcome: RunOutcome | None = None

    @property
    def probability_of_target(self) -> float | None:
        """Probability of reaching the target by the end of the run."""
        return None if self.curve_forecast.target is None else self.curve_forecast.probability_at_end

    @property
    def final_value(self) -> Interval:
        """The value at the end with its 90 % interval."""
        final = self.curve_forecast.final
        return Interval(final.value, final.low_90, final.high_90)

    def json_fields(self) -> dict[str, Any]:
        """The forecast; None for what is not reached, not asked for or not known."""
        found = self.curve_forecast
        bounds = {name: getattr(found, name) for name in ("low_90", "low_80", "high_80", "high_90")}
        reached = [None] * len(found.epochs) if found.target is None else found.probability
        final, advice = fields_of(found.final), fields_of(self.advice)
        ends = {"value": final.pop("value"), "low": final.pop("low_90"), "high": final.pop("high_90")}
        return {
            "run": self.run,
            "metric": found.curve.metric,
            "unit": found.curve.unit,
            "num_points": len(found.curve),
            "last_epoch": found.curve.epochs[-1],
            "end_epoch": found.end_epoch,
            "progress": found.progress,
            "final_value": {**ends, **final},
            **self._target_fields(),
            "advice": {"stop": advice.pop("should_stop"), **advice},
            "decision": self.decision,
            "tier": found.tier,
            "forecasters": [
                {"name": name, "weight": weight, "final_value": found.finals[name]}
                for name, weight in found.weights.items()
            ],
            "calibration": {
                "is_calibrated": found.is_calibrated,
                "num_runs": found.num_runs,
                "coverage_90": self.coverage,
            },
            "points": _rows(epoch=found.epochs, value=found.values, **bounds, probability_of_target=reached),
            "outcome": self.outcome,
            "notes": self.notes,
        }

    def _target_fields(self) -> dict[str, Any]:
        found = self.curve_forecast
        if found.target is None:
            nothing = dict.fromkeys(("target", "probability_of_target", "epochs_to_target"))
            return {**nothing, "on": self.times}
        steps = self.steps_per_epoch
        first = self.times[0].json_fields() if self.times else {}
        in_steps = None if steps is None else ranked([epoch * steps for epoch in found.epochs_to_target])
        return {
            "target": {"metric": found.target.metric, "value": found.target.value},
            "reached_epoch": found.reached_epoch,
            "probability_of_target": found.probability_at_end,
            "epochs_to_target": ranked(found.epochs_to_target),
            "steps_to_target": in_steps,
            "time_to_target_s": first.get("time_to_target_s"),
            "cost_to_target_usd": first.get("cost_to_target_usd"),
            "on": self.times,
        }


def _rows(**columns: Iterable[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
