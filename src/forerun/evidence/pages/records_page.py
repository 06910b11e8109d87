"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_duration_s
from forerun.evidence.records.measurement import Measurement, measurement_document
from forerun.surface.report.tables import table

__all__ = ["counts_table", "record_page", "records_table"]

_KEY_LENGTH = 8


def counts_table(
    store: str, columns: Sequence[str], groups: Iterable[tuple[tuple[str, ...], int]]
) -> RenderableType:
    """Number of measurements for each combination of the columns."""
    counted = [*groups]
    rows = [(*(value or "-" for value in values), str(number)) for values, number in counted]
    total = sum(number for _, number in counted)
    made = table((*columns, "records"), rows, left=columns, fold=columns)
    return Group(made, Text(f"{total} measurements in {store}"))


def record_page(measurement: Measurement) -> RenderableType:
    """All fields of one measurement, a line each."""
    lines = Table.grid(padding=(0, 2, 0, 0))
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for name, value in measurement_document(measurement).items():
        if isinstance(value, Mapping):
            lines.add_row(Text(name), Text(""))
            for inner, figure in value.items():
                lines.add_row(Text(f"  {inner}"), Text(_shown(figure)))
        else:
            lines.add_row(Text(name), Text(_shown(value)))
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={_shown(figure)}" for name, figure in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return "-" if value in (None, "") else str(value)


def records_table(measurements: Iterable[Measurement]) -> RenderableType:
    """One line per measurement: subject, median with its interval, and notes."""
    words = ("what", "asked", "remark")
    titles = ("key", "what", "asked", "device", "median", "95 % interval", "remark")
    return table(titles, map(_cells, measurements), left=("key", "device", *words), fold=words)


def _cells(found: Measurement) -> tuple[str, ...]:
    asked = " ".join(f"{name}={value}" for name, value in found.parameters.items())
    summary = found.summary
    median = format_duration_s(summary.median_s) if summary else "-"
    interval = (
        f"{format_duration_s(summary.low_s)} to {format_duration_s(summary.high_s)}" if summary else "-"
    )
    remark = found.reason or str(found.outcome)
    if summary and not summary.is_stable:
        remark = f"unstable: {summary.reason}"
    return (
        found.key[:_KEY_LENGTH],
        found.subject,
        asked,
        found.circumstances.device,
        median,
        interval,
        remark,
    )
