"""Tables of the record store.

A measurement is one row: indexed columns for queries, and the whole measurement as a JSON document. The columns are
copies of values in the document; readers use the document.
"""

from __future__ import annotations

import sqlalchemy as sql

from forerun.errors import RecordError
from forerun.records.documents import measurement_document, read_document
from forerun.records.measurement import Measurement

__all__ = ["INDEXED", "LAYOUT_VERSION", "ensure_tables", "measurements", "row_of"]

LAYOUT_VERSION = 1
"""Version of the tables; the documents in them have their own version."""

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
)


def row_of(measurement: Measurement) -> dict[str, object]:
    """The row of a measurement.

    Raises:
        RecordError: The measurement holds a value that could not be read back, such as a time below zero.
    """
    document = measurement_document(measurement)
    read_document(document, f"record {measurement.key}")
    return {
        "key": measurement.key,
        "kind": str(measurement.kind),
        "subject": measurement.subject,
        "family": measurement.family,
        "device": measurement.circumstances.device,
        "outcome": str(measurement.outcome),
        "occasion": measurement.circumstances.occasion,
        "median_s": measurement.summary.median_s if measurement.summary else None,
        "document": document,
    }


def ensure_tables(connection: sql.Connection, name: str) -> None:
    """Makes the tables of an empty database.

    Raises:
        RecordError: The database has another layout, or holds a table that is not forerun's.
    """
    found = _layout_version(connection)
    if found is None:
        # Several processes may find the store missing at once: one makes it, the others look again.
        connection.exec_driver_sql(_LOCKS[connection.dialect.name])
        found = _layout_version(connection) or _make_tables(connection, name)
    if found != LAYOUT_VERSION:
        raise RecordError(
            f"{name}: expected a store of layout version {LAYOUT_VERSION}, got {found}; "
            "open it with the version of forerun that made it"
        )


def _make_tables(connection: sql.Connection, name: str) -> int:
    if sql.inspect(connection).has_table(measurements.name):
        raise RecordError(
            f"{name}: expected a store of records or an empty database, found a table 'measurements' that is "
            "not forerun's; name another database"
        )
    _metadata.create_all(connection)
    connection.execute(about.insert().values(layout_version=LAYOUT_VERSION))
    return LAYOUT_VERSION


def _layout_version(connection: sql.Connection) -> int | None:
    if not sql.inspect(connection).has_table(about.name):
        return None
    return int(connection.execute(sql.select(about.c.layout_version)).scalar_one())


_LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(20261121)"}
