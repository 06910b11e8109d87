"""Measurements from and to stores and files, piece by piece.

Files are CSV and Parquet, one row per measurement and one column per field of ``Measurement``, with lists and names
with values as JSON text; flat tables of steps; and the formats of other programs, which entry points bring.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from forerun.base.errors import RecordError, UsageError
from forerun.base.extras import needing, plugin, plugin_names
from forerun.base.kept import whole_file, writes
from forerun.base.tables import check_columns
from forerun.evidence.records.database import as_json
from forerun.evidence.records.measurement import (
    MEASUREMENT_VERSION,
    JobKind,
    Measurement,
    measurement_document,
    read_document,
)
from forerun.evidence.records.record_store import RecordStore, is_store
from forerun.evidence.records.step_record import StepRecord, as_measurement, step_records
from forerun.evidence.records.tables import is_short_table, read_records, read_short_steps
from forerun.question.devices.device import Device

FORMATS = "forerun.record_formats"
"""Entry points of formats of files that another program fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """A format of files that another program fixed.

    Attributes:
        write: Writes the measurements that have a row there; returns their number.
        is_file: True if a file has this format.
        read: The measurements of a file on a device; None where files are only written.
        is_of_epochs: True if a row is the time of an epoch.
    """

    write: Callable[[Iterable[Measurement], Path], int]
    is_file: Callable[[Path], bool] = lambda _: False
    read: Callable[[Path, Device | None], Iterable[Measurement]] | None = None
    is_of_epochs: bool = False


def record_format(kind: str) -> RecordFormat:
    """The format of a name.

    Raises:
        UsageError: No installed package has it.
    """
    found: RecordFormat | None = plugin(FORMATS, kind)
    if found is None:
        raise UsageError(
            f"unknown format {kind!r}; expected one of {', '.join(plugin_names(FORMATS)) or 'none'}"
        )
    return found


def format_of(name: str | Path) -> RecordFormat | None:
    """The format of another program that a file has; None for a store and for forerun's own formats."""
    if is_store(name):
        return None
    return next((one for one in map(record_format, plugin_names(FORMATS)) if one.is_file(Path(name))), None)


def read_all(
    names: Sequence[str | Path], device: Device | None, kind: JobKind | None = None
) -> Iterator[Measurement]:
    """Measurements of all files and stores, one after the other.

    Args:
        names: Files, or SQLAlchemy URLs.
        device: Device of the rows of a format that does not name it.
        kind: Only kind to read, where the source can choose.

    Raises:
        RecordError: A source is missing, damaged, of another version, or holds impossible values.
        UsageError: A file of a format that does not name its device is given without one.
    """
    for name in names:
        if is_store(name):
            with RecordStore.open(name, create=False) as store:
                yield from store.measurements(kind=kind)
        elif (found := format_of(name)) is not None and found.read is not None:
            yield from found.read(Path(name), device)
        else:
            yield from import_measurements(name)


def columns_of(path: Path) -> set[str]:
    """Columns of a CSV or Parquet file; none where it is neither, or damaged, which its reader reports."""
    if path.suffix not in (".csv", ".parquet") or not path.is_file():
        return set()
    if path.suffix == ".csv":  # in any encoding: its reader finds out which
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            return {name.strip() for name in next(csv.reader(file), [])}
    try:
        return set(next(_parquet_rows(path)))
    except (OSError, RecordError):
        return set()


def read_measured_steps(names: Sequence[str | Path], device: Device | None = None) -> list[StepRecord]:
    """Finished steps of whole models of all files and stores.

    Raises:
        RecordError: A source cannot be used, or none of them holds a step.
    """
    found = list(step_records(read_all(names, device)))
    if not found:
        raise RecordError(
            "expected finished steps of whole models among the records, got none; "
            "measure some with: forerun measure grid, or fit layers with --model layers"
        )
    return found


_JSON_COLUMNS = ("parameters", "repetitions_s", "warm_up_s", "summary", "results", "circumstances")
FILE_COLUMNS = ("schema_version", "key", "kind", "subject", "family", "outcome", "reason", *_JSON_COLUMNS)
"""Columns of a file of measurements."""

_ROWS_PER_CHUNK = 5000


def export_measurements(measurements: Iterable[Measurement], path: str | Path) -> int:
    """Writes measurements to a ``.csv`` or ``.parquet`` file; returns their number.

    The file appears when it is complete: an interrupted run leaves the old file.

    Raises:
        RecordError: The file has another ending, or cannot be written.
    """
    path = Path(path)
    writers = {".csv": _write_csv, ".parquet": _write_parquet}
    if path.suffix not in writers:
        raise RecordError(f"{path.name}: measurements are written to .csv or .parquet, got '{path.suffix}'")
    with writes(path, RecordError), whole_file(path) as partial:
        return writers[path.suffix](map(_cells, measurements), partial)


def _cells(measurement: Measurement) -> dict[str, Any]:
    document = measurement_document(measurement)
    for name in _JSON_COLUMNS:
        value = document[name]
        document[name] = "" if value is None else as_json(value)
    return document


def _write_csv(rows: Iterable[dict[str, Any]], path: Path) -> int:
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FILE_COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow(row)
            count += 1
    return count


