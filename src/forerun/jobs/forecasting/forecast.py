"""The forecast of a curve: its value at the end, the epoch at which a target is reached, and the certainty of both.

The mixture gives the most likely path m(e), back-tests give the quantiles Q_q of (actual - forecast) / scale at some
shares of the rest of the run. A future of rank q is the path m(e) + scale(e) Q_q(share of the rest). A target is
reached by the first single evaluation at or beyond it; a run wanders between ranks on its way, and evaluations spread
around it (``target_times``). This gives the probability of having reached it by each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from forerun.base.answers import fields_of
from forerun.base.errors import ForecastError, InvalidSetupError
from forerun.jobs.forecasting.backtest_table import (
    FEWEST_RUNS,
    RANKS,
    BacktestTable,
    TargetTimes,
    between_rows,
    futures_of,
    reached_at,
    stored_quantiles,
    target_times,
)
from forerun.jobs.forecasting.curve import (
    FINAL_SHARE,
    CleanCurve,
    Curve,
    ErrorScale,
    Floats,
    Target,
    clean,
    does_not_move,
    error_scale,
    is_not_learning,
    is_share_metric,
)
from forerun.jobs.forecasting.forecaster import MOST_SIBLINGS, Prefix, Tier, tiers_of
from forerun.jobs.forecasting.prior import Mixture, mixture, shipped_prior
from forerun.jobs.forecasting.schedule import LearningRateSchedule

FEWEST_POINTS = 4
_MOST_POINTS = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """A value with its 80 and 90 % intervals."""

    value: float
    low_80: float
    high_80: float
    low_90: float
    high_90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveForecast(TargetTimes):
    """Forecast of a curve, in units of its metric and its epochs, with the times at which a target is reached.

    Attributes:
        curve: The cleaned curve.
        epochs: Points to come, (m,); empty if the run is at its end.
        values: Forecast at each, (m,).
        low_90, low_80, high_80, high_90: Ends of the intervals, (m,) each.
        final: The value at the end, a mean over the last 5 % of the run.
        equally_likely_finals: The same of each of ``RANKS``, ascending, (ranks,).
        end_epoch: End of the run.
        progress: Share of it that is done.
        tier: What the forecast rests on beside the curve.
        weights: Weight of each forecaster.
        finals: Value at the end by each of them.
        num_runs: Runs behind the interval.
        target: What is to be reached, or None.
        reached_epoch: First epoch at which it was reached already, or None.
        notes: Facts that a reader must know.
    """

    curve: Curve
    epochs: Floats
    values: Floats
    low_90: Floats
    low_80: Floats
    high_80: Floats
    high_90: Floats
    final: Band
    equally_likely_finals: Floats
    end_epoch: float
    progress: float
    tier: Tier
    weights: dict[str, float]
    finals: dict[str, float]
    num_runs: int
    target: Target | None
    reached_epoch: float | None
    notes: tuple[str, ...]

    @property
    def is_calibrated(self) -> bool:
        """True if the interval rests on enough runs."""
        return self.num_runs >= FEWEST_RUNS

    def probability_final_beats(self, value: float) -> float:
        """Probability that the value at the end is better than some value; neither certain nor impossible.

        The ranks end at 2.5 and 97.5 %.
        """
        is_better = self.equally_likely_finals > value
        return 0.025 + 0.95 * float(np.mean(is_better if self.curve.is_rising else ~is_better))

    def expected_gain_over(self, value: float) -> float:
        """Expected part of the value at the end that is better than some value, in units of the metric."""
        sign = 1.0 if self.curve.is_rising else -1.0
        return float(np.mean(np.maximum(sign * (self.equally_likely_finals - value), 0.0)))

    @property
    def probability_at_end(self) -> float:
        """Probability of having reached the target at the end of the run."""
        if self.reached_epoch is not None:
            return 1.0
        return float(self.probability[-1]) if len(self.probability) else 0.0


def forecast_curve(
    curve: Curve,
    table: BacktestTable,
    *,
    target: Target | None = None,
    end_epoch: float | None = None,
    schedule: LearningRateSchedule | None = None,
    siblings: Sequence[Curve] = (),
) -> CurveForecast:
    """Forecasts the rest of a curve.

    Args:
        curve: The run so far.
        table: Quantiles of back-tests.
        target: A value to reach.
        end_epoch: Length of the run; that of the schedule, else that the log names, else of the longest sibling, else
            twice what was seen.
        schedule: The learning rate from first to last epoch; one that follows the metric is not known.
        siblings: Finished runs of the same job.

    Raises:
        ForecastError: Fewer than four points, or a run that diverged or does not move.
        InvalidSetupError: The end lies behind the curve.
    """
    cleaned = _usable(curve)
    seen = cleaned.curve
    if target is not None and target.is_percent and seen.is_rising and np.max(np.abs(seen.values)) > 1:
        target = replace(target, value=100 * target.value)
    scale = _scale(seen, target)
    if target is not None and target.is_rising != seen.is_rising:
        raise InvalidSetupError(
            f"the target '{target}' and the curve of {seen.metric} disagree about whether larger is better"
        )
    reached = seen.reached(target)
    finished = finished_of(siblings)
    end, end_note = _end(seen, end_epoch, schedule, finished)
    follows_metric = schedule is not None and schedule.follows_metric
    if reached is None:
        _refuse(seen, scale)
    # A rate that waits for the metric to stall is not known beforehand: the schedule says only that it may fall.
    planned = None if follows_metric else schedule
    epochs = np.concatenate([seen.epochs, _points_to_come(seen.epochs, end)])
    prefix = _prefix(seen, scale, epochs, planned, finished)
    tier = tiers_of(prefix)[0]
    mix = mixture(prefix, tier, shipped_prior())
    notes = [*curve.notes, *cleaned.notes, *([end_note] if end_note else [])]
    notes += [*_notes(tier, table, prefix, follows_metric), *(schedule.notes if schedule else ())]
    return _answer(seen, scale, prefix, tier, mix, table, target, reached, notes)


def finished_of(siblings: Sequence[Curve]) -> list[Curve]:
    """Runs with numbers to their end: one that was lost in NaN says neither where nor when it would have ended."""
    found = [c for c in map(clean, siblings) if c is not None]
    return [c.curve for c in found if not (c.has_diverged and c.num_missing)]


def _usable(curve: Curve) -> CleanCurve:
    cleaned = clean(curve)
    if cleaned is None:
        raise ForecastError(f"{curve.name}: every value is NaN; the run has nothing to forecast from")
    if cleaned.has_diverged:
        raise ForecastError(
            f"{curve.name}: the run has diverged: {curve.metric} ends at {curve.values[-1]:g} after a best of "
            f"{cleaned.curve.best:g}; lower the learning rate or go back to a checkpoint"
        )
    if len(cleaned.curve) < FEWEST_POINTS:
        raise ForecastError(
            f"{curve.name}: a forecast needs at least {FEWEST_POINTS} points of {curve.metric}, got "
            f"{len(cleaned.curve)}; let the run go on, or evaluate more often"
        )
    return cleaned


def _scale(curve: Curve, target: Target | None) -> ErrorScale:
    """The scale of the curve; refuses a target that no run can reach on it."""
    if target is None or target.is_rising != curve.is_rising or not curve.is_rising:
        if target is not None and not target.is_rising and not curve.is_rising and target.value < 0:
            raise InvalidSetupError(
                f"the target '{target}' cannot be reached: {curve.metric} is never below 0; give a value above it"
            )
        return error_scale(curve.values, curve.is_rising, curve.kind)
    if not is_share_metric(curve.metric):  # a score without a known top: the scale must hold the target
        return error_scale(np.append(curve.values, target.value), True)
    scale = error_scale(curve.values, True)
    if target.value > scale.span:
        raise InvalidSetupError(
            f"the target '{target}' cannot be reached: {curve.metric} is at most {scale.span:g} in this run"
            + (f"; for {target.value:g} per cent write {target.value / 100:g}" if target.value <= 100 else "")
        )
    if scale.span > 1 and 0 < target.value <= 1:
        raise InvalidSetupError(
            f"the target '{target}' is a share, and {curve.metric} of this run is in per cent; write "
            f"{100 * target.value:g}"
        )
    return scale


def _refuse(curve: Curve, scale: ErrorScale) -> None:
    errors = scale.errors(curve.values)
    if does_not_move(errors):
        raise ForecastError(
            f"{curve.name}: {curve.metric} does not move: all {len(curve)} values are {curve.values[0]:g}; check "
            "that the run learns before asking where it ends"
        )
    if is_not_learning(errors):
        raise ForecastError(
            f"{curve.name}: {curve.metric} has not improved since its first point ({curve.values[0]:g} at first, "
            f"{curve.values[-1]:g} now, and half of the points since are no better); there is no trend to forecast"
        )


def _end(
    curve: Curve, end_epoch: float | None, schedule: LearningRateSchedule | None, siblings: Sequence[Curve]
) -> tuple[float, str]:
    last = float(curve.epochs[-1])
    planned = None if curve.planned_end is None else max(curve.planned_end, last)
    # What the user says counts before the schedule, and that before the log: a run may be stopped early.
    given = (end_epoch, schedule.num_epochs if schedule else None, planned)
    fixed = next((end for end in given if end is not None), None)
    if fixed is not None:
        if not math.isfinite(fixed) or fixed < last * (1 - 1e-9):
            raise InvalidSetupError(
                f"{curve.name}: the run is to end at {curve.unit} {fixed:g} and the curve goes to {last:g}; give its "
                "whole length with --epochs"
            )
        return max(fixed, last), ""
    if siblings:
        return max(last, max(float(s.epochs[-1]) for s in siblings)), ""
    return 2 * last, (
        f"the length of the run was not given: taken as {2 * last:g} {curve.unit}s, twice what was seen (--epochs)"
    )


def _points_to_come(seen: Floats, end: float) -> Floats:
    # A log of single steps would otherwise ask for millions of points.
    spacing = max(float(np.median(np.diff(seen))), (end - float(seen[-1])) / _MOST_POINTS)
    num = math.floor((end - float(seen[-1])) / spacing + 1e-6)
    points = float(seen[-1]) + spacing * np.arange(1, num + 1)
    if end - float(points[-1] if num else seen[-1]) > 1e-6 * spacing:
        points = np.append(points, end)
    return np.asarray(points, dtype=float)


def _prefix(
    curve: Curve,
    scale: ErrorScale,
    epochs: Floats,
    schedule: LearningRateSchedule | None,
    siblings: Sequence[Curve],
) -> Prefix:
    share, found = epochs / epochs[-1], []
    for sibling in siblings[:MOST_SIBLINGS]:
        if sibling.is_rising != curve.is_rising:
            raise InvalidSetupError(
                f"{sibling.name}: its metric falls where that of {curve.name} rises, or the reverse"
            )
        found.append(np.interp(share, sibling.epochs / sibling.epochs[-1], scale.errors(sibling.values)))
    return Prefix(
        epochs=epochs,
        errors=np.maximum(scale.errors(curve.values), 1e-9),
        rates=None if schedule is None else schedule.rates(epochs),
        siblings=np.asarray(found) if found else None,
        kind=curve.kind,
        span=scale.span,
        training_losses=curve.training_losses,
    )


def _notes(tier: Tier, table: BacktestTable, prefix: Prefix, follows_metric: bool) -> list[str]:
    notes = []
    num_runs = table.num_runs(tier, prefix.progress)
    if num_runs < FEWEST_RUNS:
        notes.append(f"uncalibrated: the interval rests on {num_runs} back-tests, {FEWEST_RUNS} are needed")
    if follows_metric:
        notes.append(
            "a rate that is reduced when the metric stalls is not known beforehand: the interval is that of runs whose "
            "schedule was not known"
        )
    elif tier is Tier.HISTORY and prefix.rates is not None:
        notes.append(
            "finished runs show the drops of their rate: beside them only the length of a schedule counts"
        )
    elif tier is Tier.CURVE:
        notes.append(
            "the schedule of the learning rate is not known (--schedule): the interval is that of runs whose schedule "
            "was not known either"
        )
    if prefix.num_seen < len(prefix.epochs) and prefix.progress < 0.1:
        notes.append("less than a tenth of the run is done: errors are those of a tenth, or larger")
    return notes


def _answer(
    curve: Curve,
    scale: ErrorScale,
    prefix: Prefix,
    tier: Tier,
    mix: Mixture,
    table: BacktestTable,
    target: Target | None,
    reached: float | None,
    notes: list[str],
) -> CurveForecast:
    seen = prefix.num_seen
    to_come = prefix.epochs[seen:]
    stored = stored_quantiles(tier, table, prefix.progress)
    futures = futures_of(mix, prefix, stored, table.kept(tier, prefix))
    if is_share_metric(curve.metric):  # below 0 only where it has been there, as r2 may
        futures = np.minimum(futures, max(1.0, float(prefix.errors.max())))
    order = slice(None, None, -1) if curve.is_rising else slice(None)
    ranked = scale.values(futures)[order]  # ascending in the metric

    levels = (0.05, 0.1, 0.9, 0.95)
    rows = between_rows(ranked, np.interp(levels, RANKS, np.arange(len(RANKS))))
    ends = dict(zip(levels, rows, strict=True))
    values = scale.values(mix.errors[seen:])
    width = max(1, round(FINAL_SHARE * len(prefix.epochs)))
    times = reached_at(math.inf if reached is None else reached, len(to_come))
    if target is not None and reached is None:
        times = target_times(
            futures, to_come, float(scale.errors(target.value)), float(curve.epochs[-1]), prefix.noise
        )
    finals = np.full(len(RANKS), float(np.mean(curve.values[-width:])))
    of_members = dict.fromkeys(mix.members, float(curve.values[-1]))
    if len(to_come):
        finals = np.sort(ranked[:, -width:].mean(axis=1))
        paths = {name: scale.values(path)[seen:] for name, path in mix.members.items()}
        of_members = {name: float(np.mean(path[-width:])) for name, path in paths.items()}
    return CurveForecast(
        curve=curve,
        epochs=to_come,
        values=values,
        low_90=np.minimum(ends[0.05], values),
        low_80=np.minimum(ends[0.1], values),
        high_80=np.maximum(ends[0.9], values),
        high_90=np.maximum(ends[0.95], values),
        final=_final(values, ends, width, curve),
        equally_likely_finals=finals,
        end_epoch=float(prefix.epochs[-1]),
        progress=prefix.progress,
        tier=tier,
        weights=dict(mix.weights),
        finals=of_members,
        num_runs=table.num_runs(tier, prefix.progress),
        target=target,
        reached_epoch=reached,
        notes=tuple(notes),
        **fields_of(times),
    )


def _final(values: Floats, ends: dict[float, Floats], width: int, curve: Curve) -> Band:
    value = float(np.mean((values if len(values) else curve.values)[-width:]))

    def end(level: float) -> float:
        found = float(np.mean(ends[level][-width:])) if len(values) else value
        return min(found, value) if level < 0.5 else max(found, value)

    return Band(value=value, low_80=end(0.1), high_80=end(0.9), low_90=end(0.05), high_90=end(0.95))
