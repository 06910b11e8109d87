"""Charts of forecasts and schedules: curves with their bands, accuracy against time, devices of jobs over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.errors import FailureError
from forerun.jobs.schedule import PolicyOutcome, Schedule
from forerun.jobs.scheduling.outcome import Stretch
from forerun.surface.report.figure import (
    COLOURS,
    drawn,
    look_of,
    plain_log_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from forerun.jobs.fitted_laws import CurveFit, ScalingForecast
    from forerun.jobs.forecast import TradeOff, TradeOffPoint
    from forerun.jobs.forecast_tables import NetworkForecast
    from forerun.jobs.forecasting.backtest import Backtest
    from forerun.jobs.forecasting.forecast import CurveForecast
    from forerun.jobs.forecasting.forecast_answer import RunForecast

_POINTS_OF_A_FRONTIER = 40
_BASELINES = ("optimus", "pow3", "best so far", "scaled siblings")


@contextmanager
def _chart(path: Path, title: str, grid: Mapping[str, Any] | None = None) -> Iterator[Axes]:
    """The axes of a chart of its own, with its grid, legend and title, written to the file in the end."""
    with drawn(path) as figure:
        axes = figure.subplots()
        yield axes
        axes.grid(visible=True, alpha=0.3, **(grid or {}))
        axes.legend(loc="best", fontsize="small")
        axes.set_title(title, fontsize="medium")


def forecast_plot(path: Path, answer: RunForecast) -> None:
    """Observed points, the forecast with its 80 and 90 % bands, the target and where it is crossed."""
    found, came = answer.curve_forecast, answer.outcome
    curve = found.curve
    with _chart(path, _title(answer)) as axes:
        _draw_bands(axes, found)
        axes.plot(curve.epochs, curve.values, "o", color="black", markersize=3.5, label="observed")
        if came is not None:
            axes.plot(came.epochs, came.values, ".", color=COLOURS[1], markersize=5, label="as it came")
        if found.target is not None:
            _draw_target(axes, found, found.target.value)
        axes.set(xlabel=curve.unit, ylabel=curve.metric)


def _title(answer: RunForecast) -> str:
    found = answer.curve_forecast
    final = found.final
    words = f"{answer.run}: {found.curve.metric} at {found.curve.unit} {found.end_epoch:g} "
    return words + f"{final.value:.4g} ({final.low_90:.4g} to {final.high_90:.4g}), from {found.tier}"


def _draw_bands(axes: Axes, found: CurveForecast) -> None:
    if not len(found.epochs):
        return
    for low, high, alpha, words in (
        (found.low_90, found.high_90, 0.15, "90 % interval"),
        (found.low_80, found.high_80, 0.25, "80 % interval"),
    ):
        axes.fill_between(found.epochs, low, high, color=COLOURS[0], alpha=alpha, linewidth=0, label=words)
    axes.plot(found.epochs, found.values, color=COLOURS[0], label="forecast of the trend")
    axes.axvline(float(found.curve.epochs[-1]), color="#888888", linewidth=0.8, linestyle=":")


def _draw_target(axes: Axes, found: CurveForecast, value: float) -> None:
    p10, p50, p90 = found.epochs_to_target
    axes.axhline(value, color=COLOURS[2], linestyle="--", linewidth=1, label=f"target {value:g}")
    if not math.isfinite(p50):
        return
    # A lucky evaluation comes before the trend, which is what the line of the forecast shows.
    words = f"first reached: p50 {found.curve.unit} {p50:.1f}"
    words += f", p90 {p90:.1f}" if math.isfinite(p90) else ", p90 not by the end"
    ends = [p10, p90 if math.isfinite(p90) else found.end_epoch]
    axes.plot(ends, [value, value], color=COLOURS[2], linewidth=4, alpha=0.5, label=words)
    axes.plot([p50], [value], "D", color=COLOURS[2], markersize=6)


def trade_off_plot(path: Path, answer: TradeOff) -> None:
    """Value at the end against the time of the whole run; a line joins the Pareto front."""
    points = answer.points
    with _chart(path, f"{len(points)} configurations, bars are 90 % intervals") as axes:
        for index, point in enumerate(points):
            _draw_configuration(axes, index, point)
        front = sorted(
            (p.end_time_s.value / 3600, p.final_value.value)
            for p, is_on_front in zip(points, answer.is_on_front, strict=True)
            if is_on_front
        )
        axes.plot(*zip(*front, strict=True), color="black", linewidth=1, label="Pareto front")
        axes.set_xscale("log")
        plain_log_ticks(axes.xaxis)
        axes.set(xlabel="time of the whole run [h]", ylabel=answer.metric or "value at the end")


def _draw_configuration(axes: Axes, index: int, point: TradeOffPoint) -> None:
    time, value = point.end_time_s, point.final_value
    axes.errorbar(
        [time.value / 3600],
        [value.value],
        xerr=[[(time.value - time.low) / 3600], [(time.high - time.value) / 3600]],
        yerr=[[value.value - value.low], [value.high - value.value]],
        linestyle="none",
        capsize=2,
        alpha=0.8,
        label=f"{point.name}, {point.device}",
        **look_of(index),
    )


def backtest_plot(path: Path, answer: Backtest) -> None:
    """Mean error of the final value against the share of the run, our mixtures thick, each forecaster alone thin."""
    mixtures = {f"forerun, {name}": row for name, row in answer.mixture_errors.items()}
    alone = {name: answer.errors[name] for name in _BASELINES if name in answer.errors}
    with _chart(path, f"{answer.num_runs} runs of {answer.num_jobs} jobs", {"which": "both"}) as axes:
        for index, (name, row) in enumerate({**mixtures, **alone}.items()):
            line = {"linewidth": 2.4} if name in mixtures else {"linewidth": 1.0, "linestyle": "--"}
            look: dict[str, Any] = {**look_of(index), **line}
            axes.plot([100 * cut for cut in row], list(row.values()), label=name, **look)
        axes.set_yscale("log")
        axes.set(xlabel="share of the run that was seen [%]", ylabel="mean error of the value at the end")


def curve_fit_plot(path: Path, answer: CurveFit) -> None:
    """The points of a log and the law that was fitted to them."""
    curve, fit = answer.curve, answer.fit
    r2 = "" if answer.r2 is None else f", R2 {answer.r2:.3f}"
    words = f"fitted: 1 / ({fit.b0:.4g} k + {fit.b1:.4g}) + {fit.b2:.4g}"
    with _chart(path, f"{answer.run}: {len(curve):,} points{r2}") as axes:
        axes.plot(curve.epochs, curve.values, ".", color="#888888", markersize=4, label="real")
        axes.plot(curve.epochs, fit.losses(curve.epochs), color=COLOURS[1], linewidth=2, label=words)
        axes.axhline(fit.b2, color=COLOURS[2], linestyle="--", linewidth=1, label=f"b2 = {fit.b2:.4g}")
        if answer.target is not None:
            axes.axhline(answer.target.value, color=COLOURS[0], linestyle=":", label=str(answer.target))
        axes.set(xlabel=curve.unit, ylabel=curve.metric, ylim=(0, None))


def networks_plot(path: Path, answer: NetworkForecast) -> None:
    """Predicted curve of each network beside those of its own runs, or its predicted values beside the actual ones."""
    if answer.curves:
        _draw_network_curves(path, answer)
    else:
        _draw_network_values(path, answer)


def scaling_plot(path: Path, answer: ScalingForecast) -> None:
    """Losses of the runs against their work, and the least loss that each budget buys, with its 90 % interval."""
    work = [run.flop for run in answer.runs]
    asked = [found.best.flop.value for found in answer.answers if found.best is not None]
    budgets = np.geomspace(min(work), max([*work, *asked]), _POINTS_OF_A_FRONTIER)
    bests = [answer.law.at_budget(float(budget)).loss for budget in budgets]
    with _chart(
        path, f"{len(answer.runs)} runs, the best of each of {answer.law.num_runs} sizes fitted"
    ) as axes:
        axes.plot(work, [run.loss for run in answer.runs], "o", color="#888888", markersize=3.5, label="runs")
        axes.plot(budgets, [best.value for best in bests], color=COLOURS[0], label="best size for the work")
        ends = ([best.low for best in bests], [best.high for best in bests])
        axes.fill_between(budgets, *ends, color=COLOURS[0], alpha=0.15, linewidth=0, label="90 % interval")
        for found in answer.answers:
            if found.best is not None:
                axes.plot([found.best.flop.value], [found.best.loss.value], "D", label=found.question)
        axes.set_xscale("log")
        axes.set(xlabel="work, 6 x parameters x tokens [FLOP]", ylabel="loss")


def _draw_network_curves(path: Path, answer: NetworkForecast) -> None:
    names = list(answer.curves)
    columns = min(3, len(names))
    num_rows = -(-len(names) // columns)
    size = (7.5, 4.6) if columns == 1 else (3.6 * columns, 3.0 * num_rows)
    with drawn(path, width_in=size[0], height_in=size[1]) as figure:
        grid = figure.subplots(num_rows, columns, squeeze=False)
        for axes in grid.flat[len(names) :]:
            axes.set_visible(False)
        for axes, name in zip(grid.flat, names, strict=False):
            _draw_network_curve(axes, name, answer)


def _draw_network_curve(axes: Axes, name: str, answer: NetworkForecast) -> None:
    points = answer.curves[name]
    k = [point.k for point in points]
    for index, (label, losses) in enumerate(answer.actual_curves[name].items(), start=1):
        axes.plot(k, losses, linewidth=1, alpha=0.9, color=look_of(index)["color"], label=f"real, {label}")
    axes.plot(k, [point.predicted for point in points], color=COLOURS[0], linewidth=2.2, label="predicted")
    axes.set(xlabel=answer.unit, ylabel="loss", ylim=(0, None))
    axes.grid(visible=True, alpha=0.3)
    errors = [point.error for point in points if point.error is not None]
    words = f", mean error {100 * sum(errors) / len(errors):.0f} %" if errors else ""
    axes.set_title(f"{name}{words}", fontsize="medium")
    axes.legend(loc="upper right", fontsize="x-small")


def _draw_network_values(path: Path, answer: NetworkForecast) -> None:
    title = f"from {', '.join(answer.features)} of the other networks"
    with _chart(path, title, {"axis": "y"}) as axes:
        for index, name in enumerate(answer.networks):
            value = answer.value_of(name, answer.value_name)
            found = value.predicted
            low, high = found.value - found.low, found.high - found.value
            look: dict[str, Any] = {"fmt": "D", "color": COLOURS[0], "capsize": 3}
            label = None if index else "predicted, and the range of its laws"
            axes.errorbar([index], [found.value], yerr=[[low], [high]], label=label, **look)
            if value.actual is not None and value.lowest is not None and value.highest is not None:
                axes.plot([index + 0.15] * 2, [value.lowest, value.highest], color=COLOURS[1], linewidth=1)
                label = None if index else "actual: mean, lowest and highest run"
                axes.plot([index + 0.15], [value.actual], "o", color=COLOURS[1], label=label)
        axes.set_xticks(range(len(answer.networks)), list(answer.networks), rotation=15)
        axes.set(ylabel=answer.value_name, ylim=(0, None))


_MOST_LEGEND_JOBS = 16
_SMALLEST_NAME_PT = 4.5
_MOST_DEVICES_SHOWN = 256
_MARK: Mapping[str, Any] = {"linestyle": "none", "zorder": 5}
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")


def gantt_chart(path: Path, answer: Schedule) -> None:
    """Writes the chart: time to the right, a row per device, a colour (and beyond eight jobs a hatch) per job.

    A name stands in its longest bar where it has room. A triangle above the rows is an arrival, a white line in a bar a
    restart, a diamond in the job's colour its deadline, tied to the job's end by a line and edged red where missed.

    Raises:
        UsageError, FailureError: There is nothing to draw or too much, or the file cannot be written.
    """
    shown = [outcome for outcome in answer.outcomes if outcome.stretches]
    if not shown:
        raise FailureError("a Gantt chart needs jobs on devices, got none")
    if answer.num_devices > _MOST_DEVICES_SHOWN:
        raise FailureError(
            f"a Gantt chart shows at most {_MOST_DEVICES_SHOWN} devices, the cluster has {answer.num_devices}; leave "
            "out --plot"
        )
    names = [finish.job for finish in shown[0].finish_times]
    has_few = len(names) <= _MOST_LEGEND_JOBS
    rows_in = min(9.0, max(1.4, 0.3 * answer.num_devices))
    longest_s = max(s.end_s for outcome in shown for s in outcome.stretches)
    with drawn(
        path, width_in=10.0 if has_few else 14.0, height_in=1.2 + (rows_in + 0.5) * len(shown)
    ) as figure:
        panels = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for axes, outcome in zip(panels, shown, strict=True):
            _Gantt(axes, outcome, names, longest_s, answer.devices_by_node).draw()
        panels[-1].set_xlabel(f"time [{_time_unit(longest_s)[1]}]")
        figure.suptitle(f"{len(names)} jobs on {answer.cluster}")
        entries = list(zip(*panels[0].get_legend_handles_labels(), strict=True))
        bars = [entry for entry in entries if entry[1] not in _MARKS] if has_few else []
        if shown_entries := [*bars, *(entry for entry in entries if entry[1] in _MARKS)]:
            handles, labels = zip(*shown_entries, strict=True)
            columns = min(8, len(labels))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="small")


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
            # A bar that stays in its row reads as one job; one that jumps as two.
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


_Placed = tuple[Stretch, tuple[int, ...]]
"""A stretch with the rows of its devices."""

_MARKS = ("arrival", "restart", "deadline, kept", "deadline, missed")


class _Gantt:
    """The chart of one policy: a panel with a row for each device."""

    def __init__(
        self,
        axes: Axes,
        outcome: PolicyOutcome,
        names: Sequence[str],
        longest_s: float,
        devices_by_node: Sequence[int],
    ) -> None:
        self.axes, self.outcome, self.longest_s = axes, outcome, longest_s
        self.unit_s = _time_unit(longest_s)[0]
        self.devices_by_node = devices_by_node
        self.colours = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}
        # With more jobs than colours the hatch changes too.
        rounds = {name: index // len(COLOURS) for index, name in enumerate(names)}
        self.hatches = {name: _HATCHES[number % len(_HATCHES)] for name, number in rounds.items()}
        self.placed = device_rows(outcome.stretches, devices_by_node)

    def draw(self) -> None:
        """Bars, marks, borders of nodes, and the title."""
        for name in self.colours:
            own = [(stretch, rows) for stretch, rows in self.placed if stretch.job == name]
            self._draw_bars(name, own)
            if own:
                self._write_name(name, own)
        self._draw_arrivals()
        self._draw_restarts()
        self._draw_deadlines()
        axes, num_devices = self.axes, sum(self.devices_by_node)
        axes.set(
            ylim=(num_devices - 0.5, -0.5), xlim=(0, 1.01 * self.longest_s / self.unit_s), ylabel="device"
        )
        axes.set_yticks(range(0, num_devices, 1 + (num_devices - 1) // 12))
        for border in np.cumsum(self.devices_by_node)[:-1]:
            axes.axhline(float(border) - 0.5, color="#555555", linewidth=0.8)
        hours = self.outcome.metrics.average_completion_s / 3600
        title = f"{self.outcome.policy}: average completion {hours:.2f} h"
        axes.set_title(title, fontsize="medium", loc="left")
        axes.grid(visible=True, axis="x", alpha=0.3)
        axes.set_axisbelow(True)

    def _draw_bars(self, name: str, own: Sequence[_Placed]) -> None:
        bars = [(row, stretch) for stretch, rows in own for row in rows]
        self.axes.barh(
            [row for row, _ in bars],
            [(stretch.end_s - stretch.start_s) / self.unit_s for _, stretch in bars],
            left=[stretch.start_s / self.unit_s for _, stretch in bars],
            height=0.92,
            color=self.colours[name],
            hatch=self.hatches[name],
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )

    def _draw_arrivals(self) -> None:
        """Triangles above the rows, for jobs that come after the start."""
        arrivals = sorted({f.arrival_s / self.unit_s for f in self.outcome.finish_times if f.arrival_s > 0})
        if arrivals:
            look: dict[str, Any] = {"marker": 7, "color": "#333333", "markersize": 6, "clip_on": False}
            self.axes.plot(arrivals, [-0.5] * len(arrivals), label=_MARKS[0], **look, **_MARK)

    def _draw_restarts(self) -> None:
        """White lines in the bars of jobs that start again."""
        seen: set[str] = set()
        spots: list[tuple[float, int]] = []
        for stretch, rows in self.placed:
            if stretch.job in seen:
                spots += [(stretch.start_s / self.unit_s, row) for row in rows]
            seen.add(stretch.job)
        if spots:
            look: dict[str, Any] = {"marker": "|", "markersize": 11, "markeredgewidth": 2.2, **_MARK}
            self.axes.plot(*zip(*spots, strict=True), color="white", **look)
            self.axes.plot([], [], color="#777777", label=_MARKS[1], **look)

    def _draw_deadlines(self) -> None:
        """Diamonds at the deadlines within the time that is drawn, tied to the end of their job."""
        last = {stretch.job: (stretch, rows) for stretch, rows in self.placed}
        labels = set()
        for finish in self.outcome.finish_times:
            if finish.job not in last or finish.deadline_s > self.longest_s:
                continue
            stretch, rows = last[finish.job]
            # In the lower part of the row, clear of the names.
            row, is_missed = (rows[0] if rows else 0) + 0.29, stretch.end_s > finish.deadline_s
            end, spot = stretch.end_s / self.unit_s, finish.deadline_s / self.unit_s
            label = _MARKS[3] if is_missed else _MARKS[2]
            self.axes.plot([end, spot], [row, row], color="#777777", linewidth=0.8, zorder=0.6)
            self.axes.plot(
                [spot],
                [row],
                marker="D",
                color=self.colours[finish.job],
                markeredgecolor="#D00000" if is_missed else "#111111",
                markeredgewidth=1.6 if is_missed else 1.0,
                markersize=5.5,
                clip_on=False,
                label=None if label in labels else label,
                **_MARK,
            )
            labels.add(label)

    def _write_name(self, name: str, own: Sequence[_Placed]) -> None:
        """The job's name in its longest bar, smaller where the bar is narrow, if the bar has room for it."""
        stretch, rows = max(own, key=lambda pair: pair[0].end_s - pair[0].start_s)
        width_s = stretch.end_s - stretch.start_s
        # The chart is about an inch narrower than its figure; a letter is 0.6 of the size of its font wide.
        figure = self.axes.get_figure(root=True)
        assert figure is not None
        room_in = width_s / self.longest_s * (figure.get_figwidth() - 1)
        size_pt = min(7.0, 72 * room_in / (0.6 * (len(name) + 1)))
        if not rows or size_pt < _SMALLEST_NAME_PT:
            return
        middle, row = (stretch.start_s + width_s / 2) / self.unit_s, rows[(len(rows) - 1) // 2]
        # A plain patch behind the name: letters cannot be read on a hatch.
        patch = {"boxstyle": "square,pad=0.12", "facecolor": self.colours[name], "edgecolor": "none"}
        look: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size_pt, "color": "white"}
        self.axes.text(middle, row, name, bbox=patch, zorder=6, **look)
