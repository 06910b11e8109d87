"""A callback for a plain training loop: it writes the curve, forecasts it and says when to stop."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forerun.base.errors import ForecastError, InvalidSetupError, RecordError
from forerun.jobs import (
    HOPELESS,
    Curve,
    CurveForecast,
    LearningRateSchedule,
    Target,
    find_curve_files,
    forecast_curve,
    parse_target,
    read_curve,
    schedule_of,
    shipped_table,
)

__all__ = ["CurveCallback", "CurveLog"]


class CurveCallback:
    """Writes the curve of a run and stops it when its target is reached, or out of reach.

    Args:
        path: CSV file that receives the curve.
        target: Target of a metric, such as ``val_accuracy>=0.92``; without a target the run is never stopped.
        schedule: Words, a PyTorch scheduler, a Keras schedule or a function, see ``forerun.jobs.schedule_of``.
        num_epochs: Length of the run in epochs; None takes the length of the schedule.
        history: Folder of finished runs of the same job.
        stop_when_reached: True ends the run when the target is reached.
        stop_when_hopeless: True ends the run when the probability to reach the target is at most ``hopeless``.
        hopeless: Probability at or below which a run counts as hopeless, such as 0.05.
        patience: Number of forecasts in a row that must call the run hopeless.

    Attributes:
        forecast: Latest forecast; None before the first one.
        reason: Reason why the run was stopped; empty while it goes on.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        target: str | Target | None = None,
        schedule: Any = None,
        num_epochs: float | None = None,
        history: str | Path | None = None,
        stop_when_reached: bool = True,
        stop_when_hopeless: bool = True,
        hopeless: float = HOPELESS,
        patience: int = 2,
    ) -> None:
        self.log_file = CurveLog(path)
        self.target = parse_target(target) if isinstance(target, str) else target
        self._num_epochs = num_epochs
        self._schedule = _schedule(schedule, num_epochs)
        self._history = _siblings(history, self.target)
        self._stops = (stop_when_reached, stop_when_hopeless)
        self._hopeless, self._patience = hopeless, patience
        self._num_hopeless = 0
        self._table = shipped_table()
        self.forecast: CurveForecast | None = None
        self.reason = ""

    def log(self, epoch: float, **metrics: float | None) -> bool:
        """Writes a row; True if the run should stop.

        Args:
            epoch: Number of epochs done.
            metrics: Values by the metric's name, and ``learning_rate`` and ``step`` if known.
        """
        self.log_file.append(epoch=epoch, **metrics)
        if self.target is None:
            return False
        self.forecast = self._forecast(self.target)
        if self.forecast is None:
            return False
        self.reason = self._verdict(self.forecast)
        return bool(self.reason)

    def _forecast(self, target: Target) -> CurveForecast | None:
        """A forecast; None while there are too few points."""
        curve = read_curve(self.log_file.path, target.metric, target.is_rising)
        try:
            return forecast_curve(
                curve,
                self._table,
                target=target,
                end_epoch=self._num_epochs,
                schedule=self._schedule,
                is_schedule_unknown=self._schedule is None,
                siblings=self._history,
            )
        except ForecastError:
            return None  # too few points yet, or no trend: the run goes on

    def _verdict(self, forecast: CurveForecast) -> str:
        when_reached, when_hopeless = self._stops
        if forecast.reached_epoch is not None:
            return f"{self.target} was reached at epoch {forecast.reached_epoch:g}" if when_reached else ""
        is_hopeless = when_hopeless and forecast.probability_at_end <= self._hopeless
        self._num_hopeless = self._num_hopeless + 1 if is_hopeless else 0
        if self._num_hopeless >= self._patience:
            return (
                f"{self.target} is reached with a probability of {forecast.probability_at_end:.0%}; the likely end is "
                f"{forecast.final.value:.4g}"
            )
        return ""


def _schedule(schedule: Any, num_epochs: float | None) -> LearningRateSchedule | None:
    if schedule is None or isinstance(schedule, (str, LearningRateSchedule)):
        return None if schedule is None else schedule_of(schedule, num_epochs or 1.0)
    if num_epochs is None:
        raise InvalidSetupError(
            "a schedule given as an object needs num_epochs as well, the number of epochs to follow it"
        )
    return schedule_of(schedule, num_epochs)


def _siblings(history: str | Path | None, target: Target | None) -> Sequence[Curve]:
    if history is None or target is None:
        return ()
    return [read_curve(path, target.metric, target.is_rising) for path in find_curve_files(history)]


class CurveLog:
    """Appends rows to a CSV file; each row is on disk before the next one is made.

    The first row fixes the columns: ``epoch`` or ``step``, then the metrics, then ``elapsed_s`` since this object was
    made. A later row may lack some columns, but not add any. An existing file is overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._began_s = time.perf_counter()
        if not self.path.parent.is_dir():
            raise RecordError(
                f"the folder of the curve '{self.path}' does not exist; create it or choose another"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the file; empty before the first row."""
        return tuple(self._columns)

    def append(self, **row: float | None) -> None:
        """Writes a row; ``elapsed_s`` is added unless the row has it.

        Raises:
            InvalidSetupError: The row has columns that the first row lacks, or neither epoch nor step.
            RecordError: The file cannot be written.
        """
        if "epoch" not in row and "step" not in row:
            raise InvalidSetupError(
                f"a row of a curve needs epoch or step, got {', '.join(row) or 'nothing'}"
            )
        row = {**row, "elapsed_s": row.get("elapsed_s", time.perf_counter() - self._began_s)}
        is_first = not self._columns
        if is_first:
            self._columns = list(row)
        new = [name for name in row if name not in self._columns]
        if new:
            raise InvalidSetupError(
                f"the curve '{self.path}' has the columns {', '.join(self._columns)}, got also {', '.join(new)}; "
                "give every metric in the first row"
            )
        try:
            with self.path.open("w" if is_first else "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                if is_first:
                    writer.writeheader()
                writer.writerow({name: "" if value is None else value for name, value in row.items()})
        except OSError as error:
            raise RecordError(
                f"the curve '{self.path}' cannot be written: {error.strerror or error}"
            ) from error
