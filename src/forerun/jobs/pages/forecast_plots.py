"""Plots of forecasts: a curve with its bands, and accuracy against time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.surface.report.figure import COLOURS, drawn, look_of, plain_log_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from forerun.jobs.backtest import Backtest
    from forerun.jobs.fit_curve import CurveFit
    from forerun.jobs.forecast_tables import NetworkForecast
    from forerun.jobs.forecasting.forecast import CurveForecast
    from forerun.jobs.forecasting.forecast_answer import RunForecast
    from forerun.jobs.scaling import ScalingForecast
    from forerun.jobs.trade_off import TradeOff, TradeOffPoint

__all__ = [
    "backtest_plot",
    "curve_fit_plot",
    "forecast_plot",
    "networks_plot",
    "scaling_plot",
    "trade_off_plot",
]

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
    axes.plot(found.epochs, found.values, color=COLOURS[0], label="forecast")
    axes.axvline(float(found.curve.epochs[-1]), color="#888888", linewidth=0.8, linestyle=":")


def _draw_target(axes: Axes, found: CurveForecast, value: float) -> None:
    p10, p50, p90 = found.epochs_to_target
    axes.axhline(value, color=COLOURS[2], linestyle="--", linewidth=1, label=f"target {value:g}")
    if not math.isfinite(p50):
        return
    words = f"reached: p50 {found.curve.unit} {p50:.1f}"
    words += f", p90 {p90:.1f}" if math.isfinite(p90) else ", p90 not by the end"
    ends = [p10, p90 if math.isfinite(p90) else found.end_epoch]
    axes.plot(ends, [value, value], color=COLOURS[2], linewidth=4, alpha=0.5, label=words)
    axes.plot([p50], [value], "D", color=COLOURS[2], markersize=6)


def trade_off_plot(path: Path, answer: TradeOff, unit: str = "value at the end") -> None:
    """Value at the end, by its label ``unit``, against the time of the whole run; a line joins the Pareto front."""
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
        axes.set(xlabel="time of the whole run [h]", ylabel=unit)


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
