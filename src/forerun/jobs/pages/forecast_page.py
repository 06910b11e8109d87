"""The pages a person reads after ``forerun forecast``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent, format_usd

if TYPE_CHECKING:
    from forerun.jobs.backtest import Backtest
    from forerun.jobs.forecasting.forecast import CurveForecast
    from forerun.jobs.forecasting.forecast_answer import Advice, RunForecast
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


def _grid(titles: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> Table:
    """A table whose first columns are words."""
    return table(titles, rows, left=titles[:words], fold=titles)


def _headline(answer: RunForecast) -> Table:
    found, came = answer.curve_forecast, answer.outcome
    metric, unit, final = found.curve.metric, found.curve.unit, found.final
    ends_80 = f"{final.low_80:.4g} to {final.high_80:.4g}"
    ends_90 = f"{final.low_90:.4g} to {final.high_90:.4g}"
    rows = [(f"{metric} at the end", f"{final.value:.4g}", ends_80, ends_90)]
    if found.target is not None:
        rows += _target_rows(answer, found.target.value)
    if came is not None:
        inside = "inside" if came.is_inside_90 else "outside"
        rows.append((f"{metric} as it came", f"{came.final_value:.4g}", "", inside))
        if found.target is not None:
            reached = "never" if came.reached_epoch is None else f"{unit} {came.reached_epoch:g}"
            rows.append(("target as it came", reached, "", ""))
    return _grid(("", "likely", "80 % interval", "90 % interval"), rows)


def _target_rows(answer: RunForecast, target: float) -> list[tuple[str, str, str, str]]:
    found = answer.curve_forecast
    unit = found.curve.unit
    if found.reached_epoch is not None:
        return [(f"target {target:g}", f"reached at {unit} {found.reached_epoch:g}", "", "")]
    p10, p50, p90 = found.epochs_to_target
    ends = f"{_ranked(p10, '{:,.1f}')} to {_ranked(p90, '{:,.1f}')}"
    rows = [
        (f"target {target:g} by the end", format_percent(found.probability_at_end), "", ""),
        (f"{unit}s to the target", _ranked(found.likely_epoch, "{:,.1f}"), ends, ""),
    ]
    steps = answer.steps_per_epoch
    if steps is not None and unit == "epoch":
        ends = f"{_ranked(p10 * steps, '{:,.0f}')} to {_ranked(p90 * steps, '{:,.0f}')}"
        rows.append(("steps to the target", _ranked(p50 * steps, "{:,.0f}"), ends, ""))
    return rows


def _ranked(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else _NEVER


def _clocks(answer: RunForecast) -> Table:
    titles = ("on", "epoch", "to target, p50", "p90", "left, p50", "whole run", "cost p50", "p90")
    has_target = answer.curve_forecast.target is not None
    rows = []
    for entry in answer.times:
        total_s, left_s, cost = entry.total_s, entry.left_s, entry.cost_usd
        to_target = [
            _duration(time_s) if has_target else "-" for time_s in (total_s[1], total_s[2], left_s[1])
        ]
        costs = ["-", "-"] if cost is None or not has_target else [_usd(cost[1]), _usd(cost[2])]
        epoch, whole = (format_duration_s(time.value) for time in (entry.clock.epoch_time_s, entry.end_s))
        rows.append((entry.clock.device, epoch, *to_target, whole, *costs))
    return _grid(titles, rows)


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
    rows = [
        (name, format_percent(weight), f"{found.finals[name]:.4g}") for name, weight in found.weights.items()
    ]
    return _grid(("forecaster", "weight", "at the end"), rows)


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
    cells = [[name, *(form.format(row[c]) if c in row else "-" for c in cuts)] for name, row in rows.items()]
    return _grid((heading, *map(format_percent, cuts)), cells)


def trade_off_page(answer: TradeOff) -> RenderableType:
    """Configurations against each other, the Pareto front marked by a star."""
    rows = [
        (
            "*" if is_on_front else "",
            point.name,
            point.device,
            format_duration_s(point.epoch_time_s.value),
            _ranked(point.epochs_to_target, "{:,.1f}"),
            _duration(point.time_to_target_s[1]),
            format_duration_s(point.end_time_s.value),
            f"{point.final_value.value:.4g}",
        )
        for point, is_on_front in zip(answer.points, answer.is_on_front, strict=True)
    ]
    times = ("epoch", "epochs to target", "to target, p50", "whole run", "end")
    words = "no configuration beats those with a star in both time and value at the end"
    return Group(_grid(("", "configuration", "device", *times), rows, words=3), Text(""), Text(words))
