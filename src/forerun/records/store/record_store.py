"""The record store: measurements in a database, written one by one as they come.

SQLite in one file by default, with a write-ahead log, so that many processes of one host write and read at once;
PostgreSQL by URL for a team. Each ``add`` is one durable transaction: once it returns, the measurement survives a
crash, kill -9 and a full disk.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from forerun.errors import RecordError, UsageError
from forerun.records.documents import read_document
from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.records.store.engine import explained, open_engine, url_of
from forerun.records.store.schema import INDEXED, ensure_tables, measurements, row_of

__all__ = ["RECORDS_VARIABLE", "RecordStore", "default_store_path", "is_store"]

RECORDS_VARIABLE = "FORERUN_RECORDS"
"""Environment variable that names the store by a path or a URL."""

_KEYS_PER_QUESTION = 500
_ROWS_PER_CHUNK = 2000
_STORE_SUFFIXES = (".sqlite", ".sqlite3", ".db")


def default_store_path() -> str:
    """Default store of records: ``FORERUN_RECORDS``, or a file in the user's data folder."""
    from platformdirs import user_data_path

    return os.environ.get(RECORDS_VARIABLE) or str(user_data_path("forerun") / "records.sqlite")


def is_store(name: str | Path) -> bool:
    """True if a name means a store, not a table in a file."""
    return "://" in str(name) or Path(name).suffix in _STORE_SUFFIXES


