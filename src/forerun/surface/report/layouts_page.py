"""The pages of ``forerun layouts`` and ``forerun advise``."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.base.units import format_bytes, format_duration_s
from forerun.search.advise import AdvicePlan
from forerun.search.layout_search import LayoutPoint
from forerun.search.layouts import LayoutPlan
from forerun.surface.report.tables import table

__all__ = ["advice_page", "layouts_page"]

_TITLES = (
    "layout",
    "strategy",
    "micro-batch",
    "steps",
    "recompute",
    "schedule",
    "step",
    "samples/s",
    "memory",
    "room",
    "fits",
)


def layouts_page(plan: LayoutPlan) -> RenderableType:
    """The best layouts, the front, what to change first, and the best layout in the words of frameworks."""
    head = f"{plan.model} on {plan.cluster}, global batch {plan.global_batch}"
    parts: list[RenderableType] = [
        Text(head, style="bold"),
        Text(f"{plan.num_compared:,} layouts compared, {plan.num_fitting:,} fit"),
        Text(""),
        Text("Fastest layouts, the sure ones first; room is what stays free at the upper end of the memory"),
        _table(_TITLES, [_row(point) for point in plan.best]),
        Text(""),
        Text("Why"),
        *(
            Text(
                f"- {point.parallel} {point.strategy}: {'; '.join(filter(None, (point.reason, point.failure)))}"
            )
            for point in plan.best
        ),
        Text(""),
        Text("Time against memory (Pareto front)"),
        _table(_TITLES, [_row(point) for point in plan.front]),
        Text(""),
        Text(f"What to change first: {plan.change_first}"),
    ]
    for name, text in plan.files.items():
        parts += [Text(""), Text(f"{name}:", style="bold"), Text(text.rstrip())]
    return Group(*parts, Text(""), *(Text(f"- {note}") for note in plan.notes))


def _row(point: LayoutPoint) -> list[str]:
    return [
        point.parallel,
        point.strategy,
        str(point.batch_size),
        str(point.accumulation),
        point.recompute,
        point.schedule,
        format_duration_s(point.step_time_s.value),
        f"{point.throughput_samples_per_s.value:.4g}",
        format_bytes(point.peak_memory_bytes.value),
        format_bytes(max(0.0, point.room_bytes)),
        point.fits,
    ]


def advice_page(plan: AdvicePlan) -> RenderableType:
    """The present run, and the changes that help most."""
    parts: list[RenderableType] = [
        Text(f"{plan.model} on {plan.device}", style="bold"),
        Text(
            f"now: {plan.samples_per_s:.4g} samples/s, step {format_duration_s(plan.step_time_s.value)}, "
            f"{format_bytes(plan.peak_memory_bytes.value)} a device, fits: {plan.fits}"
        ),
        Text(""),
    ]
    if not plan.changes:
        parts.append(Text("No change that was tried makes this run faster."))
    else:
        rows = [
            [
                change.settings,
                f"{change.gain:+.0%}".replace("%", " %"),
                f"{change.gain_low:+.0%} to {change.gain_high:+.0%}".replace("%", " %"),
                format_bytes(change.peak_memory_bytes.value),
                change.fits or "",
            ]
            for change in plan.changes
        ]
        parts.append(_table(("change", "faster by", "90 %", "memory", "fits"), rows))
        parts += [Text(""), *(Text(f"- {change.settings}: {change.meaning}") for change in plan.changes)]
    return Group(*parts, Text(""), *(Text(f"- {note}") for note in plan.notes))


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return table(titles, rows, left=("layout", "strategy", "change"))
