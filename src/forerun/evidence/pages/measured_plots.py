"""Plots of measurements: throughput, curves of a training, residuals of a fit, times of layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.errors import FailureError
from forerun.evidence.records.measurement import JobKind, Measurement, Outcome
from forerun.graph.graph import Floats
from forerun.surface.report.figure import (
    COLOURS,
    MOST_LEGEND_GROUPS,
    STEP_TIMES,
    TimeAxis,
    check_positive,
    drawn,
    in_natural_order,
    look_of,
    number_labels,
    plain_log_ticks,
    scatter_groups,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from forerun.evidence.records.step_record import StepRecord

_NUM_BINS = 40
_NULL = "null"  # a call without work, the overhead of each


def curves(measurements: Iterable[Measurement]) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Accuracy and loss after each epoch by run: on held-out images if measured, else on the training images.

    Of several runs of a configuration the last counts.
    """
    accuracy: dict[str, Floats] = {}
    loss: dict[str, Floats] = {}
    for m in measurements:
        for found, stem in ((accuracy, "accuracy"), (loss, "loss")):
            values = _curve(m, f"val_{stem}") or _curve(m, stem)
            if m.kind is JobKind.TRAINING and values:
                found[_run_name(m)] = np.array(values)
    return accuracy, loss


def accuracy_over_time(measurements: Iterable[Measurement]) -> dict[str, tuple[Floats, Floats]]:
    """Time spent in training [s] and accuracy at the end of each epoch, by run; evaluation takes no time here.

    An epoch cut to some steps counts with the time those took. Of several runs of a configuration the last counts.
    """
    found: dict[str, tuple[Floats, Floats]] = {}
    for m in measurements:
        accuracy = _curve(m, "val_accuracy") or _curve(m, "accuracy")
        epochs_s = [m.results.get(f"epoch_time_{number}_s") for number in range(1, len(accuracy) + 1)]
        times_s = [float(value) for value in epochs_s if isinstance(value, (int, float))]
        if m.kind is JobKind.TRAINING and accuracy and len(times_s) == len(accuracy):
            found[_run_name(m)] = (np.cumsum(times_s), np.array(accuracy))
    return found


def _run_name(measurement: Measurement) -> str:
    return f"{measurement.subject}, batch {measurement.parameters.get('batch_size')}"


def _curve(measurement: Measurement, stem: str) -> list[float]:
    values: list[float] = []
    while isinstance(value := measurement.results.get(f"{stem}_{len(values) + 1}"), (int, float)):
        values.append(float(value))
    return values


@contextmanager
def _chart(
    path: Path, width_in: float, height_in: float, *, legend_below: bool = True
) -> Iterator[tuple[Figure, Axes]]:
    """A figure with axes, a light grid and a legend, written in the end; the errors are those of ``drawn``."""
    with drawn(path, width_in=width_in, height_in=height_in) as figure:
        axes = figure.subplots()
        yield figure, axes
        for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
            if scale == "log" and not axis.get_label_text().startswith("batch size"):
                plain_log_ticks(axis)
        axes.grid(visible=True, alpha=0.3)
        if legend_below:
            _legend_below(figure, axes)
        else:
            axes.legend(fontsize="x-small", ncols=2)


