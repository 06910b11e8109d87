"""The table after ``forerun tune --scenario``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from forerun.report.wording import format_percent
from forerun.units import format_bytes, format_duration_s, format_energy_j

if TYPE_CHECKING:
    from forerun.tuning.configuration import ScriptConfiguration
    from forerun.tuning.scenarios.answer import ScenarioRuns

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
)
_TITLES = {name: title for title, name, _ in _ROWS}


def scenario_page(found: ScenarioRuns) -> RenderableType:
    """One column per scenario."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("")
    for run in found.scenarios:
        table.add_column(run.scenario, justify="right")
    for title, name, form in _ROWS:
        values = [getattr(run.figures, name) for run in found.scenarios]
        table.add_row(title, *("-" if value is None else form(value) for value in values))
    table.add_row("resolution", *(f"{run.image_size} x {run.image_size}" for run in found.scenarios))
    lines = [Text(f"{run.scenario}: {_changes(run.configuration)}") for run in found.scenarios]
    reasons = {
        f"{_TITLES[name]}: {words}" for run in found.scenarios for name, words in run.figures.reasons.items()
    }
    notes = [Text(f"note: {reason}", style="dim") for reason in sorted(reasons)]
    return Group(table, Text(""), *lines, Text(f"files: {found.folder}"), *notes)


def _changes(configuration: ScriptConfiguration) -> str:
    arguments = [f"{flag} {value}" for flag, value in configuration.arguments.items()]
    hooks = [f"{name}={value}" for name, value in configuration.hooks.items()]
    return ", ".join([*arguments, *hooks]) or "the script as it is"
