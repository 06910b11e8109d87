"""Tables of measurements: read as text, and checked before their rows are believed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import RecordError, near_matches
from forerun.base.extras import needing

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check_columns", "check_positive", "check_unique", "read_table"]

_READERS = {".csv": "read_csv", ".parquet": "read_parquet"}


def read_table(path: Path) -> pd.DataFrame:
    """A CSV or Parquet file as a frame; text stays text and gaps stay gaps.

    CSV cells are read as text so that a model called ``nan`` or a version ``1.10`` survives.
    """
    with needing("reading a table of measurements"):
        import pandas as pd

    if not path.is_file():
        raise RecordError(f"expected a table of measurements at {path}, but there is no such file")
    if path.suffix not in _READERS:
        raise RecordError(f"{path.name}: expected a .csv or .parquet file, got '{path.suffix}'; convert it")
    try:
        if path.suffix == ".csv":
            frame = pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)
        else:
            frame = pd.read_parquet(path)
    except (ValueError, OSError) as error:
        # pandas' parser errors and pyarrow's ArrowInvalid are ValueErrors.
        raise RecordError(f"{path.name}: the file cannot be read as {path.suffix[1:]}: {error}") from error
    if frame.empty:
        raise RecordError(f"{path.name}: expected at least one row, got none")
    return frame


def check_columns(
    frame: pd.DataFrame, table: str, required: Collection[str], optional: Collection[str] | None = None
) -> None:
    """Refuse a table with missing columns and, if ``optional`` is given, one with unknown columns."""
    missing = [name for name in required if name not in frame.columns]
    if missing:
        raise RecordError(
            f"{table}: expected the columns {', '.join(required)}; missing: {', '.join(missing)}"
            + near_matches(missing[0], map(str, frame.columns))
        )
    if optional is None:
        return
    known = {*required, *optional}
    unknown = [str(name) for name in frame.columns if name not in known]
    if unknown:
        raise RecordError(
            f"{table}: unknown column '{unknown[0]}'{near_matches(unknown[0], known)} "
            "(units are part of a column's name: times in _s, sizes in _bytes); rename or remove it"
        )


def check_positive(frame: pd.DataFrame, table: str, columns: Sequence[str]) -> None:
    """Turn columns into numbers in place; refuse text, gaps, NaN, infinity, zero and negative values."""
    import numpy as np
    import pandas as pd

    for name in columns:
        numbers = pd.to_numeric(frame[name], errors="coerce")
        values = numbers.to_numpy(dtype=float, na_value=np.nan)
        bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
        if bad.size:
            raise RecordError(
                f"{table}, column '{name}', row {bad[0] + 1}: expected a number above zero, "
                f"got '{frame[name].iloc[bad[0]]}' ({bad.size} such row(s)); correct or drop it"
            )
        frame[name] = numbers


def check_unique(frame: pd.DataFrame, table: str, key: Sequence[str]) -> None:
    """Refuse two rows with the same key."""
    repeated = frame.duplicated(list(key), keep="first").to_numpy()
    if repeated.any():
        row = int(repeated.argmax())
        what = ", ".join(f"{name}={frame[name].iloc[row]}" for name in key)
        raise RecordError(
            f"{table}, row {row + 1}: {what} occurs twice; keep one row or tell them apart in a key column"
        )
