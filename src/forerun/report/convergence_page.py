"""The pages of ``forerun forecast --batches`` and ``--networks``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent

if TYPE_CHECKING:
    from forerun.api.forecast_tables import BatchForecast, NetworkForecast

__all__ = ["batches_page", "networks_page"]


def batches_page(answer: BatchForecast) -> RenderableType:
    """Steps against the batch size."""
    critical = answer.law.critical_batch_size
    words = (
        f"steps = {answer.law.least_steps:,.0f} (1 + {critical:,.0f} / batch): at a batch of {critical:,.0f} "
        "twice the least steps are needed"
        if math.isfinite(critical)
        else "steps fall as 1 / batch: no batch size measured is large enough to show an end of that"
    )
    table = _grid("batch size", "steps", "epochs", "measured steps")
    for row in answer.points:
        table.add_row(
            f"{row.batch_size:,}",
            f"{row.steps:,.0f}",
            "-" if row.epochs is None else f"{row.epochs:,.1f}",
            "-" if row.measured_steps is None else f"{row.measured_steps:,.0f}",
        )
    error = f"worst error at the points it was fitted to: {format_percent(answer.law.worst_error)}"
    return Group(Text(words), Text(""), table, Text(""), Text(error))


def networks_page(answer: NetworkForecast) -> RenderableType:
    """Networks never trained."""
    table = _grid("network", answer.value_name, "range", "mostly by")
    for name, found in answer.predictions.items():
        heaviest = max(found.candidates, key=lambda form: form.weight)
        table.add_row(
            Text(name),
            f"{found.value:.4g}",
            f"{found.low:.4g} to {found.high:.4g}",
            f"{heaviest.name} ({format_percent(heaviest.weight)})",
        )
    return Group(table, Text(""), Text("from " + ", ".join(answer.features) + "; the device takes no part"))


def _grid(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left")
    return table
