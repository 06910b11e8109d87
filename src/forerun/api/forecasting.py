"""``forerun forecast`` as functions: of a run, of stored runs, and of configurations against each other."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.convergence.backtest import StoredRun, cut_results, mean_errors, summarise
from forerun.convergence.backtest_summary import Backtest, summary_of
from forerun.convergence.backtest_table import BacktestTable, load_table, save_table, shipped_table_path
from forerun.convergence.cleaning import clean
from forerun.convergence.curve import Curve, error_scale
from forerun.convergence.curve_files import find_curve_files, read_curve
from forerun.convergence.forecast import forecast_curve
from forerun.convergence.mixture import Tier
from forerun.convergence.schedule import Schedule, schedule_of
from forerun.convergence.stopping import stop_advice
from forerun.convergence.target import Target, parse_target
from forerun.errors import InvalidSetupError, RecordError, UsageError
from forerun.prediction.estimate import Interval
from forerun.prediction.forecast_answer import Clock, RunForecast, time_to_target
from forerun.prediction.trade_off import TradeOffPoint, pareto_front

__all__ = ["Backtest", "RunForecast", "TradeOff", "backtest", "forecast", "trade_off"]

_UNKNOWN = "unknown"
_COLUMNS = ("name", "run", "model", "device")
_OPTIONAL = ("batch_size", "precision", "dataset", "epochs", "schedule", "optimizer", "price")


def forecast(
    run: str | Path | Curve | Sequence[float],
    *,
    target: str | Target | None = None,
    metric: str | None = None,
    schedule: Any = None,
    epochs: float | None = None,
    history: str | Path | Sequence[str | Path | Curve] = (),
    model: Any = None,
    devices: Sequence[str] = (),
    price_usd_per_hour: float | None = None,
    backtest_file: str | Path | None = None,
    **setup: Any,
) -> RunForecast:
    """Where a run ends, when it reaches a target, and what that takes.

    Args:
        run: A CSV, TensorBoard events, a curve, or its values, one an epoch.
        target: Such as ``accuracy>=0.92``.
        metric: Name of the metric; that of the target, or a guess from the file.
        schedule: Words, a PyTorch scheduler, a Keras schedule or a function; "unknown" accepts a wider interval
            where the rate is known to change.
        epochs: Length of the run; that of the schedule, or of its finished siblings, if None.
        history: Folder or files of finished runs of the same job.
        model: What is trained, as in ``predict``; with ``devices`` its epochs are timed by prediction.
        devices: Where it might be trained.
        price_usd_per_hour: Price of a device.
        backtest_file: Figures of back-tests instead of the shipped ones, made by ``backtest``.
        setup: Further arguments of ``predict``, such as ``batch_size`` and ``dataset``.

    Raises:
        RecordError: A file cannot be read.
        InvalidSetupError: An unknown metric, schedule word or target.
        ForecastError: The curve is too short, diverged, does not move, or has a changing rate that is not given.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    curve = _curve(run, wanted, metric)
    planned = _schedule(schedule, epochs)
    table = load_table(Path(backtest_file) if backtest_file is not None else shipped_table_path())
    found = forecast_curve(
        curve,
        table,
        target=wanted,
        end_epoch=epochs,
        schedule=planned,
        is_schedule_unknown=schedule == _UNKNOWN,
        siblings=_siblings(history, curve, wanted),
    )
    clocks = list(_clocks(found.curve, model, devices, price_usd_per_hour, setup))
    epoch_time_s = clocks[0].epoch_time_s.value if clocks else None
    return RunForecast(
        run=curve.name,
        curve_forecast=found,
        times=tuple(time_to_target(found, clock) for clock in clocks),
        steps_per_epoch=found.curve.steps_per_epoch(),
        advice=stop_advice(found, epoch_time_s),
        coverage=_coverage(table, found.tier, found.progress),
        notes=found.notes,
    )


