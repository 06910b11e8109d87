"""``forerun forecast run`` and ``trade-off``: one run on the devices it might go on, and several configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field

from forerun.base.answers import Answer, fields_of
from forerun.base.errors import InvalidSetupError
from forerun.base.tables import read_rows
from forerun.jobs.forecasting.backtest_table import BacktestTable, load_table, shipped_table
from forerun.jobs.forecasting.curve import Curve, Target, clean, parse_target
from forerun.jobs.forecasting.curve_files import curve_of_columns, find_curve_files, read_curve
from forerun.jobs.forecasting.forecast import forecast_curve
from forerun.jobs.forecasting.forecast_answer import (
    Clock,
    RunForecast,
    decision_of,
    outcome_of,
    ranked,
    stop_advice,
    time_to_target,
)
from forerun.jobs.forecasting.forecaster import Tier
from forerun.jobs.forecasting.next_trial import NextTrial, next_trial
from forerun.jobs.forecasting.schedule import (
    LOGGED,
    LearningRateSchedule,
    followed_schedule,
    is_logged,
    logged_schedule,
    rate_column,
    schedule_from,
)
from forerun.prediction.estimate import Estimate, Interval
from forerun.question.settings import flags

Columns = Mapping[str, Sequence[float | None]]
"""Columns of a log by name, None where a row has no value."""


def forecast(
    run: str | Path | Curve | Columns | Sequence[float],
    *,
    target: str | Target | None = None,
    metric: str | None = None,
    schedule: Any = None,
    epochs: float | None = None,
    history: str | Path | Sequence[str | Path | Curve | Columns | Sequence[float]] = (),
    model: Any = None,
    devices: Sequence[str] = (),
    price_usd_per_hour: float | None = None,
    backtest_file: str | Path | None = None,
    cut: float | None = None,
    **setup: Any,
) -> RunForecast:
    """The end of a run, the time at which it reaches a target, and the devices and money that this takes.

    Args:
        run: A CSV, TensorBoard events, a curve, columns such as those of a CSV, or its values, one an epoch.
        target: Such as ``accuracy>=0.92``.
        metric: Name of the metric; that of the target, or a guess from the file.
        schedule: Words, a PyTorch scheduler, a Keras schedule or a function; "logged" takes the rates in the file, and
            "logged:COLUMN" those of that column; None those that follow a line or a cosine, "unknown" none.
        epochs: Length of the run; that of the schedule, or of its finished siblings, if None.
        history: Folder of finished runs of the same job, or these, each as ``run``.
        model: What is trained, as in ``predict``; with ``devices`` its epochs are timed by prediction.
        devices: Where it might be trained.
        price_usd_per_hour: Price of a device.
        backtest_file: Figures of back-tests instead of the shipped ones, made by ``backtest``.
        cut: Share of a finished run, above 0 and below 1, after which to forecast it; the answer then has what came.
        setup: Further arguments of ``predict``, such as ``batch_size`` and ``dataset``.

    Raises:
        RecordError: A file cannot be read.
        InvalidSetupError: An unknown metric, schedule word or target.
        ForecastError: The curve is too short, diverged, or does not move.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    whole = _curve(run, wanted, metric, rate_column(schedule), 1.0 if cut is None else _share(cut))
    curve = whole if cut is None else whole.first(whole.num_seen(cut))
    # A finished run that is cut ends where it really ended.
    epochs = float(whole.epochs[-1]) if cut is not None and epochs is None else epochs
    planned = _logged(curve, epochs) if is_logged(schedule) else schedule_from(schedule, epochs)
    if schedule is None and curve.learning_rates is not None:
        planned = followed_schedule(curve.epochs, curve.learning_rates, epochs or curve.planned_end)
    table = shipped_table() if backtest_file is None else load_table(Path(backtest_file))
    siblings = _siblings(history, run, curve, wanted)
    found = forecast_curve(
        curve,
        table,
        target=wanted,
        end_epoch=epochs,
        schedule=planned,
        siblings=siblings,
    )
    clocks = list(_clocks(found.curve, model, devices, price_usd_per_hour, setup))
    epoch_time_s = clocks[0].epoch_time_s.value if clocks else None
    came = None if cut is None else clean(whole)
    return RunForecast(
        run=curve.name,
        curve_forecast=found,
        times=tuple(time_to_target(found, clock) for clock in clocks),
        steps_per_epoch=found.curve.steps_per_epoch(),
        advice=stop_advice(found, epoch_time_s),
        decision=decision_of(found, siblings, clocks[0] if clocks else None),
        coverage=_coverage(table, found.tier, found.progress),
        notes=found.notes,
        outcome=None if came is None else outcome_of(came.curve, found),
    )


def _logged(curve: Curve, epochs: float | None) -> LearningRateSchedule:
    end = epochs if epochs is not None else curve.planned_end
    if curve.learning_rates is None or end is None:
        raise InvalidSetupError(
            f"{curve.name}: --schedule {LOGGED} needs a column of learning rates and the length of the run, got "
            + ("no length; give --epochs" if end is None else "no such column; name it with logged:COLUMN")
        )
    return logged_schedule(curve.epochs, curve.learning_rates, max(end, float(curve.epochs[-1])))


