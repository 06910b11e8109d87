"""The practicum's table of whole Keras runs: one row per run of a network on one or two P100.

Columns: ``model`` (``mnist_cnn``, ``cifar10_cnn``, ``patch_camelyon_cnn``, and parts of the last), ``gpu``, ``n_gpus``,
``strategy``, ``optimizer``, ``batch_size_per_gpu``, ``time_ms_step``, and the published predictions in ms.

Source: github.com/profnote/ml-performance-prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.adapters import words_of
from forerun.base.answers import Answer
from forerun.base.errors import ForerunError, InvalidSetupError, RecordError
from forerun.base.tables import read_table
from forerun.base.units import format_duration_s
from forerun.evidence.fitting.evaluation import ErrorMetrics, configuration_of, errors
from forerun.evidence.records.model_names import subject_family
from forerun.evidence.records.reading import columns_of, read_measured_steps
from forerun.evidence.records.step_record import StepRecord
from forerun.question.setup import Layout, OptimizerImplementation, Phase, Precision
from forerun.surface.report.figure import (
    check_plot_path,
    look_of,
    new_figure,
    number_labels,
    plain_log_ticks,
    save_figure,
)
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent

if TYPE_CHECKING:
    from forerun.adapters.classics.model_file import TrainedModel

_NETWORKS: dict[str, str] = words_of("practicum")["networks"]
_DEVICES = {"P100-PCIE": "p100-pcie-16gb", "P100-SXM2": "p100-sxm2"}
_COLUMNS = {"model", "gpu", "n_gpus", "strategy", "optimizer", "batch_size_per_gpu", "time_ms_step"}
_PUBLISHED: dict[str, list[str]] = words_of("practicum")["published"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """One measured run and what each method says of its step.

    Attributes:
        run: The run; of several devices, a network of Keras under a MirroredStrategy.
        predicted_s: Step by method [s]; methods that cannot say are missing.
    """

    run: StepRecord
    predicted_s: Mapping[str, float]

    def error(self, method: str) -> float | None:
        """(predicted - actual) / actual of a method."""
        found = self.predicted_s.get(method)
        return None if found is None else found / self.run.step_time_s - 1


def is_practicum_table(path: Path) -> bool:
    """True for a table with the columns of the practicum."""
    return columns_of(path) >= _COLUMNS


def read_practicum_runs(path: Path) -> tuple[list[MethodRow], list[str]]:
    """Runs of the whole networks with the published predictions, and notes on the rows that were passed over.

    Raises:
        RecordError: The table cannot be read, or has another GPU.
    """
    rows: list[MethodRow] = []
    num_parts = num_untimed = 0
    for number, row in enumerate(read_table(path).to_dict("records"), start=1):
        if row["model"] not in _NETWORKS:
            num_parts += 1
            continue
        # Runs that ended without a time are rows of the published table as well.
        if (step_s := _seconds(row, "time_ms_step")) is None:
            num_untimed += 1
            continue
        if row["gpu"] not in _DEVICES:
            raise RecordError(
                f"{path.name}, row {number}: expected a gpu of {', '.join(_DEVICES)}, got '{row['gpu']}'"
            )
        told = {method: [_seconds(row, name) for name in names] for method, names in _PUBLISHED.items()}
        published = {
            method: next((s for s in found if s is not None), None) for method, found in told.items()
        }
        record = StepRecord(
            source=path.name,
            row_id=str(number),
            model=_NETWORKS[row["model"]],
            family=subject_family(_NETWORKS[row["model"]]),
            device=_DEVICES[row["gpu"]],
            num_devices=int(row["n_gpus"]),
            batch_size_per_device=int(row["batch_size_per_gpu"]),
            step_time_s=step_s,
            precision=Precision.FP32,
            phase=Phase.TRAIN,
            layout=Layout.NHWC,
            optimizer=str(row["optimizer"]),
            includes_optimizer=True,
            # Keras 2 updates each variable by one kernel.
            optimizer_implementation=OptimizerImplementation.FUSED,
            framework="keras",
        )
        rows.append(MethodRow(run=record, predicted_s={m: s for m, s in published.items() if s is not None}))
    notes = []
    if num_parts:
        notes.append(
            f"{num_parts} rows are of parts of a network, such as layers 1 to 5, whose label is a feature map that is "
            "copied from the host in each step: they are steps of no network that trains, and were left out"
        )
    if num_untimed:
        notes.append(f"{num_untimed} rows have no time of a step and were left out")
    return rows, notes


def _seconds(row: Mapping[Any, Any], column: str) -> float | None:
    """A time of the table [s]; None for an empty cell or none at all."""
    time_ms = float(row.get(column) or "nan")
    return time_ms / 1e3 if np.isfinite(time_ms) else None


METHODS = ("sum of layers", "last layer apart", "with the factor 1.5", "forerun")
_FACTOR = 1.5
_LAST_LAYER_S: Mapping[tuple[str, int], float] = {("p100-pcie-16gb", 2): 4.84e-3}
"""Step of a dense layer alone under MirroredStrategy: median of 3,000 in ``iit_layers`` of the practicum [s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodsComparison(Answer):
    """Runs beside the methods.

    Attributes:
        table: Name of the table.
        rows: One per run.
        notes: Runs that were left out, with the reason.
    """

    table: str
    rows: tuple[MethodRow, ...]
    notes: tuple[str, ...]

    def metrics(self, method: str, num_devices: int | None = None) -> ErrorMetrics | None:
        """Errors of a method over the rows that it can predict, of one number of devices or of all."""
        rows = [
            row
            for row in self.rows
            if method in row.predicted_s and num_devices in (None, row.run.num_devices)
        ]
        if not rows:
            return None
        predicted = np.asarray([row.predicted_s[method] for row in rows])
        return errors(predicted, np.asarray([row.run.step_time_s for row in rows]))

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of devices of the runs."""
        return tuple(sorted({row.run.num_devices for row in self.rows}))

    def json_fields(self) -> dict[str, Any]:
        """A row per run, and the errors by method and number of devices."""
        return {
            "table": self.table,
            "n": len(self.rows),
            "rows": [
                {
                    "network": row.run.model,
                    "device": row.run.device,
                    "num_devices": row.run.num_devices,
                    "optimizer": row.run.optimizer,
                    "batch_size_per_device": row.run.batch_size_per_device,
                    "actual_s": row.run.step_time_s,
                    "predicted_s": row.predicted_s,
                    "errors": {method: row.error(method) for method in row.predicted_s},
                }
                for row in self.rows
            ],
            "metrics": {
                str(count): {
                    method: found for method in METHODS if (found := self.metrics(method, count)) is not None
                }
                for count in self.device_counts
            },
            "notes": self.notes,
        }


def compare_methods(
    runs: str | Path, *, layers: str | Path | None = None, last_layer_s: float | None = None
) -> MethodsComparison:
    """Puts every run of a table beside the methods and our own prediction, which is that of ``forerun predict``.

    Args:
        runs: The practicum's table of whole runs (model, n_gpus, strategy, batch_size_per_gpu, time_ms_step), or own
            records of steps: a store, or a table of forerun.
        layers: Model of layers that ``forerun fit --model layers`` wrote; the sums are then those of its layers. Else
            they are the published ones, where the table has them.
        last_layer_s: Step of the last layer alone under the strategy [s]; that of two P100 is known.

    Raises:
        RecordError: The table cannot be read, or no network of it is known.
        UsageError: The model is not one of layers.
    """
    model = None if layers is None else _layer_model(layers)
    found, notes = (
        read_practicum_runs(Path(runs))
        if is_practicum_table(Path(runs))
        else ([MethodRow(run=record, predicted_s={}) for record in read_measured_steps([runs])], [])
    )
    rows: list[MethodRow] = []
    skipped: dict[str, int] = {}
    # A table has many runs of one question, which are predicted once.
    ours: dict[tuple[str, str], float] = {}
    for row in found:
        run = row.run
        key = (configuration_of(run), run.optimizer_implementation)
        try:
            own_s = ours[key] = ours.get(key) or _our_step_s(run)
            said = row.predicted_s if model is None else _sums(run, model, last_layer_s)
        except ForerunError as error:
            reason = f"{run.model}: {error}"
            skipped[reason] = skipped.get(reason, 0) + 1
            continue
        rows.append(MethodRow(run=run, predicted_s={**said, "forerun": own_s}))
    if not rows:
        raise RecordError(f"{Path(runs).name}: no run could be predicted: {'; '.join(skipped)}")
    return MethodsComparison(
        table=Path(runs).name,
        rows=tuple(rows),
        notes=(*notes, *(f"{count} runs left out, {reason}" for reason, count in skipped.items())),
    )


def _our_step_s(record: StepRecord) -> float:
    """The step of a run's question as ``forerun predict`` says it [s]."""
    from forerun.search.predict import predict

    run = record.run
    if record.num_devices > 1 and record.framework == "keras":
        run = run.with_(strategy="mirrored")
    return predict(run).step_time_s.value


def _layer_model(path: str | Path) -> TrainedModel:
    from forerun.adapters.classics.model_file import TrainedModel
    from forerun.adapters.classics.trained_models import load_trained_model

    model = load_trained_model(path)
    if not isinstance(model, TrainedModel) or model.kind != "layers":
        raise InvalidSetupError(
            f"expected a model of layers, got one of kind {model.kind}; make it with: "
            "forerun fit RECORDS --model layers --out layers.safetensors"
        )
    return model


def _sums(run: StepRecord, model: TrainedModel, last_layer_s: float | None) -> dict[str, float]:
    """Step by each method [s]; on one device the sum alone."""
    from forerun.adapters.classics.trained_models import layer_times_s

    times = layer_times_s(
        model,
        {
            "model": run.model.removeprefix("keras:"),
            "batch_size": run.batch_size_per_device,
            "optimizer": run.optimizer,
            "device": run.device,
        },
    )
    said = {METHODS[0]: sum(times)}
    last = last_layer_s or _LAST_LAYER_S.get((run.device, run.num_devices))
    if run.num_devices > 1 and last is not None:
        rest = sum(times[:-1])
        said |= {METHODS[1]: last + rest, METHODS[2]: last + rest / _FACTOR}
    return said


_MOST_PANELS = 6


def methods_page(found: MethodsComparison) -> RenderableType:
    """One line per run, then the errors of each method by number of devices."""
    columns: dict[str, Callable[[MethodRow], str]] = {
        "network": lambda row: row.run.model,
        "devices": lambda row: str(row.run.num_devices),
        "optimizer": lambda row: row.run.optimizer,
        "batch": lambda row: str(row.run.batch_size_per_device),
        "actual": lambda row: format_duration_s(row.run.step_time_s),
        **{method: partial(_cell, method) for method in METHODS},
    }
    lines = [[cell(row) for cell in columns.values()] for row in sorted(found.rows, key=_order)]
    runs = table(columns, lines, left=("network",), fold=("network",))
    return Group(runs, Text(""), _errors(found), *(Text(f"- {note}") for note in found.notes))


def _order(row: MethodRow) -> tuple[str, int, str, int]:
    return row.run.model, row.run.num_devices, row.run.optimizer, row.run.batch_size_per_device


def _cell(method: str, row: MethodRow) -> str:
    error = row.error(method)
    return "-" if error is None else f"{format_duration_s(row.predicted_s[method])} ({error:+.0%})"


def _errors(found: MethodsComparison) -> Table:
    lines = []
    for count in found.device_counts:
        for method in METHODS:
            metrics = found.metrics(method, count)
            if metrics is not None:
                figures = (metrics.mape, metrics.median_ape, metrics.p90_ape)
                lines.append([method, str(count), f"{metrics.n:,}", *map(format_percent, figures)])
    return table(("method", "devices", "rows", "MAPE", "median", "90th"), lines, left=("method",))


def methods_plot(path: Path, found: MethodsComparison) -> None:
    """Step against the batch size, a panel per network and number of devices: measured, and by each method.

    Args:
        path: File to write.
        found: The comparison.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    keys = sorted({(row.run.model, row.run.num_devices) for row in found.rows})[:_MOST_PANELS]
    num_rows, columns = -(-len(keys) // 2), min(2, len(keys))
    figure = new_figure(width_in=4.8 * columns, height_in=3.5 * num_rows)
    grid = figure.subplots(num_rows, columns, squeeze=False)
    # An odd number of panels leaves a place empty.
    for axes in grid.flat[len(keys) :]:
        axes.set_visible(False)
    for axes, key in zip(grid.flat, keys, strict=False):
        rows = [row for row in found.rows if (row.run.model, row.run.num_devices) == key]
        sizes = [row.run.batch_size_per_device for row in rows]
        measured_ms = [1e3 * row.run.step_time_s for row in rows]
        axes.plot(sizes, measured_ms, "o", color="black", markersize=4, alpha=0.6, label="measured")
        for index, method in enumerate(METHODS):
            means = _means_ms(rows, method)
            if means:
                axes.plot([*means], [*means.values()], label=method, markersize=4, **look_of(index))
        axes.set(xscale="log", yscale="log", xlabel="batch size of one device", ylabel="step [ms]")
        number_labels(axes, np.unique(np.asarray(sizes, dtype=float)))
        plain_log_ticks(axes.yaxis)
        axes.set_title(f"{key[0]}, {key[1]} device{'s'[key[1] == 1 :]}", fontsize="medium")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="x-small", loc="upper left")
    save_figure(figure, path)


def _means_ms(rows: Sequence[MethodRow], method: str) -> dict[int, float]:
    """Mean prediction over the optimizers, by batch size [ms]."""
    steps: dict[int, list[float]] = {}
    for row in rows:
        if method in row.predicted_s:
            steps.setdefault(row.run.batch_size_per_device, []).append(1e3 * row.predicted_s[method])
    return {size: float(np.mean(steps[size])) for size in sorted(steps)}
