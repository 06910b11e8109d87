"""The table after ``forerun tune --scenario``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent
from forerun.units import format_bytes, format_duration_s, format_energy_j

__all__ = ["scenario_page"]

_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("train accuracy", "train_accuracy", format_percent),
    ("test accuracy", "test_accuracy", format_percent),
    ("train loss", "train_loss", lambda v: f"{v:.4f}"),
    ("test loss", "test_loss", lambda v: f"{v:.4f}"),
    ("GPU utilisation", "gpu_utilisation", format_percent),
    ("CPU utilisation", "cpu_utilisation", format_percent),
    ("CPU time", "cpu_time_s", format_duration_s),
    ("step", "step_time_s", format_duration_s),
    ("images/s", "images_per_s", lambda v: f"{v:,.1f}"),
    ("memory", "peak_memory_bytes", format_bytes),
    ("energy of the GPU", "energy_j", format_energy_j),
    ("whole run", "wall_s", format_duration_s),
    ("resolution", "image_size", lambda v: f"{v} x {v}"),
)
_TITLES = {name: title for title, name, _ in _ROWS}


def scenario_page(found: Sequence[Mapping[str, Any]], folder: Path) -> RenderableType:
    """One column per scenario."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for run in found:
        table.add_column(run["scenario"], justify="right")
    for title, name, form in _ROWS:
        table.add_row(title, *("-" if run[name] is None else form(run[name]) for run in found))
    lines = [Text(f"{run['scenario']}: {_changes(run)}") for run in found]
    reasons = {f"{_TITLES[name]}: {words}" for run in found for name, words in run["reasons"].items()}
    notes = [Text(f"note: {reason}", style="dim") for reason in sorted(reasons)]
    return Group(table, Text(""), *lines, Text(f"files: {folder}"), *notes)


def _changes(run: Mapping[str, Any]) -> str:
    arguments = [f"{flag} {value}" for flag, value in run["arguments"].items()]
    hooks = [f"{name}={value}" for name, value in run["hooks"].items()]
    return ", ".join([*arguments, *hooks]) or "the script as it is"
