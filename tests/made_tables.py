"""Tables of steps as earlier versions of forerun wrote them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from forerun.evidence.records.step_record import SCHEMA_VERSION, StepRecord

COLUMNS = [field.name for field in dataclasses.fields(StepRecord)]


def write_records(records: Iterable[StepRecord], path: Path) -> None:
    """Writes records in forerun's own format, a ``.csv`` or a ``.parquet`` file."""
    frame = pd.DataFrame([_cells(record) for record in records], columns=["schema_version", *COLUMNS])
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)


def _cells(record: StepRecord) -> dict[str, object]:
    shape = record.input_shape
    cells = {name: getattr(record, name) for name in COLUMNS}
    return {
        "schema_version": SCHEMA_VERSION,
        **cells,
        "input_shape": None if shape is None else "x".join(map(str, shape)),
    }