def batch_size_against_throughput(path: Path, records: Sequence[StepRecord]) -> None:
    """Images per second against the batch size, one line per model; repetitions are joined at their median.

    Args:
        path: File to write.
        records: Measured steps; of several devices, each has its own lines.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    with_device = len({record.device for record in records}) > 1
    groups = [f"{r.model}, {r.device}" if with_device else r.model for r in records]
    sizes = np.array([record.batch_size_per_device for record in records], dtype=float)
    rates = np.array([record.throughput_samples_per_s for record in records])
    with _chart(path, 7.4, 5.0) as (_, axes):
        check_positive(sizes, rates, what="batch sizes and throughputs")
        names = np.asarray(groups)
        for index, name in enumerate(in_natural_order(groups)):
            rows = names == name
            where = np.unique(sizes[rows])
            medians = [float(np.median(rates[rows & (sizes == size)])) for size in where]
            axes.plot(where, medians, label=name, markersize=5, **look_of(index))
            axes.scatter(
                sizes[rows], rates[rows], s=9, alpha=0.5, linewidths=0, color=look_of(index)["color"]
            )
        axes.set(xlabel="batch size", ylabel="images/s", title="Measured throughput")
        axes.set_xscale("log", base=2)
        number_labels(axes, np.unique(sizes))
        axes.set_ylim(0, 1.08 * float(rates.max()))


def accuracy_curves(path: Path, *curves: Mapping[str, Floats]) -> None:
    """Accuracy and loss after each epoch, one line per run.

    Args:
        path: File to write.
        curves: Shares of right answers after epoch 1, 2, ... by run, then loss.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    runs = in_natural_order([run for found in curves for run in found])
    with drawn(path, width_in=9.6, height_in=4.6) as figure:
        if not runs or not all(len(curve) for found in curves for curve in found.values()):
            raise FailureError("a plot of accuracy needs at least one run with one epoch, got none")
        both = figure.subplots(1, 2)
        for axes, found, (label, factor) in zip(
            both, curves, (("accuracy [%]", 100.0), ("loss", 1.0)), strict=True
        ):
            for index, run in enumerate(runs):
                if run in found:
                    values = factor * np.asarray(found[run], dtype=float)
                    epochs = np.arange(1, len(values) + 1)
                    axes.plot(epochs, values, label=run, markersize=4, **look_of(index))
            longest = max((len(curve) for curve in found.values()), default=1)
            number_labels(axes, np.arange(1.0, longest + 1))
            axes.set(xlabel="epoch", ylabel=label)
            axes.grid(visible=True, alpha=0.3)
        # Runs have the same colours in both, so the legend of the first with any serves.
        _legend_below(figure, both[0] if curves[0] else both[1])
        figure.suptitle("Accuracy and loss per epoch")


def best_so_far(time_s: Floats, accuracy: Floats) -> tuple[Floats, Floats]:
    """The points that no other reaches sooner, by time: the front of the trade-off, (k,) each.

    Args:
        time_s: Time at which each accuracy was reached [s], (n,).
        accuracy: The accuracies, (n,).
    """
    order = np.lexsort((-accuracy, time_s))
    ordered = accuracy[order]
    is_better = ordered > np.concatenate([[-np.inf], np.maximum.accumulate(ordered)[:-1]])
    chosen = order[is_better]
    return time_s[chosen], accuracy[chosen]


def accuracy_against_time(path: Path, runs: Mapping[str, tuple[Floats, Floats]]) -> None:
    """Accuracy against the time spent in training, a line per run, and the best that any run has at each time.

    Args:
        path: File to write.
        runs: Time [s] and share of right answers after each epoch, by run.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    with _chart(path, 7.4, 5.4) as (_, axes):
        if not runs:
            raise FailureError("a plot of accuracy against time needs at least one run, got none")
        for index, name in enumerate(in_natural_order([*runs])):
            time_s, accuracy = runs[name]
            axes.plot(time_s, 100 * accuracy, label=name, markersize=4, linewidth=1, **look_of(index))
        all_s, all_accuracies = (np.concatenate([run[part] for run in runs.values()]) for part in (0, 1))
        front_s, front = best_so_far(all_s, all_accuracies)
        ends_s, ends = np.append(front_s, all_s.max()), np.append(front, front[-1])
        axes.step(ends_s, 100 * ends, where="post", color="black", linewidth=1.5, label="best so far")
        axes.set(
            xscale="log", xlabel="time in training [s]", ylabel="accuracy [%]", title="Accuracy against time"
        )


def residuals_against_time(
    path: Path,
    *,
    title: str,
    predicted_s: Floats,
    actual_s: Floats,
    groups: Sequence[str],
    times: TimeAxis = STEP_TIMES,
) -> None:
    """Relative error, predicted / actual - 1, against the actual time.

    Args:
        path: File to write.
        title: Title of the plot.
        predicted_s: Predicted times [s], (n,), positive.
        actual_s: Measured times [s], (n,), positive.
        groups: Group of each row; a colour each, (n,).
        times: Name, unit and scale of the axis of times.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    predicted, actual = np.asarray(predicted_s, dtype=float), np.asarray(actual_s, dtype=float)
    with _chart(path, 7.4, 4.8) as (_, axes):
        check_positive(predicted, actual, what="predicted and actual times")
        error_percent = 100 * (predicted / actual - 1)
        scatter_groups(axes, groups, times.per_second * actual, error_percent, size=18)
        axes.axhline(0, color="black", linewidth=1)
        median = float(np.median(error_percent))
        axes.axhline(median, color=COLOURS[6], linewidth=0.9, linestyle="--", label=f"median {median:+.1f} %")
        axes.set(xlabel=times.label("actual"), ylabel="predicted / actual - 1 [%]", title=title)
        if times.is_log:
            axes.set_xscale("log")
        else:
            axes.set_xlim(0, None)


