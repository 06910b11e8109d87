"""The pages a person reads after ``forerun forecast``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.tables import bare_table
from forerun.surface.report.wording import format_percent, format_usd

if TYPE_CHECKING:
    from forerun.jobs.backtest import Backtest
    from forerun.jobs.forecasting.forecast import CurveForecast
    from forerun.jobs.forecasting.forecast_answer import Advice, RunForecast, RunOutcome
    from forerun.jobs.trade_off import TradeOff

__all__ = ["backtest_page", "forecast_page", "trade_off_page"]

_NEVER = "not by the end"


def forecast_page(answer: RunForecast) -> RenderableType:
    """A forecast as a page."""
    parts: list[RenderableType] = [_title(answer), Text(""), _headline(answer), Text("")]
    if answer.times:
        parts += [_clocks(answer), Text("")]
    parts += [_advice(answer.advice), Text(""), _forecasters(answer.curve_forecast), _rests_on(answer)]
    if answer.notes:
        parts += [Text("Notes", style="bold"), *(Text(f"  - {note}") for note in answer.notes)]
    return Group(*parts)


def _title(answer: RunForecast) -> Text:
    found = answer.curve_forecast
    curve = found.curve
    return Text.assemble(
        (answer.run, "bold"),
        f": {curve.metric}, {len(curve)} points to {curve.unit} {curve.epochs[-1]:g} of "
        f"{found.end_epoch:g} ({format_percent(found.progress)} done)",
    )


def _headline(answer: RunForecast) -> Table:
    table = bare_table()
    table.add_column("")
    table.add_column("likely", justify="right")
    table.add_column("80 % interval", justify="right")
    table.add_column("90 % interval", justify="right")
    found = answer.curve_forecast
    final = found.final
    table.add_row(
        f"{found.curve.metric} at the end",
        f"{final.value:.4g}",
        f"{final.low_80:.4g} to {final.high_80:.4g}",
        f"{final.low_90:.4g} to {final.high_90:.4g}",
    )
    if found.target is not None:
        _add_target(table, answer, found.target.value)
    if answer.outcome is not None:
        _add_outcome(table, found, answer.outcome)
    return table


def _add_outcome(table: Table, found: CurveForecast, came: RunOutcome) -> None:
    inside = "inside" if came.is_inside_90 else "outside"
    table.add_row(f"{found.curve.metric} as it came", f"{came.final_value:.4g}", "", inside)
    if found.target is not None:
        reached = came.reached_epoch
        words = "never" if reached is None else f"{found.curve.unit} {reached:g}"
        table.add_row("target as it came", words, "", "")


def _add_target(table: Table, answer: RunForecast, target: float) -> None:
    found = answer.curve_forecast
    unit = found.curve.unit
    if found.reached_epoch is not None:
        table.add_row(f"target {target:g}", f"reached at {unit} {found.reached_epoch:g}", "", "")
        return
    table.add_row(f"target {target:g} by the end", format_percent(found.probability_at_end), "", "")
    p10, p50, p90 = found.epochs_to_target
    table.add_row(
        f"{unit}s to the target",
        _ranked(found.likely_epoch, "{:,.1f}"),
        f"{_ranked(p10, '{:,.1f}')} to {_ranked(p90, '{:,.1f}')}",
        "",
    )
    steps = answer.steps_per_epoch
    if steps is not None and unit == "epoch":
        table.add_row(
            "steps to the target",
            _ranked(p50 * steps, "{:,.0f}"),
            f"{_ranked(p10 * steps, '{:,.0f}')} to {_ranked(p90 * steps, '{:,.0f}')}",
            "",
        )


def _ranked(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else _NEVER


def _clocks(answer: RunForecast) -> Table:
    table = bare_table()
    for heading in ("on", "epoch", "to target, p50", "p90", "left, p50", "whole run", "cost p50", "p90"):
        table.add_column(heading, justify="left" if heading == "on" else "right")
    for entry in answer.times:
        has_target = answer.curve_forecast.target is not None
        cost = entry.cost_usd
        table.add_row(
            Text(entry.clock.device),
            format_duration_s(entry.clock.epoch_time_s.value),
            _duration(entry.total_s[1]) if has_target else "-",
            _duration(entry.total_s[2]) if has_target else "-",
            _duration(entry.left_s[1]) if has_target else "-",
            format_duration_s(entry.end_s.value),
            _usd(cost[1]) if has_target and cost is not None else "-",
            _usd(cost[2]) if has_target and cost is not None else "-",
        )
    return table


def _duration(value_s: float) -> str:
    return format_duration_s(value_s) if math.isfinite(value_s) else _NEVER


def _usd(value: float) -> str:
    return format_usd(value) if math.isfinite(value) else _NEVER


def _advice(advice: Advice) -> Text:
    return Text.assemble(
        ("Stop" if advice.should_stop else "Go on", "bold"),
        f": {advice.reason}; the next {advice.gain_unit} gains {advice.gain_next:.3g}",
    )


def _forecasters(found: CurveForecast) -> Table:
    table = bare_table()
    table.add_column("forecaster")
    table.add_column("weight", justify="right")
    table.add_column("at the end", justify="right")
    for name, weight in found.weights.items():
        table.add_row(name, format_percent(weight), f"{found.finals[name]:.4g}")
    return table


def _rests_on(answer: RunForecast) -> Text:
    found = answer.curve_forecast
    words = f"\nRests on {found.tier}; interval from {found.num_runs} back-tests"
    words += (
        f", which 90 % intervals covered in {format_percent(answer.coverage)} of the cases"
        if answer.coverage is not None
        else ""
    )
    return Text(words + ("" if found.is_calibrated else " (uncalibrated)"))


def backtest_page(answer: Backtest) -> RenderableType:
    """A back-test as tables."""
    mixtures = {f"mixture, {tier}": row for tier, row in answer.mixture_errors.items()}
    parts: list[RenderableType] = [
        Text(f"{answer.num_runs} runs of {answer.num_jobs} jobs, cut at a share of their length"),
        Text(""),
        Text("Mean absolute error of the final value (1 - accuracy, or loss over first loss)", style="bold"),
        _cut_table("forecaster", answer.cuts, {**answer.errors, **mixtures}, "{:.3f}"),
    ]
    if answer.coverage_90:
        parts += [
            Text(""),
            Text("Coverage of 90 % intervals, the run's job left out", style="bold"),
            _cut_table("tier", answer.cuts, answer.coverage_90, "{:.0%}"),
            Text(""),
            Text("Their mean width", style="bold"),
            _cut_table("tier", answer.cuts, answer.width_90, "{:.3f}"),
        ]
    else:
        parts += [Text(""), Text("one job only: no interval can be tested on another (uncalibrated)")]
    return Group(*parts)


def _cut_table(
    heading: str, cuts: Sequence[float], rows: Mapping[str, Mapping[float, float]], form: str
) -> Table:
    table = bare_table()
    table.add_column(heading)
    for cut in cuts:
        table.add_column(format_percent(cut), justify="right")
    for name, row in rows.items():
        table.add_row(name, *(form.format(row[cut]) if cut in row else "-" for cut in cuts))
    return table


def trade_off_page(answer: TradeOff) -> RenderableType:
    """Configurations against each other, the Pareto front marked by a star."""
    table = bare_table()
    for heading in (
        "",
        "configuration",
        "device",
        "epoch",
        "epochs to target",
        "to target, p50",
        "whole run",
        "end",
    ):
        table.add_column(heading, justify="left" if heading in ("", "configuration", "device") else "right")
    for point, is_on_front in zip(answer.points, answer.is_on_front, strict=True):
        table.add_row(
            "*" if is_on_front else "",
            Text(point.name),
            Text(point.device),
            format_duration_s(point.epoch_time_s.value),
            _ranked(point.epochs_to_target, "{:,.1f}"),
            _duration(point.time_to_target_s[1]),
            format_duration_s(point.end_time_s.value),
            f"{point.final_value.value:.4g}",
        )
    words = "no configuration beats those with a star in both time and value at the end"
    return Group(table, Text(""), Text(words))