def _curve(run: Any, target: Target | None, metric: str | None) -> Curve:
    if isinstance(run, Curve):
        return run
    name = metric or (target.metric if target else None)
    rising = target.is_rising if target else None
    if isinstance(run, (str, Path)):
        return read_curve(run, name, rising)
    values = np.asarray(run, dtype=float)
    if values.ndim != 1 or not len(values):
        raise InvalidSetupError(
            f"a run must be a file, a curve or a list of values, got shape {values.shape}"
        )
    is_rising = rising if rising is not None else bool(values[-1] > values[0])
    return Curve(
        name="run",
        metric=name or "value",
        epochs=np.arange(1.0, len(values) + 1),
        values=values,
        is_rising=is_rising,
    )


def _schedule(schedule: Any, epochs: float | None) -> Schedule | None:
    if schedule is None or (isinstance(schedule, str) and schedule.strip() == _UNKNOWN):
        return None
    if not isinstance(schedule, (str, Schedule)) and epochs is None:
        raise InvalidSetupError(
            "a schedule that is an object needs epochs as well, to know how far to follow it"
        )
    return schedule_of(schedule, epochs or 1.0)


def _siblings(history: Any, curve: Curve, target: Target | None) -> list[Curve]:
    is_place = isinstance(history, (str, Path))
    given = find_curve_files(history) if is_place else list(history)
    metric = target.metric if target else curve.metric
    return [s if isinstance(s, Curve) else read_curve(s, metric, curve.is_rising) for s in given]


def _clocks(
    curve: Curve, model: Any, devices: Sequence[str], price: float | None, setup: Mapping[str, Any]
) -> Iterator[Clock]:
    if (model is None) != (not devices):
        raise InvalidSetupError("times on a device need both the model and the device; give --model and --on")
    for device in devices:
        yield predicted_clock(model, device, price, setup)
    logged_s = curve.epoch_time_s()
    if logged_s is not None and logged_s > 0:
        yield Clock(
            device="as logged",
            source="logged",
            epoch_time_s=Interval(logged_s, logged_s, logged_s),
            price_usd_per_hour=price,
        )


def predicted_clock(model: Any, device: str, price: float | None, setup: Mapping[str, Any]) -> Clock:
    """The clock of a device by ``predict``; the dataset must be named."""
    from forerun.api.prediction import predict

    estimate = predict(model, device=device, price_usd_per_hour=price, **setup)
    if estimate.epoch_time_s is None:
        raise InvalidSetupError(
            f"the time of an epoch of {estimate.model} needs its dataset; give --dataset NAME or --dataset-size N"
        )
    per_hour = price
    if per_hour is None and estimate.cost_usd is not None:
        per_hour = estimate.cost_usd.value / estimate.epoch_time_s.value * 3600
    return Clock(
        device=estimate.device,
        source="predicted",
        epoch_time_s=estimate.epoch_time_s,
        price_usd_per_hour=per_hour,
    )


def _coverage(table: BacktestTable, tier: Tier, progress: float) -> float | None:
    """Empirical coverage that was stored with the table, at the nearest share of the run."""
    stored = table.provenance.get("coverage_90")
    of_tier = stored.get(str(tier)) if isinstance(stored, Mapping) else None
    if not isinstance(of_tier, Mapping) or not of_tier:
        return None
    nearest = min(of_tier, key=lambda cut: abs(float(cut) - progress))
    return float(of_tier[nearest])


def backtest(
    folder: str | Path,
    *,
    metric: str | None = None,
    schedule: Any = None,
    save: str | Path | None = None,
) -> Backtest:
    """Tests all forecasters on the finished runs of a folder; files of one sub-folder are runs of one job.

    Args:
        folder: Where the runs are.
        metric: Name of the metric.
        schedule: The schedule of all runs, if known.
        save: File for the figures, to be used by ``forecast(..., backtest_file=...)``.

    Raises:
        RecordError: There are fewer than two runs that are long enough.
    """
    runs = _stored_runs(Path(folder), metric, _schedule(schedule, None))
    if len(runs) < 2:
        raise RecordError(f"a back-test needs two or more runs of nine points, got {len(runs)} in '{folder}'")
    results = cut_results(runs)
    found = summary_of(results)
    if save is not None:
        source = f"{len(runs)} runs of {Path(folder).name}"
        provenance = {"source": source, "coverage_90": found.rounded_coverage()}
        save_table(summarise(results, mean_errors(results), provenance), Path(save))
    return found


