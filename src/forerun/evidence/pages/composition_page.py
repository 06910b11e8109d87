"""Networks and the sums of their layers: a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.figure import check_plot_path, look_of, new_figure, plain_log_ticks, save_figure
from forerun.surface.report.tables import table

if TYPE_CHECKING:
    from forerun.adapters.classics.composition import Composition, CompositionRun

_TITLES = ("network", "batch", "layers", "step", "95 %", "sum of layers", "composed")


def composition_page(found: CompositionRun) -> RenderableType:
    """One line per network and batch size, then the mean overshoot before and after."""
    rows = found.compositions
    made = table(_TITLES, map(_cells, rows), left=_TITLES[:1], fold=_TITLES[:1])
    left_out = sorted({name for row in rows for name in row.left_out})
    lines = [
        f"Mean overshoot: sum of layers {_mean([row.overshoot_before for row in rows]):+.1%}, "
        f"composed {_mean([row.overshoot_after for row in rows]):+.1%}; mean error of the composed step "
        f"{_mean([abs(row.overshoot_after) for row in rows]):.1%}."
    ]
    if left_out:
        lines.append(f"In the steps but in no sum: {', '.join(left_out)}.")
    if num_unstable := found.run.report.num_unstable:
        lines.append(f"{num_unstable} measurements are marked unstable.")
    return Group(made, Text(""), *(Text(line) for line in [*lines, f"Records: {found.run.records}"]))


def _cells(row: Composition) -> tuple[str, ...]:
    noise = row.relative_noise
    return (
        row.network,
        str(row.batch_size),
        str(row.num_layers),
        format_duration_s(row.measured_s),
        "-" if noise is None else f"±{100 * noise:.0f} %",
        f"{format_duration_s(row.sum_of_layers_s)} ({row.overshoot_before:+.0%})",
        f"{format_duration_s(row.composed_s)} ({row.overshoot_after:+.0%})",
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def plot_compositions(path: Path, panels: Mapping[str, Sequence[Composition]]) -> None:
    """Sum of layers and composed step over the measured step, one panel per machine.

    Args:
        path: File to write.
        panels: Rows by title.

    Raises:
        UsageError, FailureError: The file cannot be written, or has another ending than .png.
    """
    check_plot_path(path)
    figure = new_figure(width_in=5.2 * len(panels), height_in=4.6)
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        measured_ms = [1e3 * row.measured_s for row in rows]
        series = {
            "sum of layers alone": [1e3 * row.sum_of_layers_s for row in rows],
            "composed": [1e3 * row.composed_s for row in rows],
        }
        for index, (label, values_ms) in enumerate(series.items()):
            look = look_of(index)
            axes.scatter(
                measured_ms, values_ms, label=label, color=look["color"], marker=look["marker"], s=26
            )
        ends = (0.8 * min(measured_ms), 1.25 * max(measured_ms))
        axes.plot(ends, ends, color="0.5", linewidth=1, label="equal to the step")
        axes.set(
            xscale="log", yscale="log", xlabel="measured step [ms]", ylabel="from layers [ms]", title=title
        )
        for axis in (axes.xaxis, axes.yaxis):
            plain_log_ticks(axis)
        axes.grid(visible=True, which="both", alpha=0.25)
        axes.legend(fontsize=8)
    save_figure(figure, path)
