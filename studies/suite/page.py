"""The page of a suite: predicted against measured, in all views of the suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s, format_flops_per_s
from forerun.evidence.fitting.evaluation import ErrorMetrics
from forerun.evidence.pages.evaluation_page import error_table
from forerun.surface.report.wording import format_percent

if TYPE_CHECKING:
    from studies.suite.comparison import FewShot, LargestBatch, MeasuredStep, SuiteComparison
    from studies.suite.run import SuiteRun


def suite_page(run: SuiteRun) -> RenderableType:
    """The page."""
    lines: list[RenderableType] = [Text(sentence) for sentence in _run_sentences(run)]
    found = run.comparison
    if found is not None:
        lines += [Text(""), *_comparison(found)]
    return Group(*lines)


def _run_sentences(run: SuiteRun) -> list[str]:
    sentences = [f"{run.num_predictions} jobs predicted on {run.device}, {run.num_measurements} measurements"]
    if run.outcomes:
        counts = ", ".join(f"{count} {outcome}" for outcome, count in run.outcomes.items())
        sentences.append(f"This run: {counts} in {format_duration_s(run.duration_s)}")
    return [*sentences, f"Folder: {run.folder}"]


def _comparison(found: SuiteComparison) -> list[RenderableType]:
    step_times = {"forerun, nothing measured": found.step_time, **found.baselines}
    when = "before" if found.is_predicted_before else "not all before"
    parts: list[RenderableType] = [
        Text(found.device, style="bold"),
        Text(f"predicted by {found.predictor}, {when} anything was measured"),
        Text(f"{found.step_time.n} of {found.num_planned} steps measured"),
        Text(""),
        error_table("step time", step_times),
        Text(""),
        error_table("forerun by group", found.groups),
        Text(""),
        error_table("after k measured steps, on the others", _few_shot(found.few_shot)),
        Text(""),
        *(Text(sentence) for sentence in _sentences(found)),
    ]
    if found.largest_batches:
        parts += [Text(""), _batches_table(found.largest_batches)]
    if found.kernels:
        parts += [Text(""), _kernels_table(found.kernels)]
    parts += [Text(""), _surprises_table(found.surprises())]
    return [*parts, *(Text(f"- {failure}") for failure in found.failures)]


def _few_shot(rows: Sequence[FewShot]) -> dict[str, ErrorMetrics | None]:
    return {f"k = {row.num_steps}": row.metrics for row in rows}


_MEMORY_WORDS = {
    "allocated": "bytes of tensors against PyTorch's allocated peak",
    "reserved": "what the allocator needs against what it reserved",
    "resident": "bytes of tensors against the growth of the process",
}


def _sentences(found: SuiteComparison) -> list[str]:
    lines = []
    for name, words in _MEMORY_WORDS.items():
        if (errors := getattr(found, name)) is not None:
            lines.append(f"Memory, {words}: {_short(errors)}")
    verdicts = found.verdicts
    if verdicts["n"]:
        share = format_percent(verdicts["right"] / verdicts["n"])
        lines.append(
            f"Fits or not: {verdicts['right']} of {verdicts['n']} right ({share}); {verdicts['close']} were close"
        )
    if host := found.host_bound:
        lines.append(
            f"Bound by the host: {format_percent(host['predicted_share'])} predicted, "
            f"{format_percent(host['measured_share'])} measured, {format_percent(host['told_alike'])} in agreement"
        )
    if found.energy is not None:
        lines.append(f"Energy of a step: {_short(found.energy)}")
    return [*lines, *_noise(found)]


def _short(errors: ErrorMetrics) -> str:
    return (
        f"MAPE {format_percent(errors.mape)}, median {format_percent(errors.median_ape)} of {errors.n} rows"
    )


def _noise(found: SuiteComparison) -> list[str]:
    lines = []
    if found.repeats:
        changes = ", ".join(f"{r.subject} {100 * r.change:+.1f} %" for r in found.repeats)
        lines.append(f"The same step at the start and at the end: {changes}")
    if found.anchor_drifts:
        largest = max(found.anchor_drifts, key=abs)
        lines.append(f"Largest change of the anchor from one time to the next: {100 * largest:+.1f} %")
    return lines


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        table.add_column(title, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _batches_table(rows: Sequence[LargestBatch]) -> Table:
    table = _table("largest batch", "precision", "limit", "predicted", "ran", "did not fit")
    for row in rows:
        cells = [
            row.subject,
            row.precision,
            format_bytes(row.limit_bytes),
            *map(_whole, (row.predicted, row.fitted, row.failed)),
        ]
        table.add_row(*map(Text, cells))
    return table


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _kernels_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("kernel", "what", "reached")
    for row in rows:
        asked = row["parameters"]
        what = ", ".join(f"{name} {value}" for name, value in asked.items())
        table.add_row(Text(row["subject"]), Text(what), Text(_rate(row)))
    return table


def _rate(row: Mapping[str, Any]) -> str:
    if "flops_per_s" in row:
        return format_flops_per_s(row["flops_per_s"])
    if "bytes_per_s" in row:
        return f"{format_bytes(row['bytes_per_s'])}/s"
    return f"{format_duration_s(row['seconds_per_call'])} a call"


def _surprises_table(rows: Sequence[MeasuredStep]) -> Table:
    table = _table("predicted worst", "batch", "setting", "measured", "predicted", "error")
    for row in rows:
        asked = row.measurement.parameters
        setting = f"{asked['precision']}, {asked['layout']}{', compiled' if asked.get('compile') else ''}"
        error = f"{100 * (row.predicted_s / row.measured_s - 1):+.0f} %"
        times = (format_duration_s(row.measured_s), format_duration_s(row.predicted_s))
        table.add_row(*map(Text, (row.measurement.subject, str(asked["batch_size"]), setting, *times, error)))
    return table
