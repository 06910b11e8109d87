"""Plots of measurements: batch size against throughput, curves of a training, residuals of a fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.errors import FailureError
from forerun.surface.report.figure import (
    COLOURS,
    STEP_TIMES,
    Floats,
    TimeAxis,
    check_plot_path,
    look_of,
    new_figure,
    number_labels,
    plain_log_ticks,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "accuracy_against_time",
    "accuracy_curves",
    "batch_size_against_throughput",
    "best_so_far",
    "residuals_against_time",
]

_MOST_LEGEND_LINES = 24


def batch_size_against_throughput(
    path: Path, *, title: str, batch_sizes: Floats, throughput_samples_per_s: Floats, groups: Sequence[str]
) -> None:
    """Images per second against the batch size, one line per group; repetitions are joined at their median.

    Args:
        path: File to write.
        title: Title of the plot.
        batch_sizes: Samples per step, (n,).
        throughput_samples_per_s: Samples per second, (n,).
        groups: Group of each row, such as the model, (n,).

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    check_plot_path(path)
    sizes, rates = np.asarray(batch_sizes, dtype=float), np.asarray(throughput_samples_per_s, dtype=float)
    _check(sizes, rates, what="batch sizes and throughputs")
    figure = new_figure(width_in=7.4, height_in=5.0)
    axes = figure.subplots()
    names = np.asarray(groups)
    for index, name in enumerate(_in_natural_order(groups)):
        rows = names == name
        where = np.unique(sizes[rows])
        medians = [float(np.median(rates[rows & (sizes == size)])) for size in where]
        axes.plot(where, medians, label=name, markersize=5, **look_of(index))
        axes.scatter(sizes[rows], rates[rows], s=9, alpha=0.5, linewidths=0, color=look_of(index)["color"])
    axes.set_xscale("log", base=2)
    number_labels(axes, np.unique(sizes))
    axes.set(xlabel="batch size", ylabel="images/s", title=title)
    axes.set_ylim(0, 1.08 * float(rates.max()))
    axes.grid(visible=True, alpha=0.3)
    _legend_below(figure, axes)
    save_figure(figure, path)


def accuracy_curves(
    path: Path, *, title: str, accuracy: Mapping[str, Floats], loss: Mapping[str, Floats]
) -> None:
    """Accuracy and loss after each epoch, one line per run.

    Args:
        path: File to write.
        title: Title of the plot.
        accuracy: Shares of right answers after epoch 1, 2, ... by run.
        loss: Loss after epoch 1, 2, ... by run.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    check_plot_path(path)
    runs = _in_natural_order([*accuracy, *loss])
    if not runs or not all(len(curve) for curve in (*accuracy.values(), *loss.values())):
        raise FailureError("a plot of accuracy needs at least one run with one epoch, got none")
    figure = new_figure(width_in=9.6, height_in=4.6)
    left, right = figure.subplots(1, 2)
    for axes, curves, label, factor in (
        (left, accuracy, "accuracy [%]", 100.0),
        (right, loss, "loss", 1.0),
    ):
        for index, run in enumerate(runs):
            if run in curves:
                values = factor * np.asarray(curves[run], dtype=float)
                epochs = np.arange(1, len(values) + 1)
                axes.plot(epochs, values, label=run, markersize=4, **look_of(index))
        longest = max((len(curve) for curve in curves.values()), default=1)
        number_labels(axes, np.arange(1.0, longest + 1))
        axes.set(xlabel="epoch", ylabel=label)
        axes.grid(visible=True, alpha=0.3)
    _legend_below(figure, left if accuracy else right)
    figure.suptitle(title)
    save_figure(figure, path)


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


def accuracy_against_time(path: Path, *, title: str, runs: Mapping[str, tuple[Floats, Floats]]) -> None:
    """Accuracy against the time spent in training, a line per run, and the best that any run has at each time.

    Args:
        path: File to write.
        title: Title of the plot.
        runs: Time [s] and share of right answers after each epoch, by run.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    check_plot_path(path)
    if not runs:
        raise FailureError("a plot of accuracy against time needs at least one run, got none")
    figure = new_figure(width_in=7.4, height_in=5.4)
    axes = figure.subplots()
    for index, name in enumerate(_in_natural_order([*runs])):
        time_s, accuracy = runs[name]
        axes.plot(time_s, 100 * accuracy, label=name, markersize=4, linewidth=1, **look_of(index))
    all_s, all_accuracies = (np.concatenate([run[part] for run in runs.values()]) for part in (0, 1))
    front_s, front = best_so_far(all_s, all_accuracies)
    ends_s, ends = np.append(front_s, all_s.max()), np.append(front, front[-1])
    axes.step(ends_s, 100 * ends, where="post", color="black", linewidth=1.5, label="best so far")
    axes.set(xscale="log", xlabel="time in training [s]", ylabel="accuracy [%]", title=title)
    plain_log_ticks(axes.xaxis)
    axes.grid(visible=True, alpha=0.3)
    _legend_below(figure, axes)
    save_figure(figure, path)


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
    check_plot_path(path)
    predicted, actual = np.asarray(predicted_s, dtype=float), np.asarray(actual_s, dtype=float)
    _check(predicted, actual, what="predicted and actual times")
    error_percent = 100 * (predicted / actual - 1)
    figure = new_figure(width_in=7.4, height_in=4.8)
    axes = figure.subplots()
    names = np.asarray(groups)
    for index, name in enumerate(_in_natural_order(groups)):
        rows = names == name
        axes.scatter(
            times.per_second * actual[rows],
            error_percent[rows],
            s=18,
            alpha=0.75,
            linewidths=0,
            label=f"{name} ({rows.sum():,})",
            **look_of(index),
        )
    axes.axhline(0, color="black", linewidth=1)
    median = float(np.median(error_percent))
    axes.axhline(median, color=COLOURS[6], linewidth=0.9, linestyle="--", label=f"median {median:+.1f} %")
    axes.set(xlabel=times.label("actual"), ylabel="predicted / actual - 1 [%]", title=title)
    if times.is_log:
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
    else:
        axes.set_xlim(0, None)
    axes.grid(visible=True, alpha=0.3)
    _legend_below(figure, axes)
    save_figure(figure, path)


def _legend_below(figure: Figure, axes: Axes) -> None:
    """The legend under the axes, where it covers no point; none where there are too many groups to tell apart."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) <= _MOST_LEGEND_LINES:
        figure.legend(handles, labels, loc="outside lower center", fontsize="small", ncols=3)


def _in_natural_order(names: Sequence[str]) -> list[str]:
    """Each name once, numbers within it by value: batch 8 before batch 16."""
    import re

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]

    return sorted(set(names), key=key)


def _check(first: Floats, second: Floats, *, what: str) -> None:
    both = np.concatenate([first, second])
    if not first.size or first.shape != second.shape or not np.all(np.isfinite(both) & (both > 0)):
        raise FailureError(f"a plot of {what} needs at least one row, as many of each, and values above zero")