def _share(cut: float) -> float:
    if not 0 < cut < 1:
        raise InvalidSetupError(f"a cut is a share of the run between 0 and 1, such as 0.3, got {cut:g}")
    return cut


def _curve(run: Any, target: Target | None, metric: str | None, rate: str | None, seen: float) -> Curve:
    if isinstance(run, Curve):
        return run
    name = metric or (target.metric if target else None)
    rising = target.is_rising if target else None
    if isinstance(run, (str, Path)):
        return read_curve(run, name, rising, rate, seen=seen)
    if isinstance(run, Mapping):
        columns = {key: np.asarray(values, dtype=float) for key, values in run.items()}
        if len({len(column) for column in columns.values()}) != 1:
            lengths = ", ".join(f"{key} {len(column)}" for key, column in columns.items())
            raise InvalidSetupError(
                f"expected columns of one length, got {lengths or 'none'}; write None in gaps"
            )
        return curve_of_columns(columns, "run", name, rising, rate, seen=seen)
    values = np.asarray(run, dtype=float)
    if values.ndim != 1 or not len(values):
        raise InvalidSetupError(
            f"a run must be a file, a curve or a list of values, got shape {values.shape}"
        )
    is_rising = rising if rising is not None else bool(values[-1] > values[0])
    epochs = np.arange(1.0, len(values) + 1)
    return Curve(name="run", metric=name or "value", epochs=epochs, values=values, is_rising=is_rising)


def _siblings(history: Any, run: Any, curve: Curve, target: Target | None) -> list[Curve]:
    """Finished runs; the run itself is not its own history, wherever its file lies."""
    is_place = isinstance(history, (str, Path))
    given: list[Any] = list(find_curve_files(history)) if is_place else list(history)
    own = Path(run).resolve() if isinstance(run, (str, Path)) else None
    given = [g for g in given if not isinstance(g, (str, Path)) or Path(g).resolve() != own]
    name = target.metric if target else curve.metric
    wanted = Target(metric=name, value=0.0, is_rising=curve.is_rising)
    return [_curve(sibling, wanted, None, None, 1.0) for sibling in given]


def _clocks(
    curve: Curve, model: Any, devices: Sequence[str], price: float | None, setup: Mapping[str, Any]
) -> Iterator[Clock]:
    if (model is None) != (not devices):
        raise InvalidSetupError("times on a device need both the model and the device; give --model and --on")
    if model is None and (given := [name for name, value in setup.items() if value is not None]):
        raise InvalidSetupError(
            f"{flags(given)}: expected a model that these time, got none; leave them out, or give --model and --on"
        )
    for device in devices:
        yield predicted_clock(model, device, price, setup)
    logged_s = curve.epoch_time_s()
    if logged_s is not None and logged_s > 0:
        time_s = Interval(logged_s, logged_s, logged_s)
        yield Clock(device="as logged", source="logged", epoch_time_s=time_s, price_usd_per_hour=price)


def predicted_clock(model: Any, device: str, price: float | None, setup: Mapping[str, Any]) -> Clock:
    """The clock of a device by ``predict``; the dataset must be named."""
    from forerun.search.predict import predict

    estimate = predict(model, device=device, price_usd_per_hour=price, **setup)
    if estimate.epoch_time_s is None:
        raise InvalidSetupError(
            f"the time of an epoch of {estimate.model} needs its dataset; give --dataset NAME or --dataset-size N"
        )
    time_s, per_hour = estimate.epoch_time_s, hourly_price_usd(estimate)
    return Clock(device=estimate.device, source="predicted", epoch_time_s=time_s, price_usd_per_hour=per_hour)


def hourly_price_usd(estimate: Estimate) -> float | None:
    """Price of all devices of an epoch that was predicted [US dollars per hour]; None where none is known."""
    cost, epoch_s = estimate.cost_usd, estimate.epoch_time_s
    return None if cost is None or epoch_s is None else cost.value / epoch_s.value * 3600


def _coverage(table: BacktestTable, tier: Tier, progress: float) -> float | None:
    """Empirical coverage that was stored with the table, at the nearest share of the run."""
    stored = table.provenance.get("coverage_90")
    of_tier = stored.get(str(tier)) if isinstance(stored, Mapping) else None
    if not isinstance(of_tier, Mapping) or not of_tier:
        return None
    nearest = min(of_tier, key=lambda cut: abs(float(cut) - progress))
    return float(of_tier[nearest])