_INSERTS: dict[str, Any] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class RecordStore:
    """Measurements in a database; use it as a context manager or close it."""

    def __init__(self, engine: sql.Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    @classmethod
    def open(cls, url_or_path: str | Path | None = None, *, create: bool = True) -> RecordStore:
        """Opens a store, and makes it if it is missing.

        Args:
            url_or_path: A file, or an SQLAlchemy URL such as ``postgresql://user@host/database``; None for the
                default store.
            create: True makes a missing file.

        Raises:
            RecordError: The file is missing, not a store, damaged, of another version, or cannot be written.
            MissingExtraError: The database's driver is not installed.
            UsageError: The URL cannot be read.
        """
        url, name = url_of(str(url_or_path or default_store_path()))
        store = cls(open_engine(url, create=create), name)
        with store._errors(), store._engine.begin() as connection:
            ensure_tables(connection, name)
        return store

    def __enter__(self) -> RecordStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def name(self) -> str:
        """The file or URL, without a password."""
        return self._name

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()

    def add(self, measurement: Measurement, /) -> bool:
        """Writes one measurement in one transaction.

        A measurement with the same key is replaced unless it is done: a finished measurement is never lost.

        Returns:
            True if the measurement was written; False if the store has it already.

        Raises:
            RecordError: The measurement holds a value that could not be read back, or the database refuses it: no
                space, no rights, no server.
        """
        return self.add_many([measurement]) == 1

    def add_many(self, added: Iterable[Measurement]) -> int:
        """Writes many measurements, some thousands per transaction; returns the number written.

        If the call breaks off, the finished transactions are kept; a second call writes the missing measurements.
        """
        rows = map(row_of, added)
        num_written = 0
        while chunk := list(islice(rows, _ROWS_PER_CHUNK)):
            with self._errors(), self._engine.begin() as connection:
                # Without the option the number of rows is given for updates only.
                asked = self._upsert().execution_options(preserve_rowcount=True)
                num_written += connection.execute(asked, chunk).rowcount
        return num_written

    def _upsert(self) -> Any:
        new: Any = _INSERTS[self._engine.dialect.name](measurements)
        replaced = {column: new.excluded[column] for column in (*INDEXED, "median_s", "document")}
        return new.on_conflict_do_update(
            index_elements=["key"],
            set_=replaced,
            where=sql.and_(
                measurements.c.outcome != str(Outcome.DONE),
                # As text: PostgreSQL does not compare JSON.
                sql.cast(measurements.c.document, sql.Text) != sql.cast(new.excluded.document, sql.Text),
            ),
        )

    def done_keys(self, keys: Iterable[str], /) -> set[str]:
        """The keys among these whose jobs are done."""
        wanted = iter(keys)
        found: set[str] = set()
        while chunk := list(islice(wanted, _KEYS_PER_QUESTION)):
            # With a condition on the outcome, SQLite would use that column's index and read all rows that are done.
            question = sql.select(measurements.c.key, measurements.c.outcome).where(
                measurements.c.key.in_(chunk)
            )
            with self._errors(), self._engine.connect() as connection:
                answers = connection.execute(question).all()
            found.update(key for key, outcome in answers if outcome == str(Outcome.DONE))
        return found

    def mark_unstable(self, keys: Iterable[str], reason: str, /) -> int:
        """Adds a reason to the summaries of these measurements and marks them unstable; returns their number."""
        changed = 0
        with self._errors(), self._engine.begin() as connection:
            for key in keys:
                chosen = measurements.c.key == key
                document = connection.execute(sql.select(measurements.c.document).where(chosen)).scalar()
                if document is None or document.get("summary") is None:
                    continue
                marked = _unstable(read_document(document, f"{self._name}, record {key}"), reason)
                connection.execute(
                    measurements.update().where(chosen).values(document=row_of(marked)["document"])
                )
                changed += 1
        return changed

    def measurements(
        self,
        *,
        kind: JobKind | None = None,
        subject: str | None = None,
        family: str | None = None,
        device: str | None = None,
        outcome: Outcome | None = None,
        occasion: str | None = None,
    ) -> Iterator[Measurement]:
        """Measurements in the order of their first writing, read in pieces so that any number fits in memory."""
        asked = {
            "kind": kind,
            "subject": subject,
            "family": family,
            "device": device,
            "outcome": outcome,
            "occasion": occasion,
        }
        last_id = 0
        while True:
            # Pages by id instead of one long cursor, which would make writers wait.
            question = (
                sql.select(measurements.c.id, measurements.c.key, measurements.c.document)
                .where(measurements.c.id > last_id, *_conditions(asked))
                .order_by(measurements.c.id)
                .limit(_ROWS_PER_CHUNK)
            )
            with self._errors(), self._engine.connect() as connection:
                rows = connection.execute(question).all()
            if not rows:
                return
            for row in rows:
                yield read_document(row.document, f"{self._name}, record {row.key}")
            last_id = rows[-1].id

    def find(self, key: str) -> Measurement:
        """The one measurement whose key is, or begins with, the given text.

        Raises:
            RecordError: No measurement or several have such a key.
        """
        begins = measurements.c.key.startswith(key, autoescape=True)
        question = sql.select(measurements.c.key, measurements.c.document).where(begins).limit(2)
        with self._errors(), self._engine.connect() as connection:
            rows = connection.execute(question).all()
        if len(rows) != 1:
            number = "none" if not rows else "more than one"
            raise RecordError(
                f"{self._name}: expected one record whose key begins with '{key}', got {number}"
            )
        return read_document(rows[0].document, f"{self._name}, record {rows[0].key}")

    def count(self, **asked: str | None) -> int:
        """Number of measurements; the arguments are those of ``measurements``."""
        question = sql.select(sql.func.count()).select_from(measurements).where(*_conditions(asked))
        with self._errors(), self._engine.connect() as connection:
            return int(connection.execute(question).scalar_one())

    def counts(self, *columns: str) -> list[tuple[tuple[str, ...], int]]:
        """Numbers of measurements by the values of some of the indexed columns, in their order."""
        _check_columns(columns)
        chosen = [measurements.c[name] for name in columns]
        question = sql.select(*chosen, sql.func.count()).group_by(*chosen).order_by(*chosen)
        with self._errors(), self._engine.connect() as connection:
            return [(tuple(row[:-1]), int(row[-1])) for row in connection.execute(question)]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sql.exc.SQLAlchemyError as error:
            raise explained(error, self._name) from error


def _conditions(asked: dict[str, Any]) -> list[sql.ColumnElement[bool]]:
    _check_columns(asked)
    return [measurements.c[name] == str(value) for name, value in asked.items() if value is not None]


def _check_columns(columns: Iterable[str]) -> None:
    for name in columns:
        if name not in INDEXED:
            raise UsageError(f"records can be selected by {', '.join(INDEXED)}; got '{name}'")


def _unstable(measurement: Measurement, reason: str) -> Measurement:
    summary = measurement.summary
    assert summary is not None
    said = summary.reason if reason in summary.reason else "; ".join(filter(None, (summary.reason, reason)))
    return replace(measurement, summary=replace(summary, is_stable=False, reason=said))
