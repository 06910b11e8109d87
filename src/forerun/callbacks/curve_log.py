"""A curve in a CSV file that grows row by row, in the columns that ``forerun forecast`` reads."""

from __future__ import annotations

import csv
import time
from pathlib import Path

from forerun.errors import InvalidSetupError, RecordError

__all__ = ["CurveLog"]


class CurveLog:
    """Appends rows to a CSV file; each row is on disk before the next one is made.

    The first row fixes the columns: ``epoch`` or ``step``, then the metrics, then ``elapsed_s`` since this object was
    made. A later row may lack some columns, but not add any. An existing file is overwritten.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._columns: list[str] = []
        self._began_s = time.perf_counter()
        if not self.path.parent.is_dir():
            raise RecordError(
                f"the folder of the curve '{self.path}' does not exist; create it or choose another"
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the file; empty before the first row."""
        return tuple(self._columns)

    def append(self, **row: float | None) -> None:
        """Writes a row; ``elapsed_s`` is added unless the row has it.

        Raises:
            InvalidSetupError: The row has columns that the first row lacks, or neither epoch nor step.
            RecordError: The file cannot be written.
        """
        if "epoch" not in row and "step" not in row:
            raise InvalidSetupError(
                f"a row of a curve needs epoch or step, got {', '.join(row) or 'nothing'}"
            )
        row = {**row, "elapsed_s": row.get("elapsed_s", time.perf_counter() - self._began_s)}
        is_first = not self._columns
        if is_first:
            self._columns = list(row)
        new = [name for name in row if name not in self._columns]
        if new:
            raise InvalidSetupError(
                f"the curve '{self.path}' has the columns {', '.join(self._columns)}, got also {', '.join(new)}; "
                "give every metric in the first row"
            )
        try:
            with self.path.open("w" if is_first else "a", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns, restval="")
                if is_first:
                    writer.writeheader()
                writer.writerow({name: "" if value is None else value for name, value in row.items()})
        except OSError as error:
            raise RecordError(
                f"the curve '{self.path}' cannot be written: {error.strerror or error}"
            ) from error
