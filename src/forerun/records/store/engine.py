"""Access to a record store: the URL of a name, the connections, and database errors in one clear line each."""

from __future__ import annotations

from collections.abc import Mapping
from json import JSONEncoder
from pathlib import Path
from typing import Any

import sqlalchemy as sql

from forerun.errors import MissingExtraError, RecordError, UsageError

__all__ = ["explained", "open_engine", "url_of"]

_BUSY_TIMEOUT_MS = 60_000
"""Longest time that a writer waits for other writers of the same SQLite file [s]."""


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

    Raises:
        RecordError: The file is missing and may not be made, is a folder, or its folder cannot be made.
        MissingExtraError: The driver is not installed.
    """
    if url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:"):
        _check_file(Path(str(url.database)), create)
    try:
        engine = sql.create_engine(url, json_serializer=_as_json)
    except ModuleNotFoundError as error:
        raise MissingExtraError("a PostgreSQL store", "postgres") from error
    if engine.dialect.name == "sqlite":
        sql.event.listen(engine, "connect", _set_up_sqlite)
    return engine


# One encoder for all rows: json.dumps makes a new one at each call.
_as_json = JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def _check_file(path: Path, create: bool) -> None:
    if path.is_dir():
        raise RecordError(f"{path}: expected a file of records, got a folder; name a file in it")
    if path.exists():
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
    cursor = connection.cursor()
    # Set the timeout first: changing the journal waits for other writers as well. With the journal WAL, readers and a
    # writer do not wait for each other; FULL waits for the disk at every commit.
    for setting in (f"busy_timeout={_BUSY_TIMEOUT_MS}", "journal_mode=WAL", "synchronous=FULL"):
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


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
