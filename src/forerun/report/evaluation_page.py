"""Errors of predictions against measurements, beside the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent
from forerun.units import format_duration_s

if TYPE_CHECKING:
    from forerun.fitting.evaluation import ErrorMetrics
    from forerun.fitting.records_evaluation import Evaluation

__all__ = ["error_table", "evaluation_page"]

_COLUMNS = (
    ("rows", "n"),
    ("MAPE", "mape"),
    ("median", "median_ape"),
    ("90th", "p90_ape"),
    ("RMSE", "rmse"),
    ("R2", "r2"),
    ("in 90 % interval", "coverage_90"),
)
_TIMES = ("rmse", "mae")


def evaluation_page(evaluation: Evaluation) -> RenderableType:
    """Errors as tables: forerun and the baselines on the same rows, then forerun by group."""
    predictors = {"forerun": evaluation.metrics, **evaluation.baselines}
    parts: list[RenderableType] = [
        Text("Absolute percentage errors of the step time: mean (MAPE), median and 90th percentile"),
        Text(""),
        error_table("predictor", predictors),
    ]
    if evaluation.groups:
        parts += [Text(""), error_table("forerun by group", evaluation.groups)]
    if evaluation.notes:
        parts += [Text(""), *(Text(f"- {note}") for note in evaluation.notes)]
    return Group(*parts)


def error_table(heading: str, rows: Mapping[str, ErrorMetrics | None]) -> Table:
    """Errors by name, one line each; a missing error is a dash.

    Args:
        heading: Title of the names.
        rows: Errors by name; fractions, times in seconds.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(heading, overflow="fold")
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=title != "in 90 % interval")
    for name, errors in rows.items():
        table.add_row(
            Text(name), *(Text(_cell(field, getattr(errors, field, None))) for _, field in _COLUMNS)
        )
    return table


def _cell(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    if field == "n":
        return f"{value:,.0f}"
    if field == "r2":
        return f"{value:.3f}"
    return format_duration_s(value) if field in _TIMES else format_percent(value)