def _stored_runs(folder: Path, metric: str | None, schedule: Schedule | None) -> list[StoredRun]:
    found = []
    for path in find_curve_files(folder):
        cleaned = clean(read_curve(path, metric))
        if cleaned is None or len(cleaned.curve) < 9:
            continue
        curve = cleaned.curve
        scale = error_scale(curve.values, curve.is_rising)
        found.append(
            StoredRun(
                table=folder.name,
                job=path.parent.relative_to(folder).as_posix(),
                name=path.name,
                epochs=curve.epochs,
                errors=np.maximum(scale.errors(curve.values), 1e-9),
                rates=None if schedule is None else schedule.rates(curve.epochs),
                is_bounded=curve.is_rising,
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TradeOff:
    """Configurations against each other.

    Attributes:
        target: The target, or None.
        points: The configurations.
        is_on_front: Whether each is on the Pareto front of time against the final value.
    """

    target: Target | None
    points: tuple[TradeOffPoint, ...]
    is_on_front: tuple[bool, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        pairs = zip(self.points, self.is_on_front, strict=True)
        return {
            "target": None if self.target is None else str(self.target),
            "configurations": [point.as_dict(front) for point, front in pairs],
        }


def trade_off(
    table: str | Path, *, target: str | Target | None = None, metric: str | None = None
) -> TradeOff:
    """Predicted time of an epoch times forecast epochs for each configuration of a table.

    Args:
        table: A CSV with the columns name, run (a curve, by its path from the table), model and device, and
            optionally batch_size, precision, dataset, epochs, schedule, optimizer and price.
        target: A value to reach.
        metric: Name of the metric without a target.

    Raises:
        RecordError: The table cannot be read or lacks columns.
    """
    wanted = parse_target(target) if isinstance(target, str) else target
    points = [_point(row, Path(table), wanted, metric) for row in _configurations(Path(table))]
    return TradeOff(target=wanted, points=tuple(points), is_on_front=tuple(pareto_front(points)))


def _configurations(table: Path) -> list[dict[str, str]]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            rows = [{k: (v or "").strip() for k, v in row.items() if k} for row in csv.DictReader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(
            f"{table}: expected a CSV of configurations, and it cannot be read: {error}"
        ) from error
    missing = [name for name in _COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise RecordError(
            f"{table}: expected the columns {', '.join(_COLUMNS)} and a row or more, {', '.join(missing)} missing"
        )
    return rows


def _point(row: Mapping[str, str], table: Path, target: Target | None, metric: str | None) -> TradeOffPoint:
    price = float(row["price"]) if row.get("price") else None
    setup: dict[str, Any] = {k: row[k] for k in ("precision", "optimizer", "dataset") if row.get(k)}
    try:
        setup |= {"batch_size": int(row["batch_size"])} if row.get("batch_size") else {}
        epochs = float(row["epochs"]) if row.get("epochs") else None
    except ValueError as error:
        raise UsageError(
            f"{table}: expected numbers as batch_size and epochs of '{row['name']}': {error}"
        ) from None
    answer = forecast(
        table.parent / row["run"],
        target=target,
        metric=metric,
        schedule=row.get("schedule") or None,
        epochs=epochs,
        model=row["model"],
        devices=[row["device"]],
        price_usd_per_hour=price,
        **setup,
    )
    time = answer.times[0]
    found = answer.curve_forecast
    per_hour = time.clock.price_usd_per_hour
    return TradeOffPoint(
        name=row["name"],
        device=time.clock.device,
        epoch_time_s=time.clock.epoch_time_s,
        epochs_to_target=found.epochs_to_target[1],
        time_to_target_s=time.total_s,
        final_value=answer.final_value,
        end_time_s=time.end_s,
        cost_usd=None if per_hour is None else per_hour * time.end_s.value / 3600,
        is_rising=found.curve.is_rising,
    )
