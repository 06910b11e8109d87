"""Lines of JSON that a watched process writes, in few writes and safe against its death."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

__all__ = ["Recording"]

_FLUSH_EVERY_S = 0.5


class Recording:
    """Appends records of a process to its own file.

    Steps are gathered for half a second, then written in one line: a killed process loses at most that half second.
    A forked child (a loader's worker) writes nothing.
    """

    def __init__(self, folder: Path) -> None:
        self._pid = os.getpid()
        self._path = folder / f"process-{self._pid}.jsonl"
        self._rows: dict[str, list[list[float]]] = {}
        self._written_s = time.monotonic()

    def write(self, kind: str, **values: Any) -> None:
        """Writes one record now."""
        if os.getpid() == self._pid:
            line = json.dumps({"kind": kind, **values}, default=str) + "\n"
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line)

    def add(self, kind: str, row: list[float]) -> None:
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
