"""Plots of forecasts: a curve with its bands, and accuracy against time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.report.figure import COLOURS, check_plot_path, look_of, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from forerun.api.trade_off import TradeOff
    from forerun.convergence.backtest_summary import Backtest
    from forerun.convergence.forecast import CurveForecast
    from forerun.prediction.forecast_answer import RunForecast
    from forerun.prediction.trade_off import TradeOffPoint

__all__ = ["backtest_plot", "forecast_plot", "trade_off_plot"]

_BASELINES = ("optimus", "pow3", "best so far", "scaled siblings")


def forecast_plot(
    path: Path,
    answer: RunForecast,
) -> None:
    """Observed points, the forecast with its 80 and 90 % bands, the target and where it is crossed.

    Args:
        path: File to write.
        answer: The forecast.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.5, height_in=4.8)
    axes = figure.subplots()
    found, came = answer.curve_forecast, answer.outcome
    curve = found.curve
    _draw_bands(axes, found)
    axes.plot(curve.epochs, curve.values, "o", color="black", markersize=3.5, label="observed")
    if came is not None:
        axes.plot(came.epochs, came.values, ".", color=COLOURS[1], markersize=5, label="as it came")
    if found.target is not None:
        _draw_target(axes, found, found.target.value)
    axes.set(xlabel=curve.unit, ylabel=curve.metric)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(_title(answer), fontsize="medium")
    save_figure(figure, path)


def _title(answer: RunForecast) -> str:
    found = answer.curve_forecast
    final = found.final
    words = f"{answer.run}: {found.curve.metric} at {found.curve.unit} {found.end_epoch:g} "
    return words + f"{final.value:.4g} ({final.low_90:.4g} to {final.high_90:.4g}), from {found.tier}"


def _draw_bands(axes: Axes, found: CurveForecast) -> None:
    if not len(found.epochs):
        return
    axes.fill_between(
        found.epochs,
        found.low_90,
        found.high_90,
        color=COLOURS[0],
        alpha=0.15,
        linewidth=0,
        label="90 % interval",
    )
    axes.fill_between(
        found.epochs,
        found.low_80,
        found.high_80,
        color=COLOURS[0],
        alpha=0.25,
        linewidth=0,
        label="80 % interval",
    )
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
    """Value at the end against the time of the whole run, the Pareto front joined by a line.

    Args:
        path: File to write.
        answer: The configurations.
        unit: Label of the y axis.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.0, height_in=4.8)
    axes = figure.subplots()
    points = answer.points
    for index, point in enumerate(points):
        _draw_configuration(axes, index, point)
    front = sorted(
        (p.end_time_s.value / 3600, p.final_value.value)
        for p, is_on_front in zip(points, answer.is_on_front, strict=True)
        if is_on_front
    )
    axes.plot([t for t, _ in front], [v for _, v in front], color="black", linewidth=1, label="Pareto front")
    axes.set_xscale("log")
    axes.set(xlabel="time of the whole run [h]", ylabel=unit)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(f"{len(points)} configurations, bars are 90 % intervals", fontsize="medium")
    save_figure(figure, path)


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
    """Mean error of the final value against the share of the run, our mixtures thick, each forecaster alone thin.

    Args:
        path: File to write.
        answer: The back-test.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.5, height_in=4.8)
    axes = figure.subplots()
    for index, (name, row) in enumerate(answer.mixture_errors.items()):
        _draw_errors(axes, row, f"forerun, {name}", linewidth=2.4, **look_of(index))
    for index, name in enumerate(_BASELINES, start=len(answer.mixture_errors)):
        if name in answer.errors:
            look = look_of(index)
            _draw_errors(axes, answer.errors[name], name, linewidth=1.0, linestyle="--", **look)
    axes.set_yscale("log")
    axes.set(xlabel="share of the run that was seen [%]", ylabel="mean error of the value at the end")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(f"{answer.num_runs} runs of {answer.num_jobs} jobs", fontsize="medium")
    save_figure(figure, path)


def _draw_errors(axes: Axes, row: Mapping[float, float], label: str, **look: Any) -> None:
    axes.plot([100 * cut for cut in row], list(row.values()), label=label, **look)
