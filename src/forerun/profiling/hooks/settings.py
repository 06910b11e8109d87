"""What the parent tells the hooks, as a file of JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["STARTUP_VARIABLE", "STOPPED_STATUS", "HookSettings", "read_settings", "write_settings"]

STARTUP_VARIABLE = "FORERUN_STARTUP"
"""Environment variable with the path of the settings; children inherit it, so it also marks whose they are."""

STOPPED_STATUS = 77
"""Exit status of a script that the hooks stopped after the steps that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """Settings of one run.

    Attributes:
        folder: Where each process writes its records.
        parent_pid: Process whose end ends the script.
        warmup_steps: Steps before the traced window.
        window_steps: Steps under ``torch.profiler``; 0 for none.
        stop_after_steps: Steps after which the script is stopped; None to let it end.
        stop_after_s: Seconds after the first finished step at which it is stopped; None to let it end [s].
        knobs: Values that hooks apply, by knob.
    """

    folder: str
    parent_pid: int
    warmup_steps: int = 3
    window_steps: int = 5
    stop_after_steps: int | None = None
    stop_after_s: float | None = None
    knobs: dict[str, Any] = field(default_factory=dict)


def write_settings(settings: HookSettings) -> Path:
    """Writes the settings into their own folder."""
    path = Path(settings.folder) / "settings.json"
    path.write_text(json.dumps(asdict(settings)), encoding="utf-8")
    return path


def read_settings(path: Path) -> HookSettings:
    """Reads what ``write_settings`` wrote."""
    return HookSettings(**json.loads(path.read_text(encoding="utf-8")))
