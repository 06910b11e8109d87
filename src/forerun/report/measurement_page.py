"""The page of a session of measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.units import format_bytes, format_duration_s

if TYPE_CHECKING:
    from forerun.api.measure_jobs import MeasurementRun

__all__ = ["measurement_page"]

_MOST_ROWS = 60
_WIDEST_SUBJECT = 26  # of 80 columns; longer ones are folded
_PLAIN = (None, "fp32", "nchw", "none")  # values that are left out
_LAYER_SIZES = ("in_size", "sequence_length", "in_features", "out_features", "kernel", "stride", "mode")


def measurement_page(run: MeasurementRun) -> RenderableType:
    """One line per measurement, then the counts of the session."""
    shown = run.measurements[:_MOST_ROWS]
    parts: list[RenderableType] = [_table(shown)]
    if (num_more := len(run.measurements) - len(shown)) > 0:
        parts.append(Text(f"... and {num_more:,} more"))
    return Group(*parts, Text(""), *(Text(line) for line in _sentences(run)))


def _table(rows: Sequence[Measurement]) -> Table:
    has_epochs = any("epoch_time_s" in row.results for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("what", no_wrap=True)
    table.add_column("setting", overflow="fold")
    for title in ("step", "95 %", *(("epoch", "accuracy") if has_epochs else ())):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("remark", overflow="fold")
    for row in rows:
        cells = [
            row.subject,
            _setting(row),
            *_times(row),
            *(_epoch(row) if has_epochs else ()),
            _remark(row),
        ]
        table.add_row(*map(Text, cells))
    return table


def _times(row: Measurement) -> tuple[str, str]:
    """Median step and half its interval, relative."""
    summary = row.summary
    if summary is None:
        return "-", "-"
    median_s = summary.median_s
    half = 0.5 * (summary.high_s - summary.low_s) / median_s if median_s else 0.0
    return format_duration_s(median_s), f"±{100 * half:.0f} %"


def _epoch(row: Measurement) -> tuple[str, str]:
    """Time of an epoch, and the accuracy on held-out images after the last one."""
    results: Mapping[str, Any] = row.results
    accuracies = [results[name] for name in results if name.startswith("val_accuracy_")]
    epoch_s = results.get("epoch_time_s")
    return (
        "-" if epoch_s is None else format_duration_s(epoch_s),
        f"{100 * accuracies[-1]:.1f} %" if accuracies else "-",
    )


def _remark(row: Measurement) -> str:
    if row.outcome is not Outcome.DONE:
        return f"{row.outcome}: {row.reason}"
    summary, words = row.summary, _of_several(row.results)
    if summary is not None and not summary.is_stable:
        words.append(f"unstable: {summary.reason}")
    return "; ".join(words)


def _of_several(results: Mapping[str, Any]) -> list[str]:
    """The result of a measurement of several devices."""
    words = []
    if "synchronisation_s" in results:
        words.append(f"synchronisation {format_duration_s(results['synchronisation_s'])}")
    if "bandwidth_bytes_per_s" in results:
        rate = f"{format_bytes(results['bandwidth_bytes_per_s'])}/s"
        words.append(f"latency {format_duration_s(results['latency_s'])}, bandwidth {rate}")
    return words


def _setting(row: Measurement) -> str:
    asked = row.parameters
    words = [f"batch size {asked['batch_size']}"] if "batch_size" in asked else []
    words += [f"{asked['num_devices']} devices"] if "num_devices" in asked else []
    if row.kind is JobKind.LAYER:
        words += [f"{name} {asked[name]}" for name in _LAYER_SIZES if name in asked]
    words += [
        str(asked[name]) for name in ("precision", "layout", "optimizer") if asked.get(name) not in _PLAIN
    ]
    return ", ".join([*words, *(["compiled"] if asked.get("compile") else [])])


def _sentences(run: MeasurementRun) -> list[str]:
    counts = (
        ", ".join(f"{count} {outcome}" for outcome, count in run.report.outcomes.items()) or "nothing new"
    )
    lines = [f"This session: {counts}; {run.report.num_skipped} were in the records already."]
    if run.report.num_unstable:
        lines.append(
            f"{run.report.num_unstable} are marked unstable: measure them again on a quieter machine."
        )
    if run.report.num_lost:
        lines.append(f"{run.report.num_lost} were lost with their node; run the same command again.")
    return [*lines, f"Records: {run.records}"]
