"""Plots for files; nothing is shown on a screen and no global state of matplotlib is touched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forerun.base.errors import FailureError
from forerun.base.units import GIB
from forerun.surface.report.figure import (
    COLOURS,
    PLOT_SUFFIXES,
    STEP_TIMES,
    Floats,
    TimeAxis,
    check_plot_path,
    look_of,
    new_figure,
    plain_log_ticks,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["PLOT_SUFFIXES", "check_plot_path", "predicted_versus_actual", "throughput_and_memory"]

_MOST_LEGEND_GROUPS = 24


def throughput_and_memory(
    path: Path,
    *,
    title: str,
    batch_sizes: Sequence[int],
    throughput_samples_per_s: tuple[Floats, Floats, Floats],
    peak_memory_bytes: Floats,
    device_memory_bytes: float,
    chosen_batch_size: int,
) -> None:
    """Throughput with its 90 % band, and memory with the card's limit, against the batch size.

    Args:
        path: File to write.
        title: Model, device and setup.
        batch_sizes: Ascending, (n,).
        throughput_samples_per_s: Value, low and high, (n,) each.
        peak_memory_bytes: Peak memory [bytes], (n,).
        device_memory_bytes: Memory that a process can use [bytes].
        chosen_batch_size: Batch size marked by a vertical line.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.0, height_in=6.4)
    above, below = figure.subplots(2, 1, sharex=True)
    sizes = np.asarray(batch_sizes, dtype=float)
    _draw_throughput(above, sizes, throughput_samples_per_s)
    _draw_memory(below, sizes, np.asarray(peak_memory_bytes) / GIB, device_memory_bytes / GIB)
    for axes in (above, below):
        axes.axvline(chosen_batch_size, color="#555555", linestyle=":", label=f"batch {chosen_batch_size:,}")
        axes.grid(visible=True, alpha=0.3)
        # Room for the legend above the curves and the limit.
        axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
        axes.legend(loc="upper left", fontsize="small", ncols=2)
    below.set_xlabel("batch size")
    figure.suptitle(title)
    save_figure(figure, path)


def _draw_throughput(axes: Axes, sizes: Floats, throughput: tuple[Floats, Floats, Floats]) -> None:
    value, low, high = throughput
    axes.fill_between(sizes, low, high, color=COLOURS[0], alpha=0.2, label="90 % interval")
    axes.plot(sizes, value, color=COLOURS[0], marker="o", markersize=4, label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_ylabel("throughput [samples/s]")


def _draw_memory(axes: Axes, sizes: Floats, memory_gib: Floats, limit_gib: float) -> None:
    axes.plot(sizes, memory_gib, color=COLOURS[1], marker="o", markersize=4, label="peak memory")
    if limit_gib > 0:
        axes.axhline(
            limit_gib, color="black", linestyle="--", label=f"memory of the device, {limit_gib:.1f} GiB"
        )
    # Labels at powers of two only, and not too many: a batch in between would be written over its neighbour.
    powers = [size for size in sizes if float(np.log2(size)).is_integer()]
    shown = powers[:: 1 + len(powers) // 13]
    axes.set_xticks(shown, [f"{size:,.0f}" for size in shown])
    axes.minorticks_off()
    axes.set_ylabel("memory [GiB]")


def predicted_versus_actual(
    path: Path,
    *,
    title: str,
    predicted_s: Floats,
    actual_s: Floats,
    groups: Sequence[str],
    times: TimeAxis = STEP_TIMES,
) -> None:
    """Predicted against actual times, with y = x and lines 20 % to either side.

    Args:
        path: File to write.
        title: Title of the plot; rows and MAPE are added.
        predicted_s: Predicted times [s], (n,), positive.
        actual_s: Measured times [s], (n,), positive.
        groups: Group of each row, such as its device; a colour each, (n,).
        times: Name, unit and scale of the axes.

    Raises:
        UsageError, FailureError: There is nothing to plot, or the file cannot be written.
    """
    check_plot_path(path)
    predicted, actual = np.asarray(predicted_s, dtype=float), np.asarray(actual_s, dtype=float)
    if not predicted.size or not np.all(
        np.isfinite(predicted) & np.isfinite(actual) & (predicted > 0) & (actual > 0)
    ):
        raise FailureError("a plot of predicted against actual needs at least one row, and times above zero")
    mape = float(np.mean(np.abs(predicted - actual) / actual))
    figure = new_figure(width_in=7.0, height_in=6.6)
    axes = figure.subplots()
    shown = (predicted * times.per_second, actual * times.per_second)
    _draw_reference_lines(axes, np.concatenate(shown), from_zero=not times.is_log)
    _draw_groups(axes, *shown, np.asarray(groups))
    axes.set(xlabel=times.label("actual"), ylabel=times.label("predicted"))
    if times.is_log:
        axes.set(xscale="log", yscale="log")
        ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
        axes.set(xlim=ends, ylim=ends)
        plain_log_ticks(axes.xaxis)
        plain_log_ticks(axes.yaxis)
    else:
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:,g}")
        axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_aspect("equal")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="upper left", fontsize="x-small", ncols=2 if len(set(groups)) > 12 else 1)
    axes.set_title(f"{title}\n{len(actual):,} rows, MAPE {100 * mape:.1f} %")
    save_figure(figure, path)


def _draw_reference_lines(axes: Axes, values: Floats, *, from_zero: bool) -> None:
    ends = np.asarray([0.0 if from_zero else 0.8 * values.min(), (1.1 if from_zero else 1.25) * values.max()])
    axes.plot(ends, ends, color="black", linewidth=1, label="predicted = actual")
    axes.plot(ends, 1.2 * ends, color="black", linewidth=0.8, linestyle="--", label="20 % above and below")
    axes.plot(ends, 0.8 * ends, color="black", linewidth=0.8, linestyle="--")


def _draw_groups(axes: Axes, predicted: Floats, actual: Floats, groups: npt.NDArray[np.str_]) -> None:
    names = sorted(set(groups.tolist()))
    with_names = len(names) <= _MOST_LEGEND_GROUPS
    for index, name in enumerate(names):
        rows = groups == name
        axes.scatter(
            actual[rows],
            predicted[rows],
            s=14,
            alpha=0.7,
            linewidths=0,
            **look_of(index),
            label=f"{name} ({rows.sum():,})" if with_names else None,
        )