def _write_parquet(rows: Iterable[dict[str, Any]], path: Path) -> int:
    with needing("a Parquet file"):
        import pyarrow
        import pyarrow.parquet

    # The types are named: pyarrow would take a column whose first cells are empty for one of nulls.
    kinds = {name: pyarrow.int32() if name == "schema_version" else pyarrow.string() for name in FILE_COLUMNS}
    schema = pyarrow.schema(list(kinds.items()))
    count, source = 0, iter(rows)
    with pyarrow.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while chunk := list(islice(source, _ROWS_PER_CHUNK)):
            writer.write_table(pyarrow.Table.from_pylist(chunk, schema))
            count += len(chunk)
    return count


def import_measurements(path: str | Path) -> Iterator[Measurement]:
    """Measurements of a ``.csv`` or ``.parquet`` file, also of a flat table of steps, piece by piece.

    A ``.csv`` file may also be a short table that a person wrote (``tables.read_short_steps``).

    Raises:
        RecordError: The file is missing or of another version, columns are unknown or missing, two rows have one key,
            or a cell is damaged or impossible; the message names the file, row and column.
    """
    path = Path(path)
    if not path.is_file():
        raise RecordError(f"expected a table of measurements at {path}, but there is no such file")
    if path.suffix not in (".csv", ".parquet"):
        raise RecordError(f"{path.name}: expected a .csv or .parquet file, got '{path.suffix}'; convert it")
    try:
        rows = _csv_rows(path) if path.suffix == ".csv" else _parquet_rows(path)
        columns = next(rows)
        if path.suffix == ".csv" and is_short_table(columns):
            yield from map(as_measurement, read_short_steps(path))
        elif set(columns) & {"row_id", "step_time_s"}:
            yield from map(as_measurement, read_records(path))
        else:
            yield from _checked(columns, rows, path.name)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RecordError(f"{path.name}: the file cannot be read as {path.suffix[1:]}: {error}") from error


def _checked(columns: Iterable[str], rows: Iterator[Iterable[Any]], table: str) -> Iterator[Measurement]:
    columns = tuple(columns)
    check_columns(columns, table, FILE_COLUMNS, ())
    seen = _SeenKeys()
    for number, cells in enumerate(rows, start=1):
        place = f"{table}, row {number}"
        measurement = read_document(_document(dict(zip(columns, cells, strict=True)), place), place)
        first = seen.first_row(measurement.key, number)
        if first != number:
            raise RecordError(
                f"{place}: key {measurement.key} occurs twice (first in row {first}); keep one of them"
            )
        yield measurement


class _SeenKeys:
    """Keys of the rows read so far, in a temporary file, so that millions of keys need no memory."""

    def __init__(self) -> None:
        # The empty name stands for a database that SQLite deletes when it is closed.
        self._rows = sqlite3.connect("")
        self._rows.execute("CREATE TABLE seen (key TEXT PRIMARY KEY, row INTEGER) WITHOUT ROWID")

    def first_row(self, key: str, row: int) -> int:
        """The first row with this key; the present row if no earlier one has it."""
        # In small letters: Python's driver counts no rows of an INSERT in Turkish.
        if self._rows.execute("insert or ignore into seen values (?, ?)", (key, row)).rowcount:
            return row
        return int(self._rows.execute("SELECT row FROM seen WHERE key = ?", (key,)).fetchone()[0])


def _document(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    document = dict(row)
    try:
        document["schema_version"] = int(row["schema_version"])
    except (TypeError, ValueError):
        raise RecordError(
            f"{place}, column 'schema_version': expected {MEASUREMENT_VERSION}, got {row['schema_version']!r}"
        ) from None
    for name in _JSON_COLUMNS:
        try:
            document[name] = json.loads(row[name]) if row[name] else None
        except (TypeError, ValueError) as error:
            raise RecordError(
                f"{place}, column '{name}': expected JSON, got {row[name]!r} ({error})"
            ) from error
    return document


def _csv_rows(path: Path) -> Iterator[list[Any]]:
    # Spreadsheets begin such files with a byte order mark.
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(file)
        try:
            header = next(reader)
        except StopIteration:
            raise RecordError(f"{path.name}: expected a line of column names, got an empty file") from None
        yield header
        for number, cells in enumerate(reader, start=1):
            if len(cells) != len(header):
                raise RecordError(
                    f"{path.name}, row {number}: expected {len(header)} cells, got {len(cells)}; the file is cut off "
                    "or a comma is not quoted"
                )
            yield cells


def _parquet_rows(path: Path) -> Iterator[list[Any]]:
    with needing("a Parquet file"):
        import pyarrow
        import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file.schema_arrow.names
            # Group by group: one pass over all groups would keep all it has read in memory.
            for group in range(file.num_row_groups):
                for batch in file.iter_batches(batch_size=_ROWS_PER_CHUNK, row_groups=[group]):
                    columns = [column.to_pylist() for column in batch.columns]
                    yield from map(list, zip(*columns, strict=True))
    except pyarrow.ArrowException as error:
        raise RecordError(f"{path.name}: the file cannot be read as parquet: {error}") from error
