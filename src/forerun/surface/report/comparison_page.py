"""Pages of what stands side by side: two predictions, and the points of a sweep."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from forerun.base.units import format_bytes, format_count, format_duration_s
from forerun.prediction.comparison import Difference, RunComparison, change_words
from forerun.search.sweep import Sweep
from forerun.surface.report.tables import table, table_of

__all__ = ["comparison_page", "sweep_page"]

_NUM_PARTS = 6


def comparison_page(found: RunComparison) -> RenderableType:
    """Two predictions: the settings that differ, the changes with their reasons, and the parts of time and memory."""
    settings = table(
        ("setting", "first", "second"),
        [(item.name, _word(item.before), _word(item.after)) for item in found.settings],
        left=("setting", "first", "second"),
    )
    parts: list[RenderableType] = [
        Text.assemble(("first   ", "bold"), found.first),
        Text.assemble(("second  ", "bold"), found.second),
        Text(""),
    ]
    if found.settings:
        parts += [settings, Text("")]
    parts += [Text(f"  -  {sentence}") for sentence in found.sentences]
    for title, items, words in (
        ("time of a step", found.time_parts, format_duration_s),
        ("memory", found.memory_parts, format_bytes),
    ):
        if items:
            parts += [Text(""), _table(title, items, words)]
    return Group(*parts)


def _word(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _table(title: str, items: tuple[Difference, ...], words: Any) -> RenderableType:
    return table_of(
        items[:_NUM_PARTS],
        {
            title: lambda item: item.name,
            "first": lambda item: words(item.before),
            "second": lambda item: words(item.after),
            "change": lambda item: None if item.change is None else change_words(item.change),
        },
        left=(title,),
    )


def sweep_page(sweep: Sweep) -> RenderableType:
    """A row for each device, precision and batch size."""
    rows = [
        (
            device,
            precision,
            str(size),
            format_duration_s(float(sweep.step_time_s[i, j, k])),
            format_count(float(sweep.throughput_samples_per_s[i, j, k])),
            format_bytes(float(sweep.peak_memory_bytes[i, j, k])),
        )
        for i, device in enumerate(sweep.devices)
        for j, precision in enumerate(sweep.precisions)
        for k, size in enumerate(sweep.batch_sizes)
    ]
    return table(
        ("device", "precision", "batch", "step", "samples/s", "memory"), rows, left=("device", "precision")
    )
