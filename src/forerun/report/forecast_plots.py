"""Plots of forecasts: a curve with its bands, and accuracy against time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.report.figure import COLOURS, Floats, check_plot_path, look_of, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["backtest_plot", "forecast_plot", "trade_off_plot"]

_BASELINES = ("optimus", "pow3", "best so far", "scaled siblings")


def forecast_plot(
    path: Path,
    answer: Mapping[str, Any],
    observed: tuple[Floats, Floats],
    outcome: tuple[Floats, Floats] | None = None,
) -> None:
    """Observed points, the forecast with its 80 and 90 % bands, the target and where it is crossed.

    Args:
        path: File to write.
        answer: What ``forerun forecast --json`` prints.
        observed: Epochs and values seen, (k,) each.
        outcome: Epochs and values as they came afterwards, or None.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.5, height_in=4.8)
    axes = figure.subplots()
    _draw_bands(axes, answer, observed)
    axes.plot(*observed, "o", color="black", markersize=3.5, label="observed")
    if outcome is not None:
        axes.plot(*outcome, ".", color=COLOURS[1], markersize=5, label="as it came")
    if answer["target"] is not None:
        _draw_target(axes, answer)
    axes.set(xlabel=answer["unit"], ylabel=answer["metric"])
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(_title(answer), fontsize="medium")
    save_figure(figure, path)


def _title(answer: Mapping[str, Any]) -> str:
    final = answer["final_value"]
    words = f"{answer['run']}: {answer['metric']} at {answer['unit']} {answer['end_epoch']:g} "
    return words + f"{final['value']:.4g} ({final['low']:.4g} to {final['high']:.4g}), from {answer['tier']}"


def _draw_bands(axes: Axes, answer: Mapping[str, Any], observed: tuple[Floats, Floats]) -> None:
    points = answer["points"]
    if not points:
        return
    epochs = np.asarray([p["epoch"] for p in points])
    column = {
        k: np.asarray([p[k] for p in points]) for k in ("value", "low_90", "low_80", "high_80", "high_90")
    }
    axes.fill_between(
        epochs,
        column["low_90"],
        column["high_90"],
        color=COLOURS[0],
        alpha=0.15,
        linewidth=0,
        label="90 % interval",
    )
    axes.fill_between(
        epochs,
        column["low_80"],
        column["high_80"],
        color=COLOURS[0],
        alpha=0.25,
        linewidth=0,
        label="80 % interval",
    )
    axes.plot(epochs, column["value"], color=COLOURS[0], label="forecast")
    axes.axvline(float(observed[0][-1]), color="#888888", linewidth=0.8, linestyle=":")


def _draw_target(axes: Axes, answer: Mapping[str, Any]) -> None:
    value, times = answer["target"]["value"], answer["epochs_to_target"]
    axes.axhline(value, color=COLOURS[2], linestyle="--", linewidth=1, label=f"target {value:g}")
    if times["p50"] is None:
        return
    late = times["p90"] if times["p90"] is not None else answer["end_epoch"]
    words = f"reached: p50 {answer['unit']} {times['p50']:.1f}"
    words += f", p90 {times['p90']:.1f}" if times["p90"] is not None else ", p90 not by the end"
    axes.plot([times["p10"], late], [value, value], color=COLOURS[2], linewidth=4, alpha=0.5, label=words)
    axes.plot([times["p50"]], [value], "D", color=COLOURS[2], markersize=6)


def trade_off_plot(path: Path, answer: Mapping[str, Any], unit: str = "value at the end") -> None:
    """Value at the end against the time of the whole run, the Pareto front joined by a line.

    Args:
        path: File to write.
        answer: What ``forerun forecast --trade-off FILE --json`` prints.
        unit: Label of the y axis.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.0, height_in=4.8)
    axes = figure.subplots()
    rows = answer["configurations"]
    for index, row in enumerate(rows):
        _draw_configuration(axes, index, row)
    front = sorted(
        (r["end_time_s"]["value"] / 3600, r["final_value"]["value"]) for r in rows if r["is_on_pareto_front"]
    )
    axes.plot([t for t, _ in front], [v for _, v in front], color="black", linewidth=1, label="Pareto front")
    axes.set_xscale("log")
    axes.set(xlabel="time of the whole run [h]", ylabel=unit)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(f"{len(rows)} configurations, bars are 90 % intervals", fontsize="medium")
    save_figure(figure, path)


def _draw_configuration(axes: Axes, index: int, row: Mapping[str, Any]) -> None:
    time, value = row["end_time_s"], row["final_value"]
    axes.errorbar(
        [time["value"] / 3600],
        [value["value"]],
        xerr=[[(time["value"] - time["low"]) / 3600], [(time["high"] - time["value"]) / 3600]],
        yerr=[[value["value"] - value["low"]], [value["high"] - value["value"]]],
        linestyle="none",
        capsize=2,
        alpha=0.8,
        label=f"{row['name']}, {row['device']}",
        **look_of(index),
    )


def backtest_plot(path: Path, answer: Mapping[str, Any]) -> None:
    """Mean error of the final value against the share of the run, our mixtures thick, each forecaster alone thin.

    Args:
        path: File to write.
        answer: What ``forerun forecast --evaluate DIR --json`` prints.

    Raises:
        UsageError, FailureError: The file cannot be written.
    """
    check_plot_path(path)
    figure = new_figure(width_in=7.5, height_in=4.8)
    axes = figure.subplots()
    for index, (name, row) in enumerate(answer["mixture_errors"].items()):
        _draw_errors(axes, row, f"forerun, {name}", linewidth=2.4, **look_of(index))
    for index, name in enumerate(_BASELINES, start=len(answer["mixture_errors"])):
        if name in answer["errors"]:
            look = look_of(index)
            _draw_errors(axes, answer["errors"][name], name, linewidth=1.0, linestyle="--", **look)
    axes.set_yscale("log")
    axes.set(xlabel="share of the run that was seen [%]", ylabel="mean error of the value at the end")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="best", fontsize="small")
    axes.set_title(f"{answer['num_runs']} runs of {answer['num_jobs']} jobs", fontsize="medium")
    save_figure(figure, path)


def _draw_errors(axes: Axes, row: Mapping[str, float], label: str, **look: Any) -> None:
    axes.plot([100 * float(cut) for cut in row], list(row.values()), label=label, **look)
