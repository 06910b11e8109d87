"""Files between a command and the hooks in its script: settings go in as JSON, records come out line by line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from forerun.base.kept import write_whole

STARTUP_VARIABLE = "FORERUN_STARTUP"
"""Environment variable with the path of the settings; children inherit it, so it also marks a run's processes."""

STOPPED_STATUS = 77
"""Exit status of a script that the hooks stopped after the requested steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HookSettings:
    """Settings of the hooks in one run.

    Attributes:
        folder: Folder in which each process writes its records; empty for one that lives as long as the run.
        parent_pid: Process whose end also ends the script; the launch sets it.
        warmup_steps: Number of steps before the traced window.
        window_steps: Number of steps under ``torch.profiler``; 0 for no window.
        stop_after_steps: Number of steps after which the script is stopped; None to let it end.
        stop_after_s: Time after the first finished step at which the script is stopped; None to let it end [s].
        knobs: Values that hooks apply, by knob.
    """

    folder: str = ""
    parent_pid: int = 0
    warmup_steps: int = 3
    window_steps: int = 5
    stop_after_steps: int | None = None
    stop_after_s: float | None = None
    knobs: dict[str, Any] = field(default_factory=dict)


CAPTURE_HOOKS = "forerun.script.capturing.start"
"""Module whose ``install`` the start-up of Python calls in the script's process."""

FileAccess = Literal["view", "guard", "unsafe"]
"""Way in which a script sees files: a copy-on-write view where the system has it, else a guard that redirects or
refuses what would change them; that guard in any case; or the files themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Settings of one capture.

    Attributes:
        folder: Scratch folder, which also receives the result.
        arguments: Arguments of the script instead of its own; None keeps them.
        pretends: Whether a CUDA device is pretended; else the script runs on the processor and finds none.
        batch_from, batch_to: Batch size of loaders to replace, and its replacement; None leaves them alone.
        world_size: Processes that the script believes to be one of.
        files: Way in which the script sees files.
        timeout_s: Longest time of the script [s].
    """

    folder: str
    arguments: list[str] | None = None
    pretends: bool = True
    batch_from: int | None = None
    batch_to: int | None = None
    world_size: int = 1
    files: FileAccess = "view"
    timeout_s: float = 600.0

    @property
    def is_first(self) -> bool:
        """True for a run of the script as it is, false for one that asks for another batch size alone."""
        return self.arguments is None and self.batch_from is None


WAIT_MARK, ORIGIN_MARK = "forerun::wait", "forerun::origin "
"""Names of marks in a trace: a wait for a loader, and the beginning, followed by the time of the monotonic clock."""


def trace_file(folder: Path, pid: int) -> Path:
    """File of the trace of a process, in Chrome's format."""
    return folder / f"trace-{pid}.json"


def write_settings(settings: HookSettings | CaptureSettings) -> Path:
    """Writes settings into the folder they name, where a waiting process finds them whole."""
    path = Path(settings.folder) / "settings.json"
    write_whole(path, json.dumps(asdict(settings)).encode())
    return path


Settings = TypeVar("Settings")


def read_settings(path: Path, kind: type[Settings]) -> Settings:
    """Reads settings of a kind from ``write_settings``."""
    return kind(**json.loads(path.read_text(encoding="utf-8")))


_FLUSH_EVERY_S = 0.5


class Recording:
    """Appends records of a process to its own file.

    Steps are gathered for half a second, then written in one line: a killed process loses at most that half second.
    A forked child (a loader's worker) writes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._path = folder / f"process-{self._pid}.jsonl"
        self._rows: dict[str, list[Sequence[float]]] = {}
        self._written_s = time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """Writes one record now."""
        if os.getpid() == self._pid:
            line = json.dumps({"kind": kind, **values}, default=str) + "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)

    def add(self, kind: str, row: Sequence[float]) -> None:
        """Adds a row to the next write of its kind."""
        self._rows.setdefault(kind, []).append(row)
        if time.monotonic() - self._written_s > _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Writes the rows that were added."""
        for kind, rows in self._rows.items():
            self.write(kind, rows=rows)
        self._rows = {}
        self._written_s = time.monotonic()
