"""Callbacks for a plain training loop: one writes its curve and says when to stop, one times its steps.

timer = LoopTimer("runs.sqlite", subject="torchvision:resnet18", model=model, batch_size=32)
for epoch in range(3):
    with timer.epoch():
        for images, labels in loader:
            ...
            timer.step()
timer.finish()
"""

from __future__ import annotations

import contextlib
import csv
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from forerun.base.errors import ForecastError, InvalidSetupError, RecordError
from forerun.base.kept import writes
from forerun.evidence import Record, RecordStore, Scalar, at_job_start, describe_circumstances, timed_training
from forerun.jobs import (
    HOPELESS,
    Curve,
    CurveForecast,
    LearningRateSchedule,
    Target,
    find_curve_files,
    followed_schedule,
    forecast_curve,
    parse_target,
    read_curve,
    schedule_of,
    shipped_table,
)
from forerun.question.setup import Layout, Precision, choice


class CurveCallback:
    """Writes the curve of a run and stops it when its target is reached, or out of reach.

    Args:
        path: CSV file that receives the curve.
        target: Target of a metric, such as ``val_accuracy>=0.92``; without a target the run is never stopped.
        schedule: Words, a PyTorch scheduler, a Keras schedule or a function, see ``forerun.jobs.schedule_of``; None:
            the line or cosine that logged rates follow.
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
        now = metrics.get(self.target.metric)
        self.forecast = self._forecast(self.target)
        if self.forecast is not None:
            self.reason = self._verdict(self.forecast)
        elif self._stops[0] and now is not None and self.target.is_reached_by(now):
            # The first epochs are too few for a forecast, and enough to be done.
            self.reason = f"{self.target} was reached at epoch {epoch:g}"
        return bool(self.reason)

    def _forecast(self, target: Target) -> CurveForecast | None:
        """A forecast; None while there are too few points."""
        curve = read_curve(self.log_file.path, target.metric, target.is_rising)
        schedule = self._schedule
        if schedule is None and curve.learning_rates is not None:
            schedule = followed_schedule(curve.epochs, curve.learning_rates, self._num_epochs)
        try:
            return forecast_curve(
                curve,
                self._table,
                target=target,
                end_epoch=self._num_epochs,
                schedule=schedule,
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

    Attributes:
        columns: Columns of the file; empty before the first row.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.columns: tuple[str, ...] = ()
        self._began_s = time.perf_counter()
        if not self.path.parent.is_dir():
            raise RecordError(
                f"the folder of the curve '{self.path}' does not exist; create it or choose another"
            )

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
        is_first = not self.columns
        if is_first:
            self.columns = tuple(row)
        new = [name for name in row if name not in self.columns]
        if new:
            raise InvalidSetupError(
                f"the curve '{self.path}' has the columns {', '.join(self.columns)}, got also {', '.join(new)}; "
                "give every metric in the first row"
            )
        mode = "w" if is_first else "a"
        with writes(self.path, RecordError), self.path.open(mode, newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self.columns, restval="")
            if is_first:
                writer.writeheader()
            writer.writerow({name: "" if value is None else value for name, value in row.items()})


class LoopTimer:
    """Times steps and epochs, and writes one measurement, which ``forerun fit`` and ``calibrate --from`` read.

    A step's time runs from the end of one step to the end of the next, so it includes the wait for data. On a GPU each
    step is waited for. The first step of an epoch, which starts the loader, is kept apart.

    Args:
        records: Store that receives the record, as for ``forerun records``; None for the default store.
        subject: Model as ``forerun.predict`` names it, so that its prediction can learn from the record.
        model: Module that is trained, for its device, format and number of parameters; None if they are not wanted.
        batch_size: Number of samples in a step on one device; None if ``step`` is told it.
        dataset_size: Number of samples in an epoch; None for those of the steps.
        optimizer: Name of the optimizer as for ``forerun.predict``.
        precision: Precision as for ``forerun.predict``; None for the format of the model's parameters.
        layout: Memory order of images, ``nchw`` or ``nhwc``.
        compile: True if the step runs under torch.compile.
        input_shape: Shape of one sample; None for the model's own.
        occasion: Label of the session; None for one of its own.
        family: Group that must not be split between fit and test; None for the subject.

    Attributes:
        measurement: The measurement that was written; None before ``finish``.
        step_times_s, epoch_times_s: Times of all steady steps and of all epochs so far [s].

    Raises:
        InvalidSetupError: A setting has an impossible value, or the samples of a step are not known at the end.
    """

    def __init__(
        self,
        records: str | Path | None = None,
        *,
        subject: str,
        model: Any = None,
        batch_size: int | None = None,
        dataset_size: int | None = None,
        optimizer: str = "sgd",
        precision: str | None = None,
        layout: str = "nchw",
        compile: bool = False,
        input_shape: Sequence[int] | None = None,
        occasion: str = "",
        family: str | None = None,
    ) -> None:
        self._family = family
        self._records, self._subject, self._module = records, subject, model
        self._batch_size, self._dataset_size = batch_size, dataset_size
        self._optimizer, self._compile, self._input_shape = optimizer, compile, input_shape
        self._precision = None if precision is None else choice(Precision, precision, "precision")
        self._layout = choice(Layout, layout, "layout")
        self._occasion = occasion
        self._forget()

    def _forget(self) -> None:
        self.measurement: Record | None = None
        self.step_times_s: list[float] = []
        self.warm_up_s: list[float] = []  # the first steps of epochs
        self.epoch_times_s: list[float] = []
        self._num_steps = self._num_samples = 0  # of the current epoch
        self._begin_s = 0.0
        self._last_s: float | None = None  # end of the last step, or beginning of the epoch
        self._around: Any = None

    @contextlib.contextmanager
    def epoch(self) -> Iterator[LoopTimer]:
        """Surrounds the steps of one epoch."""
        self.start_epoch()
        yield self
        self.end_epoch()

    def start_epoch(self) -> None:
        """An epoch begins."""
        if self._around is None:
            self._around = at_job_start(self._circumstances())
        self._num_steps = self._num_samples = 0
        self._begin_s = self._last_s = time.perf_counter()

    def step(self, num_samples: int | None = None, *, num_steps: int = 1) -> float:
        """A step has ended; returns its time [s].

        Args:
            num_samples: Number of samples of the step; None for the batch size.
            num_steps: Number of steps that have ended since the last call.
        """
        if self._last_s is None:
            self.start_epoch()
        assert self._last_s is not None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._num_samples += num_samples or self._batch_size or 0
        now_s = time.perf_counter()
        each_s, self._last_s = (now_s - self._last_s) / num_steps, now_s
        (self.step_times_s if self._num_steps else self.warm_up_s).extend([each_s] * num_steps)
        self._num_steps += num_steps
        return each_s

    def end_epoch(self) -> None:
        """An epoch has ended; its time ends with its last step."""
        if self._last_s is not None:
            self.epoch_times_s.append(self._last_s - self._begin_s)

    def finish(self, **results: Scalar) -> Record | None:
        """Writes the measurement and returns it; None if no epoch had two steps.

        Args:
            results: Further figures of the training, such as ``val_accuracy=0.93``.
        """
        if not self.step_times_s:
            return None
        self.measurement = timed_training(
            self.step_times_s,
            self.warm_up_s,
            subject=self._subject,
            family=self._family,
            parameters=self._parameters(),
            results={**self._figures(), **results},
            around=self._around,
        )
        with RecordStore.open(self._records) as store:
            store.add(self.measurement)
        return self.measurement

    def _parameter(self) -> Any:
        """The first parameter of the model; None without one."""
        return next(self._module.parameters(), None) if self._module is not None else None

    def _circumstances(self) -> Any:
        device: Any = getattr(self._parameter(), "device", None)
        is_on_gpu = device is not None and device.type == "cuda"
        place = f"cuda:{device.index or 0}" if is_on_gpu else "cpu"
        return describe_circumstances(place, occasion=self._occasion)

    def _samples_of_a_step(self) -> int:
        size = self._batch_size or round(self._num_samples / max(1, self._num_steps))
        if not size:
            raise InvalidSetupError(
                "the samples of a step are not known: give LoopTimer a batch_size, or tell timer.step(len(images))"
            )
        return size

    def _parameters(self) -> dict[str, Scalar]:
        shape = self._input_shape
        formats = {"float16": Precision.FP16, "bfloat16": Precision.BF16, "float64": Precision.FP64}
        own = str(getattr(self._parameter(), "dtype", "")).removeprefix("torch.")
        return {
            "batch_size": self._samples_of_a_step(),
            "input_shape": None if shape is None else "x".join(map(str, shape)),
            "precision": str(self._precision or formats.get(own, Precision.FP32)),
            "layout": str(self._layout),
            "compile": self._compile,
            "optimizer": self._optimizer,
            "phase": "train",
            "num_epochs": max(1, len(self.epoch_times_s)),
            "dataset_size": self._samples_of_an_epoch(),
        }

    def _samples_of_an_epoch(self) -> int:
        return self._dataset_size or self._num_steps * self._samples_of_a_step()

    def _figures(self) -> dict[str, Scalar]:
        found = self._times(self.epoch_times_s[1:] or self.epoch_times_s)
        if self._module is not None:
            found["num_parameters"] = sum(parameter.numel() for parameter in self._module.parameters())
        return found

    def _times(self, epoch_times_s: Sequence[float]) -> dict[str, Scalar]:
        """Times of the steps, and of the epochs that count; without any, the steps of an epoch."""
        step_s, dataset_size = median(self.step_times_s), self._samples_of_an_epoch()
        epoch_s = median(epoch_times_s or [step_s * self._num_steps])
        return {
            "step_time_s": step_s,
            "steps_per_epoch": self._num_steps,
            "epoch_time_s": epoch_s,
            "images_per_second": dataset_size / epoch_s,
            "first_step_s": self.warm_up_s[0],
            "dataset_size": dataset_size,
            **{f"epoch_time_{number}_s": time_s for number, time_s in enumerate(self.epoch_times_s, start=1)},
        }