def layer_time_histogram(path: Path, measurements: Iterable[Measurement]) -> None:
    """Number of layers by time, logarithmic in the time.

    Args:
        path: File to write.
        measurements: Measurements, of which the finished layers are drawn.

    Raises:
        UsageError, FailureError: There is no layer, or the file cannot be written.
    """
    with drawn(path, width_in=7.0, height_in=4.4) as figure:
        _, _, times_ms = _layers(measurements)
        axes = figure.subplots()
        bins = np.geomspace(0.95 * times_ms.min(), 1.05 * times_ms.max(), _NUM_BINS)
        axes.hist(times_ms, bins=bins.tolist(), color=COLOURS[0], edgecolor="white", linewidth=0.4)
        median = float(np.median(times_ms))
        axes.axvline(median, color=COLOURS[1], linestyle="--", label=f"median {median:.3g} ms")
        axes.set(xscale="log", xlabel="time of a layer [ms]", ylabel="layers")
        plain_log_ticks(axes.xaxis)
        axes.set_title(f"{len(times_ms):,} layers", fontsize="medium")
        axes.legend(fontsize="small")


def layer_times_against_work(path: Path, measurements: Iterable[Measurement]) -> None:
    """Time of each layer against its FLOPs, forward and training steps apart, a colour per kind.

    Args:
        path: File to write.
        measurements: Measurements, of which the finished layers are drawn.

    Raises:
        UsageError, FailureError: There is no layer, or the file cannot be written.
    """
    with _chart(path, 7.0, 5.0, legend_below=False) as (_, axes):
        names, flops, times_ms = _layers(measurements)
        has_work = flops > 0
        if not has_work.any():
            raise FailureError("a plot of times against FLOPs needs a layer that computes, got none")
        kept = [name for name, is_kept in zip(names, has_work, strict=True) if is_kept]
        scatter_groups(axes, kept, flops[has_work] / 1e9, times_ms[has_work], size=14)
        axes.set(xscale="log", yscale="log")
        axes.set(xlabel="work of the forward pass [GFLOP]", ylabel="time of a layer [ms]")


def _layers(measurements: Iterable[Measurement]) -> tuple[list[str], Floats, Floats]:
    """Kind with its mode, FLOPs and median time [ms] of each finished layer."""
    names: list[str] = []
    numbers: list[tuple[float, float]] = []
    for m in measurements:
        is_layer = m.kind is JobKind.LAYER and m.outcome is Outcome.DONE and m.subject != _NULL
        if not is_layer or not m.repetitions_s:
            continue
        work = m.parameters.get("flops")
        mode = str(m.parameters.get("mode", "")).replace("_", " ")
        names.append(f"{m.subject}, {mode}" if mode else m.subject)
        numbers.append(
            (float(work) if isinstance(work, (int, float)) else 0.0, 1e3 * float(np.median(m.repetitions_s)))
        )
    if not names:
        raise FailureError("plots of layers need at least one finished layer, got none")
    flops, times_ms = np.asarray(numbers).T
    return names, flops, times_ms


def _legend_below(figure: Figure, axes: Axes) -> None:
    """The legend under the axes, where it covers no point; none where there are too many groups to tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= MOST_LEGEND_GROUPS:
        figure.legend(handles, labels, loc="outside lower center", fontsize="small", ncols=3)
