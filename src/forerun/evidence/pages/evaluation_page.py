"""The pages of ``forerun evaluate`` and ``forerun fit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent

if TYPE_CHECKING:
    from forerun.evidence.evaluate import Evaluation
    from forerun.evidence.fit import FitResult
    from forerun.evidence.fitting.evaluation import ErrorMetrics

__all__ = ["error_table", "evaluation_page", "fit_page"]

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
    cells = [
        [name, *(_cell(field, getattr(errors, field, None)) for _, field in _COLUMNS)]
        for name, errors in rows.items()
    ]
    titles = [heading, *(title for title, _ in _COLUMNS)]
    return table(titles, cells, left=(heading,), fold=(heading, "in 90 % interval"))


def _cell(field: str, value: float | None) -> str:
    if value is None:
        return "-"
    if field == "n":
        return f"{value:,.0f}"
    if field == "r2":
        return f"{value:.3f}"
    return format_duration_s(value) if field in _TIMES else format_percent(value)


_TARGETS = {"epoch": "; times of one epoch, as in the CSV", "step": "", "layer": ""}


def fit_page(fit: FitResult) -> RenderableType:
    """Summary, errors and provenance of a fit."""
    facts = fit.model.provenance
    parts: list[RenderableType] = [Text(fit.summary), Text("")] if fit.summary else []
    parts += [
        Text(
            f"{facts['num_rows']:,} rows of {facts['num_configurations']:,} configurations "
            f"on {', '.join(facts['devices'])}; {', '.join(facts['software'])}"
        ),
        Text(f"Errors on rows that were not fitted: {fit.split}{_TARGETS[fit.target]}"),
        Text(""),
        _errors(fit.metrics, "{:.4g} s".format if fit.target == "epoch" else format_duration_s),
    ]
    if fit.notes:
        parts += [Text(""), *(Text(f"- {note}") for note in fit.notes)]
    return Group(*parts)


def _errors(metrics: Mapping[str, ErrorMetrics], time_text: Callable[[float], str]) -> Table:
    titles = ("model", "rows", "R2", "MAE", "RMSE", "MAPE", "median", "90th")
    made = table(titles, left=titles[:1], fold=titles[:1])
    made.columns[0].min_width = 15
    for name, errors in metrics.items():
        made.add_row(
            Text(name),
            f"{errors.n:,}",
            "-" if errors.r2 is None else f"{errors.r2:.4f}",
            time_text(errors.mae),
            time_text(errors.rmse),
            *(format_percent(getattr(errors, field)) for field in ("mape", "median_ape", "p90_ape")),
        )
    return made