def forecast_next(
    folder: str | Path,
    *,
    metric: str | None = None,
    epochs: float | None = None,
    waiting: int = 0,
    budget: float | None = None,
) -> NextTrial:
    """The trial of a search that should run next, by the logs of all trials so far; trials are named by their files.

    Args:
        folder: Logs of the trials, whole, paused or running.
        metric: Name of the metric; a guess from the first file if None.
        epochs: Length of a whole trial, in steps where the files know steps only; that which each log names if None.
        waiting: Trials that wait to begin.
        budget: Work that is left, in whole trials, or None.

    Raises:
        RecordError: A file cannot be read.
        InvalidSetupError: No length of a trial, one that is shorter than its log, or an impossible number.
    """
    if waiting < 0 or (budget is not None and not budget > 0):
        raise InvalidSetupError(
            f"expected 0 or more waiting trials and a budget above 0 whole trials, got {waiting} and {budget}"
        )
    trials: list[Curve] = []
    for file in find_curve_files(folder):
        rising = trials[0].is_rising if trials else None
        curve = read_curve(file, metric or (trials[0].metric if trials else None), rising)
        trials.append(replace(curve, name=file.relative_to(folder).as_posix()))
    ends = [epochs if epochs is not None else trial.planned_end for trial in trials]
    for trial, end in zip(trials, ends, strict=True):
        if end is None or end < trial.epochs[-1] * (1 - 1e-9):
            raise InvalidSetupError(
                f"{trial.name}: expected the length of a whole trial, {trial.epochs[-1]:g} {trial.unit}s or more, got "
                + ("none; give --epochs" if end is None else f"{end:g}; correct --epochs")
            )
    return next_trial(trials, [float(end) for end in ends if end is not None], num_new=waiting, budget=budget)


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


def _on_front(points: Sequence[TradeOffPoint]) -> tuple[bool, ...]:
    """True for each point that is beaten by no other in both end time and final value, (points,)."""
    from forerun.search.choice import pareto_front

    values = [point.final_value.value * (-1 if point.is_rising else 1) for point in points]
    times = [point.end_time_s.value for point in points]
    costs = np.stack([times, values], axis=1)
    # The front of a search has one of equal points; here each is a configuration of its own.
    front = {tuple(row) for row in costs[pareto_front(costs)].tolist()}
    return tuple(tuple(row) in front for row in costs.tolist())


_Text = Annotated[str, Field(min_length=1, description="a name")]
_Above = Annotated[float, Field(gt=0, allow_inf_nan=False, description="a number above zero")]


class _Configuration(BaseModel):
    """A row of the table; ``run`` is a curve, by its path from the table."""

    name: _Text
    run: _Text
    model: _Text
    device: _Text
    batch_size: Annotated[int, Field(ge=1, description="a whole number above zero")] | None = None
    precision: str | None = None
    optimizer: str | None = None
    dataset: str | None = None
    epochs: _Above | None = None
    schedule: str | None = None
    price: _Above | None = None

    def setup(self) -> dict[str, Any]:
        """The settings that were given, for the prediction."""
        return self.model_dump(include={"batch_size", "precision", "optimizer", "dataset"}, exclude_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff(Answer):
    """Comparison of configurations.

    Attributes:
        target: The target, or None.
        metric: The metric that was asked for, or that of the target; None for one that each file has of its own.
        points: The configurations.
        is_on_front: Whether each point is on the Pareto front of time against the final value.
    """

    target: Target | None
    metric: str | None
    points: tuple[TradeOffPoint, ...]
    is_on_front: tuple[bool, ...]

    def json_fields(self) -> dict[str, Any]:
        """The target in words, and the configurations."""
        rows = []
        for point, is_on_front in zip(self.points, self.is_on_front, strict=True):
            row = {**fields_of(point), "time_to_target_s": ranked(point.time_to_target_s)}
            del row["is_rising"]
            rows.append({**row, "is_on_pareto_front": is_on_front})
        return {"target": None if self.target is None else str(self.target), "configurations": rows}


def trade_off(
    table: str | Path, *, target: str | Target | None = None, metric: str | None = None
) -> TradeOff:
    """Predicted time of an epoch times forecast epochs for each configuration of a table.

    Args:
        table: A CSV with the columns name, run (a curve, by its path from the table), model and device, and
            optionally batch_size, precision, dataset, epochs, schedule, optimizer and price.
        target: Target to reach, such as ``accuracy>=0.92``.
        metric: Name of the metric without a target.

    Raises:
        RecordError: The table cannot be read or lacks columns.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    metric = metric or (wanted.metric if wanted is not None else None)
    rows = read_rows(Path(table), _Configuration)
    points = [_point(row, Path(table).parent, wanted, metric) for _, row in rows]
    return TradeOff(target=wanted, metric=metric, points=tuple(points), is_on_front=_on_front(points))


def _point(row: _Configuration, folder: Path, target: Target | None, metric: str | None) -> TradeOffPoint:
    answer = forecast(
        folder / row.run,
        target=target,
        metric=metric,
        schedule=row.schedule,
        epochs=row.epochs,
        model=row.model,
        devices=[row.device],
        price_usd_per_hour=row.price,
        **row.setup(),
    )
    time = answer.times[0]
    found = answer.curve_forecast
    per_hour = time.clock.price_usd_per_hour
    return TradeOffPoint(
        name=row.name,
        device=time.clock.device,
        epoch_time_s=time.clock.epoch_time_s,
        epochs_to_target=found.epochs_to_target[1],
        time_to_target_s=time.total_s,
        final_value=answer.final_value,
        end_time_s=time.end_s,
        cost_usd=None if per_hour is None else per_hour * time.end_s.value / 3600,
        is_rising=found.curve.is_rising,
    )
