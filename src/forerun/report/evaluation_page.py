"""Errors of predictions against measurements, beside the baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent
from forerun.units import format_duration_s

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


def evaluation_page(evaluation: Mapping[str, Any]) -> RenderableType:
    """Errors as tables: forerun and the baselines on the same rows, then forerun by group.

    Args:
        evaluation: What ``forerun evaluate --json`` prints: the errors, and under ``baselines`` and
            ``groups`` the same fields by name. Errors are fractions, times in seconds.
    """
    predictors = {"forerun": evaluation, **evaluation.get("baselines", {})}
    parts: list[RenderableType] = [
        Text("Absolute percentage errors of the step time: mean (MAPE), median and 90th percentile"),
        Text(""),
        error_table("predictor", predictors),
    ]
    if evaluation.get("groups"):
        parts += [Text(""), error_table("forerun by group", evaluation["groups"])]
    if evaluation.get("notes"):
        parts += [Text(""), *(Text(f"- {note}") for note in evaluation["notes"])]
    return Group(*parts)


def error_table(heading: str, rows: Mapping[str, Mapping[str, Any] | None]) -> Table:
    """Errors by name, a line each; what could not be had is a dash.

    Args:
        heading: Title of the names.
        rows: Errors as ``ErrorMetrics`` has them, by name.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(heading, overflow="fold")
    for title, _ in _COLUMNS:
        table.add_column(title, justify="right", no_wrap=title != "in 90 % interval")
    for name, errors in rows.items():
        table.add_row(Text(name), *(Text(_cell(field, (errors or {}).get(field))) for _, field in _COLUMNS))
    return table


def _cell(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    if field == "n":
        return f"{value:,.0f}"
    if field == "r2":
        return f"{value:.3f}"
    return format_duration_s(value) if field in _TIMES else format_percent(value)
