"""Plots: figures without a display, their look, early checks of files, and charts that several commands draw."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.errors import FailureError, UsageError
from forerun.base.extras import needing, require
from forerun.base.kept import write_whole, writes
from forerun.base.units import GIB
from forerun.graph.graph import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from forerun.prediction.estimate import Interval
    from forerun.search.sweep import Sweep


PLOT_SUFFIXES = (".png", ".svg", ".pdf")


# Okabe and Ito 2008, "Color universal design": distinct to readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8A7A00")
# With more groups than colours the marker changes too, so that all groups look different.
MARKERS = ("o", "^", "s", "D", "v", "P", "X", "*")


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Times on an axis.

    Attributes:
        name: Name of the time.
        unit: Unit that is shown.
        per_second: Units in a second.
        is_log: True for a logarithmic axis.
    """

    name: str
    unit: str
    per_second: float
    is_log: bool

    def label(self, kind: str) -> str:
        """Label of the axis of measured (``actual``) or predicted times."""
        return f"{kind} {self.name} [{self.unit}]"


STEP_TIMES = TimeAxis("step time", "ms", 1e3, is_log=True)


def check_plot_path(path: Path) -> None:
    """Refuses a file that could not be written, before the work for it is done.

    Raises:
        UsageError: The suffix is not one of ``PLOT_SUFFIXES``, the folder does not exist, or matplotlib is missing.
    """
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise UsageError(f"a plot must end in one of {', '.join(PLOT_SUFFIXES)}, got '{path}'")
    require("a plot", "matplotlib")
    if not path.parent.is_dir():
        raise UsageError(f"the folder of the plot '{path}' does not exist; create it or choose another")


def make_plot_folder(path: Path) -> None:
    """Makes a folder for plots, with those above it.

    Raises:
        UsageError: A file lies there, or it cannot be made; or matplotlib is missing.
    """
    require("a plot", "matplotlib")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the folder of the plots '{path}' cannot be made: {error.strerror}; choose another"
        ) from error


def look_of(index: int) -> dict[str, Any]:
    """Colour and marker of the group with this number."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index // len(COLOURS) % len(MARKERS)]}


def draw_band(axes: Axes, x: Floats, y: Sequence[Interval], index: int, label: str) -> None:
    """A line through values with the band of their intervals."""
    look = look_of(index)
    axes.plot(x, [each.value for each in y], label=label, **look)
    ends = [each.low for each in y], [each.high for each in y]
    axes.fill_between(x, *ends, color=look["color"], alpha=0.15)


def new_figure(*, width_in: float, height_in: float) -> Figure:
    """An empty figure; without pyplot it saves through Agg and needs no display, window or closing."""
    with needing("a plot"):
        from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained")


@contextmanager
def drawn(path: Path, *, width_in: float = 7.5, height_in: float = 4.8) -> Iterator[Figure]:
    """A figure to draw on, which is written to its file in the end.

    Args:
        path: File to write, one of ``PLOT_SUFFIXES``.
        width_in: Width [inches].
        height_in: Height [inches].

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=width_in, height_in=height_in)
    yield figure
    save_figure(figure, path)


def number_labels(axes: Axes, values: Floats) -> None:
    """Labels the x axis at these values, leaving some out where labels would overlap."""
    shown = values[:: 1 + len(values) // 13]
    axes.set_xticks(shown, [f"{value:,.0f}" for value in shown])
    axes.minorticks_off()


def plain_log_ticks(axis: Axis) -> None:
    """Labels a logarithmic axis with numbers as people write them, some five over the range that is shown."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    if decades < 0.7:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=(1, 2, 5, 10)))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0,) if decades > 3 else (1.0, 2.0, 5.0)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


_KEPT: ContextVar[list[Figure] | None] = ContextVar("figures that are kept instead of written", default=None)


def kept_figure(draw: Callable[[Path, Any], None], answer: Any) -> Figure:
    """The figure that a function draws of an answer, instead of a file of it."""
    figures: list[Figure] = []
    token = _KEPT.set(figures)
    try:
        draw(Path("chart.png"), answer)
    finally:
        _KEPT.reset(token)
    return figures[-1]


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure.

    Raises:
        FailureError: The file cannot be written.
    """
    if (kept := _KEPT.get()) is not None:
        kept.append(figure)
        return
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format=path.suffix[1:].lower())
    with writes(path, FailureError):
        write_whole(path, drawn.getvalue())


MOST_LEGEND_GROUPS = 24
"""Groups up to which a legend tells them apart."""


def check_positive(first: Floats, second: Floats, *, what: str) -> None:
    """Refuses coordinates of points that a plot could not show.

    Raises:
        FailureError: There are none, not as many of each, or not all are above zero.
    """
    both = np.concatenate([first, second])
    if not first.size or first.shape != second.shape or not np.all(np.isfinite(both) & (both > 0)):
        raise FailureError(f"a plot of {what} needs at least one row, as many of each, and values above zero")


