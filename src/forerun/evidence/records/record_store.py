"""The record store: measurements in a database, written one by one as they come.

SQLite in one file by default, with a write-ahead log, so that many processes of one host write and read at once;
PostgreSQL by URL for a team. Each ``add`` is one durable transaction: once it returns, the measurement survives a
crash, kill -9 and a full disk. While a server is away, a local file keeps the measurements. A checksum per record
tells damage of the disk: only the damaged record is left out, and a ``StoreWarning`` names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import sqlalchemy as sql
from filelock import FileLock, Timeout
from sqlalchemy.dialects import postgresql, sqlite

from forerun.base.errors import RecordError, StoreWarning, UsageError
from forerun.evidence.records.database import (
    INDEXED,
    checksum_of,
    ensure_tables,
    explained,
    is_away,
    measurements,
    open_engine,
    row_of,
    url_of,
)
from forerun.evidence.records.measurement import (
    JobKind,
    Measurement,
    Outcome,
    measurement_document,
    read_document,
)

RECORDS_VARIABLE = "FORERUN_RECORDS"
"""Environment variable that names the store by a path or a URL."""

_KEYS_PER_QUESTION = 500
_ROWS_PER_CHUNK = 2000
_STORE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
_PATIENCE_S = 10.0
"""Longest wait for a server that has gone away."""
_ASK_AGAIN_S = 30.0
"""Time between two questions to a server that is away."""
_CHECKED_BYTES = 8 * 2**20
"""Size of the largest SQLite file that is checked whole when it is opened, in some hundredths of a second."""
_NAMED = 5

_Answer = TypeVar("_Answer")


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

    def __init__(self, engine: sql.Engine, name: str, spool: Spool | None = None) -> None:
        self._engine = engine
        self._name = name
        self._spool = spool
        self._was_open = False
        self._ask_again_at_s = 0.0
        # Keys put aside for a server that is away: their jobs are done, though no database says so yet.
        self._spooled: set[str] = set()
        self._has_checksums = True
        self._damaged: dict[int, str] = {}

    @classmethod
    def open(cls, url_or_path: str | Path | None = None, *, create: bool = True) -> RecordStore:
        """Opens a store, and makes it if it is missing; writes measurements that waited for its server.

        Args:
            url_or_path: A file, or an SQLAlchemy URL such as ``postgresql://user@host/database``; None for the
                default store.
            create: True makes a missing file and upgrades one of an earlier version; False reads one that is
                there, even if it cannot be written.

        Raises:
            RecordError: The file is missing, not a store, damaged, of another version, or cannot be written.
            MissingExtraError: The database's driver is not installed.
            UsageError: The URL cannot be read.
        """
        url, name = url_of(str(url_or_path or default_store_path()))
        engine = open_engine(url, create=create)
        is_server = engine.dialect.name != "sqlite"
        store = cls(engine, name, Spool(url) if is_server else None)
        may_write = "mode" not in engine.url.query
        try:
            store._has_checksums = store._transact(
                lambda c: ensure_tables(c, name, may_write=may_write, upgrades=create)
            )
            store._was_open = True
            if not is_server:
                store._check_small_file(url, may_repair=may_write, must_be_whole=create)
            elif store._spool is not None:
                store._spool.replay(store.add_many)
        except BaseException:
            store.close()
            raise
        return store

    def _check_small_file(self, url: sql.URL, *, may_repair: bool, must_be_whole: bool) -> None:
        path = Path(str(url.database))
        if not path.is_file() or path.stat().st_size > _CHECKED_BYTES:
            return
        found = self._structure_damage()
        if found and may_repair:
            self._transact(lambda connection: connection.exec_driver_sql("REINDEX"))
            repaired, found = found, self._structure_damage()
            if not found:
                self._warn(f"its index was damaged ({repaired[0]}) and was made anew; check the disk")
        if found and must_be_whole:
            raise RecordError(
                f"{self._name}: the database is damaged ({found[0]}); restore it, or save what can be read with "
                "sqlite3's .recover"
            )
        if found:
            self._warn(f"the database is damaged ({found[0]}): records may be missing from what is read")

    def _structure_damage(self) -> list[str]:
        """Damage of an SQLite file besides its records, as SQLite words it; empty if it is whole."""
        found = self._transact(lambda c: c.exec_driver_sql("PRAGMA integrity_check(5)").scalars().all())
        lines = [" ".join(str(line).split()) for line in found]
        return [] if lines == ["ok"] else lines

    def _warn(self, text: str) -> None:
        warnings.warn(f"{self._name}: {text}", StoreWarning, stacklevel=3)

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
        wanted = iter(added)
        num_written = 0
        while chunk := list(islice(wanted, _ROWS_PER_CHUNK)):
            num_written += self._write(chunk)
        return num_written

    def _write(self, chunk: list[Measurement]) -> int:
        rows = [row_of(measurement) for measurement in chunk]

        def write(connection: sql.Connection) -> int:
            # A damaged record, which nobody can read, must not keep its key.
            if self._damaged:
                connection.execute(
                    measurements.delete().where(measurements.c.id.in_(list(self._damaged)))
                    .where(measurements.c.key.in_([row["key"] for row in rows]))
                )  # fmt: skip
            # Without the option the number of rows is given for updates only.
            asked = self._upsert().execution_options(preserve_rowcount=True)
            return int(connection.execute(asked, rows).rowcount)

        try:
            if time.monotonic() < self._ask_again_at_s:
                return self._put_aside(chunk)
            num_written = self._transact(write)
        except _AwayError as error:
            self._ask_again_at_s = time.monotonic() + _ASK_AGAIN_S
            assert self._spool is not None
            self._warn(f"{error}; measurements are kept in {self._spool.path} and written when it is back")
            return self._put_aside(chunk)
        # The server is there again, so what waited for it goes first to where it belongs.
        if self._spooled and self._spool is not None:
            self._spooled.clear()  # before the replay, which comes here again
            self._spool.replay(self.add_many)
        return num_written

    def _put_aside(self, chunk: list[Measurement]) -> int:
        assert self._spool is not None
        new = [found for found in chunk if found.key not in self._spooled]
        self._spool.add(new)
        self._spooled.update(found.key for found in new if found.outcome is Outcome.DONE)
        return len(new)

    def _upsert(self) -> Any:
        new: Any = _INSERTS[self._engine.dialect.name](measurements)
        replaced = {column: new.excluded[column] for column in (*INDEXED, "median_s", "document", "checksum")}
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
        """The keys among these whose jobs are done; a damaged record is not done."""
        wanted = iter(keys)
        found: set[str] = set()
        while chunk := list(islice(wanted, _KEYS_PER_QUESTION)):
            # With a condition on the outcome, SQLite would use that column's index and read all rows that are done.
            rows = self._fetched(self._question(measurements.c.key.in_(chunk)))
            found.update(row["key"] for row in self._sound(rows) if row["outcome"] == str(Outcome.DONE))
            found.update(self._spooled.intersection(chunk))
        return found

    def mark_unstable(self, keys: Iterable[str], reason: str, /) -> int:
        """Adds a reason to the summaries of these measurements and marks them unstable; returns their number."""

        def mark(connection: sql.Connection) -> int:
            changed = 0
            for row in self._sound(connection.execute(self._question(measurements.c.key.in_(wanted)))):
                document = json.loads(row["document"])
                if document.get("summary") is None:
                    continue
                marked = row_of(_unstable(read_document(document, self._place(row)), reason))
                new = {name: marked[name] for name in ("document", "checksum")}
                connection.execute(measurements.update().where(measurements.c.id == row["id"]).values(new))
                changed += 1
            return changed

        wanted = list(keys)
        return self._answered(mark)

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
        left_out: list[str] = []
        while True:
            # Pages by id instead of one long cursor, which would make writers wait.
            question = self._question(measurements.c.id > last_id, *_conditions(asked))
            page = question.order_by(measurements.c.id).limit(_ROWS_PER_CHUNK)
            rows = self._fetched(page)
            if not rows:
                break
            for row in self._sound(rows, left_out):
                yield read_document(json.loads(row["document"]), self._place(row))
            last_id = rows[-1]["id"]
        if left_out:
            self._warn(
                f"{len(left_out)} damaged records are left out (such as {', '.join(left_out[:_NAMED])}); measure them "
                "again, and check the disk"
            )

    def _question(self, *conditions: sql.ColumnElement[bool]) -> Any:
        text = sql.cast(measurements.c.document, sql.Text).label("document")
        names = ["id", "key", *INDEXED, "median_s", *(["checksum"] if self._has_checksums else [])]
        return sql.select(*(measurements.c[name] for name in names), text).where(*conditions)

    def _fetched(self, question: Any) -> list[Mapping[Any, Any]]:
        return self._answered(lambda connection: list(connection.execute(question).mappings()))

    def _sound(self, rows: Iterable[Any], left_out: list[str] | None = None) -> Iterator[Mapping[Any, Any]]:
        """The rows that are as they were written; the keys of the others are added to ``left_out``."""
        for row in rows:
            found = row if isinstance(row, Mapping) else row._mapping
            if _is_sound(found):
                yield found
            else:
                self._damaged[found["id"]] = str(found["key"])
                if left_out is not None:
                    left_out.append(str(found["key"]))

    def _place(self, row: Mapping[Any, Any]) -> str:
        return f"{self._name}, record {row['key']}"

    def find(self, key: str) -> Measurement:
        """The one measurement whose key is, or begins with, the given text.

        Raises:
            RecordError: No measurement or several have such a key, or it is damaged.
        """
        # A second one is enough to tell that a key is ambiguous.
        question = self._question(measurements.c.key.startswith(key, autoescape=True)).limit(2)
        found = self._fetched(question)
        rows = list(self._sound(found))
        if len(found) != 1 or not rows:
            is_damaged = len(found) == 1
            number = "a damaged one" if is_damaged else "none" if not rows else "more than one"
            raise RecordError(
                f"{self._name}: expected one record whose key begins with '{key}', got {number}"
            )
        return read_document(json.loads(rows[0]["document"]), self._place(rows[0]))

    def check(self) -> tuple[str, ...]:
        """Reads all records; returns a line for each kind of damage, nothing if the store is whole."""
        is_file = self._engine.dialect.name == "sqlite"
        structure = self._structure_damage() if is_file else []
        self._damaged.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            num_read = sum(1 for _ in self.measurements()) + len(self._damaged)
        lines = [f"the file: {line}" for line in structure]
        lines += [f"record {key}: not as it was written" for key in self._damaged.values()]
        if num_read != (number := self.count()):
            lines.append(f"{number} records are counted, but {num_read} could be read")
        return tuple(lines)

    def count(self, **asked: str | None) -> int:
        """Number of measurements; the arguments are those of ``measurements``."""
        question = sql.select(sql.func.count()).select_from(measurements).where(*_conditions(asked))
        return int(self._answered(lambda connection: connection.execute(question).scalar_one()))

    def counts(self, *columns: str) -> list[tuple[tuple[str, ...], int]]:
        """Numbers of measurements by the values of some of the indexed columns, in their order."""
        _check_columns(columns)
        chosen = [measurements.c[name] for name in columns]
        question = sql.select(*chosen, sql.func.count()).group_by(*chosen).order_by(*chosen)
        rows = self._answered(lambda connection: connection.execute(question).all())
        return [(tuple(map(str, row[:-1])), int(row[-1])) for row in rows]

    def _answered(self, ask: Callable[[sql.Connection], _Answer]) -> _Answer:
        try:
            return self._transact(ask)
        except _AwayError as error:
            raise RecordError(f"{self._name}: {error}") from error

    def _transact(self, ask: Callable[[sql.Connection], _Answer]) -> _Answer:
        """The result of a transaction, tried again while the server is away for some seconds.

        Raises:
            _AwayError: The server was there and is gone.
            RecordError: The database refuses for another reason.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        wait_s = 0.1
        while True:
            try:
                with self._engine.begin() as connection:
                    return ask(connection)
            except sql.exc.SQLAlchemyError as error:
                explanation = explained(error, self._name)
                if self._spool is None or not is_away(error, was_open=self._was_open):
                    raise explanation from error
                # A server that was away a moment ago is not waited for again with every measurement.
                if time.monotonic() + wait_s > deadline_s or time.monotonic() < self._ask_again_at_s:
                    if not self._was_open:
                        raise explanation from error
                    raise _AwayError(str(explanation).removeprefix(f"{self._name}: ")) from error
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 2.0)


class _AwayError(Exception):
    """The server of a store is away; the text says why."""


def _is_sound(row: Mapping[Any, Any]) -> bool:
    """True if a row is as it was written, or parses where it was written without a checksum."""
    if row.get("checksum") is not None:
        return bool(checksum_of(row) == row["checksum"])
    try:
        return isinstance(json.loads(row["document"]), dict)
    except (TypeError, ValueError):
        return False


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


class Spool:
    """The file that keeps measurements for a server that is away, shared by all processes of this user.

    Each line is the JSON document of a measurement, on the disk before it counts as written. A line that a kill or a
    full disk cut off never counted, and the next begins on a line of its own. Writing a measurement twice does no harm,
    because its key identifies it; so the file goes only after the server has all of it.

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
