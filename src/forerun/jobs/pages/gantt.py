"""Gantt charts of a schedule: one bar per job and device, policies below each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import FailureError
from forerun.jobs.schedule import PolicyOutcome, Schedule
from forerun.jobs.scheduling.outcome import Stretch
from forerun.surface.report.figure import COLOURS, check_plot_path, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["device_rows", "gantt_chart"]

_MOST_LEGEND_JOBS = 16
_SMALLEST_NAME_PT = 4.5
_MOST_DEVICES_SHOWN = 256
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def gantt_chart(path: Path, answer: Schedule) -> None:
    """Writes the chart: time to the right, a row per device, a colour (and beyond eight jobs a hatch) per job.

    A name stands in its longest bar where it has room. A triangle above the rows is an arrival, a white line in a bar a
    restart, a diamond in the job's colour its deadline, tied to the job's end by a line and edged red where missed.

    Raises:
        UsageError, FailureError: There is nothing to draw or too much, or the file cannot be written.
    """
    check_plot_path(path)
    drawn = [outcome for outcome in answer.outcomes if outcome.stretches]
    if not drawn:
        raise FailureError("a Gantt chart needs jobs on devices, got none")
    if answer.num_devices > _MOST_DEVICES_SHOWN:
        raise FailureError(
            f"a Gantt chart shows at most {_MOST_DEVICES_SHOWN} devices, the cluster has {answer.num_devices}; leave "
            "out --plot"
        )
    rows_in = min(9.0, max(1.4, 0.3 * answer.num_devices))
    figure = new_figure(
        width_in=10.0 if len(answer.outcomes[0].finish_times) <= _MOST_LEGEND_JOBS else 14.0,
        height_in=1.2 + (rows_in + 0.5) * len(drawn),
    )
    panels = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
    names = [finish.job for finish in drawn[0].finish_times]
    longest_s = max(s.end_s for outcome in drawn for s in outcome.stretches)
    unit_s, unit = _time_unit(longest_s)
    for axes, outcome in zip(panels, drawn, strict=True):
        _draw(axes, outcome, names, unit_s, longest_s, answer.devices_by_node)
        axes.set_xlim(0, 1.01 * longest_s / unit_s)
    panels[-1].set_xlabel(f"time [{unit}]")
    figure.suptitle(f"{len(names)} jobs on {answer.cluster}")
    handles, labels = panels[0].get_legend_handles_labels()
    marks = [pair for pair in zip(handles, labels, strict=True) if pair[1] in _MARKS]
    bars = [pair for pair in zip(handles, labels, strict=True) if pair[1] not in _MARKS]
    shown = [*(bars if len(names) <= _MOST_LEGEND_JOBS else ()), *marks]
    if shown:
        figure.legend(
            [handle for handle, _ in shown],
            [label for _, label in shown],
            loc="outside lower center",
            ncols=min(8, len(shown)),
            fontsize="small",
        )
    save_figure(figure, path)


def device_rows(
    stretches: Sequence[Stretch], devices_by_node: Sequence[int]
) -> list[tuple[Stretch, tuple[int, ...]]]:
    """Rows of the devices of each stretch, in the order of their starts.

    Devices are numbered through all nodes. A job that changes keeps the devices it had where it can; otherwise it gets
    the first that are free on the node.
    """
    first, total = [], 0
    for number in devices_by_node:
        first.append(total)
        total += number
    free_from_s = [0.0] * total
    last_job = [""] * total
    found = []
    for stretch in sorted(stretches, key=lambda s: (s.start_s, s.end_s, s.job)):
        rows: list[int] = []
        for share in stretch.placement:
            node = range(first[share.node], first[share.node] + devices_by_node[share.node])
            free = [row for row in node if free_from_s[row] <= stretch.start_s + 1e-6]
            free.sort(key=lambda row: (last_job[row] != stretch.job, row))
            rows += free[: share.num_workers]
        for row in rows:
            free_from_s[row], last_job[row] = stretch.end_s, stretch.job
        found.append((stretch, tuple(sorted(rows))))
    return found


def _time_unit(longest_s: float) -> tuple[float, str]:
    if longest_s < 7200:
        return 60.0, "min"
    return (3600.0, "h") if longest_s < 5 * 86400 else (86400.0, "days")


def _draw(
    axes: Axes,
    outcome: PolicyOutcome,
    names: list[str],
    unit_s: float,
    longest_s: float,
    devices_by_node: Sequence[int],
) -> None:
    placed = device_rows(outcome.stretches, devices_by_node)
    for index, name in enumerate(names):
        own = [(stretch, rows) for stretch, rows in placed if stretch.job == name]
        bars = [(row, stretch) for stretch, rows in own for row in rows]
        axes.barh(
            [row for row, _ in bars],
            [(stretch.end_s - stretch.start_s) / unit_s for _, stretch in bars],
            left=[stretch.start_s / unit_s for _, stretch in bars],
            height=0.92,
            color=_colour(index),
            hatch=_HATCHES[index // len(COLOURS) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
        if own:
            _write_name(axes, name, _colour(index), own, unit_s, longest_s)
    colours = {name: _colour(index) for index, name in enumerate(names)}
    _draw_marks(axes, outcome, placed, colours, unit_s, longest_s)
    num_devices = sum(devices_by_node)
    axes.set_ylim(num_devices - 0.5, -0.5)
    axes.set_ylabel("device")
    axes.set_yticks(range(0, num_devices, 1 + (num_devices - 1) // 12))
    _draw_node_borders(axes, devices_by_node)
    hours = outcome.metrics.average_completion_s / 3600
    axes.set_title(f"{outcome.policy}: average completion {hours:.2f} h", fontsize="medium", loc="left")
    axes.grid(visible=True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_marks(
    axes: Axes,
    outcome: PolicyOutcome,
    placed: list[tuple[Stretch, tuple[int, ...]]],
    colours: Mapping[str, str],
    unit_s: float,
    longest_s: float,
) -> None:
    """Arrivals after the start, restarts, and deadlines within the time that is drawn."""
    last: dict[str, tuple[Stretch, tuple[int, ...]]] = {}
    restarts = []
    for stretch, rows in placed:
        if stretch.job in last and rows:
            restarts += [(stretch.start_s / unit_s, row) for row in rows]
        last[stretch.job] = (stretch, rows)
    arrivals = sorted({f.arrival_s / unit_s for f in outcome.finish_times if f.arrival_s > 0})
    mark: dict[str, Any] = {"linestyle": "none", "zorder": 5}
    if arrivals:
        top = [-0.5] * len(arrivals)
        axes.plot(
            arrivals, top, marker=7, color="#333333", markersize=6, clip_on=False, label=_MARKS[0], **mark
        )
    if restarts:
        axes.plot(*_columns(restarts), marker="|", color="white", markersize=11, markeredgewidth=2.2, **mark)
        axes.plot(
            [], [], marker="|", color="#777777", markersize=11, markeredgewidth=2.2, label=_MARKS[1], **mark
        )
    labels = set()
    for finish in outcome.finish_times:
        if finish.job not in last or finish.deadline_s > longest_s:
            continue
        stretch, rows = last[finish.job]
        # In the lower part of the row, clear of the names.
        row, is_missed = (rows[0] if rows else 0) + 0.29, stretch.end_s > finish.deadline_s
        spot_s, label = finish.deadline_s, _MARKS[3] if is_missed else _MARKS[2]
        axes.plot(
            [stretch.end_s / unit_s, spot_s / unit_s], [row, row], color="#777777", linewidth=0.8, zorder=0.6
        )
        axes.plot(
            [spot_s / unit_s],
            [row],
            marker="D",
            color=colours[finish.job],
            markeredgecolor="#D00000" if is_missed else "#111111",
            markeredgewidth=1.6 if is_missed else 1.0,
            markersize=5.5,
            clip_on=False,
            label=None if label in labels else label,
            **mark,
        )
        labels.add(label)


def _columns(spots: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in spots], [y for _, y in spots]


_MARKS = ("arrival", "restart", "deadline, kept", "deadline, missed")


def _draw_node_borders(axes: Axes, devices_by_node: Sequence[int]) -> None:
    row = 0
    for number in devices_by_node[:-1]:
        row += number
        axes.axhline(row - 0.5, color="#555555", linewidth=0.8)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _write_name(
    axes: Axes,
    name: str,
    colour: str,
    own: list[tuple[Stretch, tuple[int, ...]]],
    unit_s: float,
    longest_s: float,
) -> None:
    """The job's name in its longest bar, smaller where the bar is narrow, if the bar has room for it."""
    stretch, rows = max(own, key=lambda pair: pair[0].end_s - pair[0].start_s)
    width_s = stretch.end_s - stretch.start_s
    # The chart is about an inch narrower than its figure; a letter is 0.6 of the size of its font wide.
    figure = axes.get_figure(root=True)
    assert figure is not None
    room_in = width_s / longest_s * (figure.get_figwidth() - 1)
    size_pt = min(7.0, 72 * room_in / (0.6 * (len(name) + 1)))
    if not rows or size_pt < _SMALLEST_NAME_PT:
        return
    middle = (stretch.start_s + width_s / 2) / unit_s
    row = rows[(len(rows) - 1) // 2]
    # A plain patch behind the name: letters cannot be read on a hatch.
    patch = {"boxstyle": "square,pad=0.12", "facecolor": colour, "edgecolor": "none"}
    axes.text(
        middle, row, name, ha="center", va="center", fontsize=size_pt, color="white", bbox=patch, zorder=6
    )
