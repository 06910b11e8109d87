"""The pages of ``forerun forecast batches``, ``networks``, ``scaling`` and ``law``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_count, format_duration_s
from forerun.surface.report.wording import format_percent, format_usd, range_words

if TYPE_CHECKING:
    from forerun.jobs.fit_curve import CurveFit
    from forerun.jobs.forecast_tables import BatchForecast, CurvePoint, NetworkForecast, NetworkValue
    from forerun.jobs.scaling import PricedFrontier, ScalingForecast

from forerun.surface.report.tables import table

__all__ = ["batches_page", "curve_fit_page", "networks_page", "scaling_page"]

_MOST_POINTS = 12


def batches_page(answer: BatchForecast) -> RenderableType:
    """Steps against the batch size."""
    critical = answer.law.critical_batch_size
    words = (
        f"steps = {answer.law.least_steps:,.0f} (1 + {critical:,.0f} / batch): at a batch of {critical:,.0f} "
        "twice the least steps are needed"
        if math.isfinite(critical)
        else "steps fall as 1 / batch: no batch size measured is large enough to show an end of that"
    )
    steps = _grid("batch size", "steps", "epochs", "measured steps")
    for row in answer.points:
        steps.add_row(
            f"{row.batch_size:,}",
            f"{row.steps:,.0f}",
            _or_dash(row.epochs, "{:,.1f}"),
            _or_dash(row.measured_steps, "{:,.0f}"),
        )
    error = f"worst error at the points it was fitted to: {format_percent(answer.law.worst_error)}"
    return Group(Text(words), Text(""), steps, Text(""), Text(error))


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def networks_page(answer: NetworkForecast) -> RenderableType:
    """Networks never trained, or left out: values beside what their own runs say, and the curve of one alone."""
    has_actual = answer.left_out
    table = _grid(
        "network",
        "value",
        "predicted",
        "range",
        *(("actual", "runs", "error") if has_actual else ()),
        "mostly by",
    )
    notes = []
    for name, values in answer.networks.items():
        for value in values:
            found = value.predicted
            heaviest = max(found.candidates, key=lambda form: form.weight)
            table.add_row(
                Text(name),
                value.name,
                f"{found.value:.4g}",
                f"{found.low:.4g} to {found.high:.4g}",
                *(_actual_cells(value) if has_actual else ()),
                f"{heaviest.name} ({format_percent(heaviest.weight)})",
            )
            notes += [f"{name}, {value.note}"] if value.note else []
    parts: list[RenderableType] = [table]
    for name, points in answer.curves.items():
        if len(answer.curves) == 1:
            words = f"Loss of {name} after k {answer.unit}, 1 / (b0 k + b1) + b2:"
            parts += [Text(""), Text(words), _curve_table(points)]
    parts += [Text(""), Text("from " + ", ".join(answer.features) + "; the device takes no part")]
    return Group(*parts, *(Text(f"- {note}") for note in notes))


def _actual_cells(value: NetworkValue) -> tuple[str, str, str]:
    if value.actual is None or value.lowest is None or value.highest is None:
        return "-", "-", "-"
    error = "-" if value.error is None else format_percent(value.error)
    if value.error_in_loss is not None:
        error = f"{value.error_in_loss:.1g} loss"
    return f"{value.actual:.4g}", f"{value.lowest:.4g} to {value.highest:.4g}", error


def _curve_table(points: Sequence[CurvePoint]) -> Table:
    """A dozen points of a curve; the error is |predicted - actual| / actual."""
    table = _grid("k", "predicted", "actual", "error")
    apart = max(1, -(-len(points) // _MOST_POINTS))
    for point in [p for i, p in enumerate(points) if i == 0 or (i + 1) % apart == 0 or p is points[-1]]:
        table.add_row(
            f"{point.k:,}",
            f"{point.predicted:.4f}",
            "-" if point.actual is None else f"{point.actual:.4f}",
            "-" if point.error is None else format_percent(point.error),
        )
    errors = [point.error for point in points if point.error is not None]
    if errors:
        table.add_row("mean of all", "", "", format_percent(sum(errors) / len(errors)))
    return table


def curve_fit_page(answer: CurveFit) -> RenderableType:
    """Coefficients of a law with their errors."""
    fit, curve = answer.fit, answer.curve
    table = _grid("coefficient", "value", "error", "unit")
    units = (f"1 / ({curve.metric} x {curve.unit})", f"1 / {curve.metric}", curve.metric)
    for name, deviation, unit in zip(("b0", "b1", "b2"), fit.deviations, units, strict=True):
        error = f"± {deviation:.2g}" if math.isfinite(deviation) else "not determined"
        table.add_row(name, f"{getattr(fit, name):.5g}", error, unit)
    lines = [
        f"Residual: {fit.rmse:.4g} (root mean square)"
        + ("" if answer.r2 is None else f", R2 {answer.r2:.4f}"),
    ]
    if answer.steps_per_epoch is not None:
        lines.append(
            f"An epoch is {answer.steps_per_epoch:g} steps: b0 per epoch {fit.b0 * answer.steps_per_epoch:.5g}"
        )
    if answer.target is not None and answer.reached_at is not None:
        reached = f"at {curve.unit} {answer.reached_at:,.0f}" if math.isfinite(answer.reached_at) else "never"
        lines.append(f"{answer.target}: {reached}")
    title = (
        f"{answer.run}: {curve.metric}(k) = 1 / (b0 k + b1) + b2, k in {curve.unit}s, {len(curve):,} points"
    )
    notes = [f"- {note}" for note in curve.notes]
    return Group(Text(title), Text(""), table, Text(""), *(Text(line) for line in [*lines, *notes]))


def scaling_page(answer: ScalingForecast) -> RenderableType:
    """The law, the best training for each budget and target, and its time and price on each device."""
    found = answer.law.coefficients()
    law = _grid("coefficient", "value", "90 % interval")
    for name, value in found.items():
        law.add_row(name, f"{value.value:.3g}", range_words(value, "{:.3g}".format))
    best = _grid("asked", "parameters", "tokens", "loss", "work [FLOP]")
    for asked in answer.answers:
        best.add_row(asked.question, *_best_cells(asked))
    parts: list[RenderableType] = [
        Text(f"loss = E + A / parameters^alpha + B / tokens^beta, from {answer.law.num_runs} sizes"),
        *(Text(""), law, Text(""), best),
    ]
    if answer.rates:
        prices = _grid("asked", "on", "device hours", "time", "cost")
        for asked in answer.answers:
            for price in asked.prices:
                cost = "-" if price.cost_usd is None else format_usd(price.cost_usd.value)
                on = price.device if price.num_devices == 1 else f"{price.num_devices} {price.device}"
                hours = (
                    f"{price.device_hours.value:,.3g} ({range_words(price.device_hours, '{:,.3g}'.format)})"
                )
                prices.add_row(asked.question, on, hours, format_duration_s(price.time_s.value), cost)
        parts += [Text(""), prices]
    return Group(*parts, Text(""), *(Text(f"- {note}") for note in answer.notes))


def _best_cells(asked: PricedFrontier) -> tuple[str, str, str, str]:
    best = asked.best
    if best is None:
        return ("none reaches it", "-", "-", "-")
    sizes = (
        f"{format_count(i.value)} ({range_words(i, format_count)})" for i in (best.parameters, best.tokens)
    )
    loss = f"{best.loss.value:.3f} ({range_words(best.loss, '{:.3f}'.format)})"
    return (*sizes, loss, f"{best.flop.value:.3g}")  # type: ignore[return-value]  # two sizes


def _grid(*headings: str) -> Table:
    return table(headings, left=headings[:1], fold=headings)
