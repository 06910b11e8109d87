"""Tables of the accuracy page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from forerun.evidence.fitting.evaluation import ErrorMetrics


def error_cells(found: ErrorMetrics) -> tuple[str, ...]:
    """Number of rows, MAPE, median and 90th percentile as cells."""
    figures = (found.mape, found.median_ape, found.p90_ape)
    return (f"{found.n:,}", *(f"{100 * value:.1f} %" for value in figures))


def markdown_table(header: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """A table in Markdown."""
    lines = [
        " | ".join(header),
        " | ".join(["---"] * len(header)),
        *(" | ".join(map(str, row)) for row in rows),
    ]
    return "".join(f"| {line} |\n" for line in lines)
