"""Database of a record store: its tables, its connections, and its errors in one clear line each.

A measurement is one row: indexed columns for queries, and the whole measurement as a JSON document. The columns are
copies of values in the document; readers use the document. A checksum over all of them tells a damaged row from
another measurement.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from json import JSONEncoder
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from forerun.base.errors import MissingExtraError, RecordError, UsageError
from forerun.evidence.records.measurement import Measurement, measurement_document, read_document

LAYOUT_VERSION = 2
"""Version of the tables; the documents in them have their own version. Version 1 had no checksums."""

INDEXED = ("kind", "subject", "family", "device", "outcome", "occasion")
"""Columns by which records can be selected."""

_metadata = sql.MetaData()

about = sql.Table("forerun_store", _metadata, sql.Column("layout_version", sql.Integer, nullable=False))

measurements = sql.Table(
    "measurements",
    _metadata,
    sql.Column("id", sql.Integer, primary_key=True, autoincrement=True),
    sql.Column("key", sql.String(64), nullable=False, unique=True),
    *(sql.Column(name, sql.Text, nullable=False, index=True) for name in INDEXED),
    sql.Column("median_s", sql.Float),
    sql.Column("document", sql.JSON, nullable=False),
    sql.Column("checksum", sql.String(16)),
)

# One encoder for all rows: json.dumps makes a new one at each call.
as_json = JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def checksum_of(row: Any) -> str:
    """The checksum of a row, given its values by name and its document as text."""
    values = [row["key"], *(row[name] for name in INDEXED), repr(row["median_s"]), row["document"]]
    # A separator that no value holds: "ab" and "c" must not have the checksum of "a" and "bc".
    text = "\x1f".join(str(value) for value in values)
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


def row_of(measurement: Measurement) -> dict[str, object]:
    """The row of a measurement.

    Raises:
        RecordError: The measurement holds a value that could not be read back, such as a time below zero.
    """
    document = measurement_document(measurement)
    read_document(document, f"record {measurement.key}")
    row: dict[str, object] = {
        "key": measurement.key,
        "kind": str(measurement.kind),
        "subject": measurement.subject,
        "family": measurement.family,
        "device": measurement.circumstances.device,
        "outcome": str(measurement.outcome),
        "occasion": measurement.circumstances.occasion,
        "median_s": measurement.summary.median_s if measurement.summary else None,
    }
    return {**row, "document": document, "checksum": checksum_of({**row, "document": as_json(document)})}


def ensure_tables(
    connection: sql.Connection, name: str, *, may_write: bool = True, upgrades: bool = True
) -> bool:
    """Makes the tables of an empty database, and adds checksums to those of layout version 1 if it ``upgrades``.

    Returns:
        True if the rows have checksums.

    Raises:
        RecordError: The database has another layout, holds a table that is not forerun's, or is empty and may not be
            written.
    """
    found = _layout_version(connection, name)
    if not may_write:
        if found is None:
            raise RecordError(
                f"{name}: expected a store of records, found no records in it; name another file"
            )
        if found in (1, LAYOUT_VERSION):
            return found == LAYOUT_VERSION
    if found == 1 and not upgrades:
        return False
    if found in (None, 1):
        # Several processes may find the store missing at once: one makes it, the others look again.
        connection.exec_driver_sql(_LOCKS[connection.dialect.name])
        found = _layout_version(connection, name)
        if found is None:
            found = _make_tables(connection, name)
        elif found == 1:
            found = _add_checksums(connection)
    if found != LAYOUT_VERSION:
        raise RecordError(
            f"{name}: expected a store of layout version {LAYOUT_VERSION}, got {found}; "
            "open it with the version of forerun that made it"
        )
    return True


def _add_checksums(connection: sql.Connection) -> int:
    connection.exec_driver_sql("ALTER TABLE measurements ADD COLUMN checksum VARCHAR(16)")
    text = sql.cast(measurements.c.document, sql.Text).label("document")
    names = ("id", "key", *INDEXED, "median_s")
    rows = connection.execute(sql.select(*(measurements.c[name] for name in names), text)).mappings().all()
    if rows:
        chosen = measurements.c.id == sql.bindparam("row_id")
        connection.execute(
            measurements.update().where(chosen).values(checksum=sql.bindparam("new_checksum")),
            [{"row_id": row["id"], "new_checksum": checksum_of(row)} for row in rows],
        )
    connection.execute(about.update().values(layout_version=LAYOUT_VERSION))
    return LAYOUT_VERSION


def _make_tables(connection: sql.Connection, name: str) -> int:
    if sql.inspect(connection).has_table(measurements.name):
        raise RecordError(
            f"{name}: expected a store of records or an empty database, found a table 'measurements' that is "
            "not forerun's; name another database"
        )
    _metadata.create_all(connection)
    connection.execute(about.insert().values(layout_version=LAYOUT_VERSION))
    return LAYOUT_VERSION


def _layout_version(connection: sql.Connection, name: str) -> int | None:
    if not sql.inspect(connection).has_table(about.name):
        return None
    found = connection.execute(sql.select(about.c.layout_version)).scalars().all()
    if len(found) != 1 or not isinstance(found[0], int):
        raise RecordError(f"{name}: the database is damaged: its layout version is {found}; restore it")
    return found[0]


_LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(20261121)"}


_BUSY_TIMEOUT_MS = 60_000
"""Longest time that a writer waits for other writers of the same SQLite file [s]."""
_CONNECT_TIMEOUT_S = 10
"""Longest time that a connection to a server may take, unless the URL has another."""


def url_of(text: str) -> tuple[sql.URL, str]:
    """The URL of a file's name or URL, and the name to print, without a password.

    Raises:
        UsageError: The URL cannot be read, or names a database other than SQLite and PostgreSQL.
    """
    if "://" not in text:
        path = Path(text).expanduser()
        return sql.URL.create("sqlite", database=str(path)), str(path)
    try:
        url = sql.make_url(text)
    except (sql.exc.ArgumentError, ValueError) as error:
        # Do not print the text itself: it may hold a password.
        raise UsageError(
            "expected a file or a database URL such as postgresql://user@host/name, "
            f"got one that cannot be read, '{text.partition('://')[0]}://...'"
        ) from error
    backend = url.get_backend_name()
    # "postgres" is what many providers of servers write.
    if backend in ("postgres", "postgresql"):
        url = url.set(drivername="postgresql+psycopg")
    elif backend != "sqlite":
        raise UsageError(f"records are kept in SQLite or PostgreSQL; got '{backend}'")
    return url, url.render_as_string(hide_password=True)


def open_engine(url: sql.URL, *, create: bool) -> sql.Engine:
    """Connections to a database; for a file, its folder is made if it is missing.

    A file that may not be written is opened for reading, without a write-ahead log beside it.

    Raises:
        RecordError: The file is missing and may not be made, is a folder, or its folder cannot be made.
        MissingExtraError: The driver is not installed.
    """
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        if url.database not in (None, "", ":memory:"):
            path = Path(str(url.database))
            _check_file(path, create)
            # By its rights or because of its disk.
            may_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
            if not create and path.exists() and not may_write:
                url = _read_only(path)
    else:
        # A pool's connection may be dead since the server's restart: it is tried before each use.
        options = {"pool_pre_ping": True}
        if "connect_timeout" not in url.query:
            options["connect_args"] = {"connect_timeout": _CONNECT_TIMEOUT_S}
    try:
        engine = sql.create_engine(url, json_serializer=as_json, **options)
    except ModuleNotFoundError as error:
        raise MissingExtraError("a PostgreSQL store", "postgres") from error
    if engine.dialect.name == "sqlite":
        sql.event.listen(engine, "connect", _set_up_reader if "mode" in url.query else _set_up_sqlite)
        sql.event.listen(engine, "before_cursor_execute", _with_a_small_first_word, retval=True)
    return engine


def _read_only(path: Path) -> sql.URL:
    # Without a log beside it, nobody writes to the file, and SQLite needs no shared memory that it could not make.
    query = {"uri": "true", "mode": "ro"}
    if not path.with_name(f"{path.name}-wal").exists():
        query["immutable"] = "1"
    return sql.URL.create("sqlite", database=path.resolve().as_uri(), query=query)


def _check_file(path: Path, create: bool) -> None:
    if path.is_dir():
        raise RecordError(f"{path}: expected a file of records, got a folder; name a file in it")
    if path.exists():
        if not path.is_file():
            raise RecordError(f"{path}: expected a file of records, got a device or a pipe; name a file")
        return
    if not create:
        raise RecordError(f"expected records at {path}, but there is no such file; measure something first")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(
            f"{path}: its folder cannot be made ({error.strerror}); name another place"
        ) from error


def _set_up_sqlite(connection: Any, _: Any) -> None:
    _set_up_reader(connection, _)
    cursor = connection.cursor()
    # Set the timeout first: changing the journal waits for other writers as well. With the journal WAL, readers and a
    # writer do not wait for each other; FULL waits for the disk at every commit.
    for setting in (f"busy_timeout={_BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _with_a_small_first_word(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> tuple[str, Any]:
    # Python's driver begins a transaction, and counts rows, at an "insert" in the lower case of the C library. In
    # Turkish that of I is another letter than i, and each row of an "INSERT" would be committed alone and not counted.
    word, space, rest = statement.partition(" ")
    return f"{word.lower()}{space}{rest}", parameters


def _set_up_reader(connection: Any, _: Any) -> None:
    # Damaged text is read as it is: its checksum tells.
    connection.text_factory = lambda found: found.decode("utf-8", "surrogateescape")
    connection.execute("PRAGMA cell_size_check=ON")


_NO_SPACE = "no space is left on the device; free some and run again; records written before are safe"
_CAUSES: Mapping[str, str] = {
    "is full": _NO_SPACE,
    "no space left": _NO_SPACE,
    "disk i/o error": "the disk cannot be written (full or failing); records written before are safe",
    "readonly": "it cannot be written; check the rights of the file and its folder",
    "unable to open": "it cannot be opened; check that its folder exists and can be written",
    "not a database": "it is not an SQLite database; name another file",
    "malformed": "the database is damaged; restore it, or save what can be read with sqlite3's .recover",
    "locked": "another process has kept it locked for a minute; end that process and run again",
    "connection option": "the URL has an option that PostgreSQL does not know; correct the part after '?'",
    "uri query parameter": "the URL has an option that PostgreSQL does not know; correct the part after '?'",
    "authentication failed": "the server does not accept the user; check the name and the password",
    "no password supplied": "the server asks for a password; give it in the URL or in ~/.pgpass",
    "role": "the server does not know the user; check the name in the URL",
    "does not exist": "the server has no database of this name; make it with createdb, or correct the name",
    "refused": "the server cannot be reached: nothing listens on this port; check the port, and that it runs",
    "timeout": "the server cannot be reached: it did not answer; check its address and the network",
    "timed out": "the server cannot be reached: it did not answer; check its address and the network",
    "resolve": "the server cannot be reached: its name is not known; check the address",
    "translate host name": "the server cannot be reached: its name is not known; check the address",
    "connect": "the server cannot be reached; check its address and that it runs",
}


def explained(error: sql.exc.SQLAlchemyError, name: str) -> RecordError:
    """The error of a database in words: the store, the meaning, and the next thing to do."""
    cause = str(getattr(error, "orig", None) or error).strip()
    first_line = cause.splitlines()[0] if cause else repr(error)
    for sign, meaning in _CAUSES.items():
        if sign in cause.lower():
            return RecordError(f"{name}: {meaning} ({first_line})")
    return RecordError(f"{name}: the database refused: {first_line}")


_OF_RESTARTS = ("starting up", "shutting down", "recovery mode", "terminating connection")


def is_away(error: sql.exc.SQLAlchemyError, *, was_open: bool) -> bool:
    """True if a server is away, maybe for seconds: it restarts, or it was there before and is gone.

    Args:
        error: Error of the database.
        was_open: True if the store has answered before.
    """
    if not isinstance(error, sql.exc.DBAPIError):
        return False
    text = str(error.orig).lower()
    if any(sign in text for sign in _OF_RESTARTS):
        return True
    is_lost = error.connection_invalidated or isinstance(
        error, sql.exc.OperationalError | sql.exc.InterfaceError
    )
    return was_open and is_lost and not any(sign in text for sign in ("authentication", "does not exist"))
