"""Measurements for a server that is away: a local file keeps them until the server has them.

Each line is the JSON document of a measurement, on the disk before it counts as written. A line that a kill or a full
disk cut off never counted, and the next begins on a line of its own. Writing a measurement twice
does no harm, because its key identifies it; so the file goes only after the server has all of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import sqlalchemy as sql
from filelock import FileLock, Timeout

from forerun.base.errors import RecordError
from forerun.evidence.records.measurement import Measurement, measurement_document, read_document

__all__ = ["Spool"]


class Spool:
    """The file of one database, shared by all processes of this user.

    Args:
        url: The database.
    """

    def __init__(self, url: sql.URL) -> None:
        from platformdirs import user_data_path

        name = hashlib.sha256(f"{url.host}:{url.port}/{url.database}".encode()).hexdigest()[:16]
        self.path = Path(user_data_path("forerun")) / "spool" / f"{name}.jsonl"

    def add(self, measurements: Iterable[Measurement]) -> None:
        """Keeps measurements durably.

        Raises:
            RecordError: The file cannot be written.
        """
        # The line break before separates it from a line that was cut off.
        text = "".join(f"\n{json.dumps(measurement_document(found))}\n" for found in measurements)
        try:
            with self._lock(), self.path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(
                f"{self.path}: the server is away, and its measurements cannot be kept here: {error.strerror or error}"
            ) from error

    def replay(self, write: Callable[[Iterable[Measurement]], int]) -> int:
        """Hands the measurements to ``write``, which may put them aside again; returns their number."""
        moved = self.path.with_suffix(".replay")
        if not (self.path.exists() or moved.exists()):
            return 0
        number = 0
        try:
            with FileLock(self.path.with_suffix(".replay-lock"), timeout=0):
                # What a killed process was about to write comes first, then what was added since. If the server is
                # away again, ``write`` puts it back, so this must not go on for ever.
                for _ in range(2):
                    if moved.exists() or self._moved(moved):
                        found = list(_measurements(moved))
                        write(found)
                        moved.unlink()
                        number += len(found)
        except Timeout:  # another process is at it
            pass
        return number

    def _moved(self, target: Path) -> bool:
        with self._lock(), contextlib.suppress(FileNotFoundError):
            self.path.rename(target)
            return True
        return False

    def _lock(self) -> FileLock:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return FileLock(self.path.with_suffix(".lock"), timeout=60)


def _measurements(path: Path) -> Iterator[Measurement]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        # A line without its end was never acknowledged.
        with contextlib.suppress(ValueError):
            yield read_document(json.loads(line), f"{path}, line {number}")
