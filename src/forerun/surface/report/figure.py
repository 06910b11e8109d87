"""Shared parts of all plots: figures without a display, colours, markers, and early checks of files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import FailureError, UsageError
from forerun.base.extras import needing, require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    from forerun.prediction.estimate import Interval

__all__ = [
    "COLOURS",
    "MARKERS",
    "PLOT_SUFFIXES",
    "STEP_TIMES",
    "Floats",
    "TimeAxis",
    "check_plot_path",
    "draw_band",
    "drawn",
    "look_of",
    "make_plot_folder",
    "new_figure",
    "number_labels",
    "plain_log_ticks",
    "save_figure",
]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")

Floats = npt.NDArray[np.float64]

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
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index // len(COLOURS) % len(MARKERS)],
    }


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


def save_figure(figure: Figure, path: Path) -> None:
    """Writes a figure.

    Raises:
        FailureError: The file cannot be written.
    """
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise FailureError(f"the plot '{path}' could not be written: {error.strerror or error}") from error