def in_natural_order(names: Sequence[str]) -> list[str]:
    """Each name once, numbers within it by value: batch 8 before batch 16."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]

    return sorted(set(names), key=key)


def scatter_groups(axes: Axes, groups: Sequence[str], x: Floats, y: Floats, *, size: float) -> None:
    """Points, a colour for each group, which the legend names with its number of rows."""
    names = np.asarray(groups)
    for index, name in enumerate(in_natural_order(groups)):
        rows = names == name
        label = f"{name} ({rows.sum():,})"
        axes.scatter(x[rows], y[rows], s=size, alpha=0.7, linewidths=0, label=label, **look_of(index))


def throughput_and_memory(path: Path, sweep: Sweep, *, title: str, chosen_batch_size: int) -> None:
    """Throughput with its 90 % band, and memory with the card's limit, against the batch size.

    Args:
        path: File to write.
        sweep: One device and precision over ascending batch sizes.
        title: Model, device and setup.
        chosen_batch_size: Batch size marked by a vertical line.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    with drawn(path, width_in=7.0, height_in=6.4) as figure:
        above, below = figure.subplots(2, 1, sharex=True)
        _draw_throughput(above, sweep)
        _draw_memory(below, sweep)
        for axes in (above, below):
            axes.axvline(
                chosen_batch_size, color="#555555", linestyle=":", label=f"batch {chosen_batch_size:,}"
            )
            axes.grid(visible=True, alpha=0.3)
            # Room for the legend above the curves and the limit.
            axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
            axes.legend(loc="upper left", fontsize="small", ncols=2)
        below.set_xlabel("batch size")
        figure.suptitle(title)


def _draw_throughput(axes: Axes, sweep: Sweep) -> None:
    low, high = sweep.throughput_low_samples_per_s[0, 0], sweep.throughput_high_samples_per_s[0, 0]
    axes.fill_between(sweep.batch_sizes, low, high, color=COLOURS[0], alpha=0.2, label="90 % interval")
    value = sweep.throughput_samples_per_s[0, 0]
    axes.plot(sweep.batch_sizes, value, color=COLOURS[0], marker="o", markersize=4, label="predicted")
    axes.set_xscale("log", base=2)
    axes.set_ylabel("throughput [samples/s]")


def _draw_memory(axes: Axes, sweep: Sweep) -> None:
    sizes, memory_gib = np.asarray(sweep.batch_sizes, dtype=float), sweep.peak_memory_bytes[0, 0] / GIB
    axes.plot(sizes, memory_gib, color=COLOURS[1], marker="o", markersize=4, label="peak memory")
    if (limit_gib := sweep.device_memory_bytes[0] / GIB) > 0:
        words = f"memory of the device, {limit_gib:.1f} GiB"
        axes.axhline(limit_gib, color="black", linestyle="--", label=words)
    # Labels at powers of two only, and not too many: a batch in between would be written over its neighbour.
    number_labels(axes, sizes[np.log2(sizes) % 1 == 0])
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
    predicted, actual = np.asarray(predicted_s, dtype=float), np.asarray(actual_s, dtype=float)
    check_positive(predicted, actual, what="predicted against actual times")
    mape = float(np.mean(np.abs(predicted - actual) / actual))
    with drawn(path, width_in=7.0, height_in=6.6) as figure:
        axes = figure.subplots()
        shown = (predicted * times.per_second, actual * times.per_second)
        _draw_reference_lines(axes, np.concatenate(shown), from_zero=not times.is_log)
        scatter_groups(axes, groups, shown[1], shown[0], size=14)
        axes.set(xlabel=times.label("actual"), ylabel=times.label("predicted"))
        if times.is_log:
            axes.set(xscale="log", yscale="log")
            # Equal ends, so that y = x runs from corner to corner.
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
        if len(set(groups)) <= MOST_LEGEND_GROUPS:
            axes.legend(loc="upper left", fontsize="x-small", ncols=2 if len(set(groups)) > 12 else 1)
        axes.set_title(f"{title}\n{len(actual):,} rows, MAPE {100 * mape:.1f} %")


def _draw_reference_lines(axes: Axes, values: Floats, *, from_zero: bool) -> None:
    ends = np.asarray([0.0 if from_zero else 0.8 * values.min(), (1.1 if from_zero else 1.25) * values.max()])
    axes.plot(ends, ends, color="black", linewidth=1, label="predicted = actual")
    axes.plot(ends, 1.2 * ends, color="black", linewidth=0.8, linestyle="--", label="20 % above and below")
    axes.plot(ends, 0.8 * ends, color="black", linewidth=0.8, linestyle="--")
