"""Tables of measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.records.documents import measurement_document
from forerun.records.measurement import Measurement
from forerun.units import format_duration_s

__all__ = ["counts_table", "record_page", "records_table"]

_KEY_LENGTH = 8


def counts_table(
    store: str, columns: Sequence[str], groups: Iterable[tuple[tuple[str, ...], int]]
) -> RenderableType:
    """Number of measurements for each combination of the columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    table.add_column("records", justify="right", no_wrap=True)
    total = 0
    for values, number in groups:
        table.add_row(*(Text(value or "-") for value in values), Text(str(number)))
        total += number
    return Group(table, Text(f"{total} measurements in {store}"))


def record_page(measurement: Measurement) -> RenderableType:
    """All fields of one measurement, a line each."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in measurement_document(measurement).items():
        if isinstance(value, Mapping):
            table.add_row(Text(name), Text(""))
            for inner, figure in value.items():
                table.add_row(Text(f"  {inner}"), Text(_shown(figure)))
        else:
            table.add_row(Text(name), Text(_shown(value)))
    return table


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
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("what", overflow="fold")
    table.add_column("asked", overflow="fold")
    table.add_column("device", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("95 % interval", justify="right", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for found in measurements:
        table.add_row(*(Text(cell) for cell in _cells(found)))
    return table


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
