"""Files of other people: rows of a CSV file and tables of a TOML file, each checked against a pydantic model.

A refusal names the file, the line or the entry, the column, and what it must be: the ``description`` of the field.

Tables of measurements are read as text, and checked before their rows are believed.
"""

from __future__ import annotations

import codecs
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.base.errors import CatalogError, RecordError, near_matches
from forerun.base.extras import needing

if TYPE_CHECKING:
    import pandas as pd
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

_Row = TypeVar("_Row", bound="BaseModel")


def read_rows(
    path: Path, row: type[_Row], columns: Mapping[str, str] | None = None
) -> list[tuple[int, _Row]]:
    """The rows of a CSV file with a header, each with its line; an empty cell is one that is left out.

    Args:
        path: The file.
        row: Model of a row; its fields are the columns.
        columns: Column of a field where it has another name.

    Raises:
        RecordError: The file cannot be read, has no row, or a cell is damaged or missing.
    """
    from pydantic import ValidationError

    cells = csv_cells(path)
    fields = row.model_fields
    if not cells:
        raise RecordError(
            f"{path.name}: expected a row or more below the header {','.join(fields)}, got none"
        )
    found = []
    for number, named in cells.items():
        values = named | {field: named[name] for field, name in (columns or {}).items() if name in named}
        try:
            found.append((number, row.model_validate(values)))
        except ValidationError as error:
            refusal = _in_words(_first(error), row, "column")
            raise RecordError(f"{path.name}, line {number}{refusal}") from None
    return found


def encoding_of(path: Path) -> str:
    """UTF-16 where a file begins with its mark, as what Windows PowerShell redirects does; else UTF-8 with or without.

    Raises:
        OSError: The file cannot be opened.
    """
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def csv_cells(path: Path) -> dict[int, dict[str, str]]:
    """The cells of a CSV file by line and column, without spaces around them and without the empty ones.

    Raises:
        RecordError: The file cannot be read, or a line has more cells than columns.
    """
    import csv

    try:
        with path.open(newline="", encoding=encoding_of(path)) as file:
            mark = max(",;\t", key=file.readline().count)  # spreadsheets of many countries write semicolons
            file.seek(0)
            reader = csv.DictReader(file, skipinitialspace=True, delimiter=mark)
            rows = [(reader.line_num, row) for row in reader]  # the reader counts as it goes
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = getattr(error, "strerror", None) or error
        raise RecordError(
            f"expected a CSV file at '{path}', but it cannot be read: {said}; check the path"
        ) from error
    for number, row in rows:
        if None in row:
            raise RecordError(
                f"{path.name}, line {number}: more cells than columns; quote cells that contain '{mark}'"
            )
    return {
        number: {str(name).strip(): cell.strip() for name, cell in row.items() if cell and cell.strip()}
        for number, row in rows
    }


@cache
def own_table(module: str, name: str) -> dict[str, Any]:
    """A TOML file of the package, read once; ``module`` is the ``__file__`` of the module beside which it is."""
    return tomllib.loads((Path(module).parent / name).read_text(encoding="utf-8"))


def read_toml(path: Path, content: str) -> dict[str, Any]:
    """The parsed file; ``content`` names the expected kind of file in messages.

    Raises:
        CatalogError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise CatalogError(
            f"{path}: expected a readable {content} file, got {error.strerror or error}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path}: expected a TOML file, but {error}; correct the file") from error


def checked_table(table: Any, model: type[_Row], where: str) -> _Row:
    """A table of a TOML file as its model; ``where`` names it in messages.

    Raises:
        CatalogError: A key is unknown or missing, or a value is impossible.
    """
    from pydantic import ValidationError

    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise CatalogError(f"{where}{_in_words(_first(error), model, 'key')}") from None


def _first(error: ValidationError) -> ErrorDetails:
    """The fault to tell: an unknown name before the value that is missing because of it."""
    found = error.errors()
    return next((detail for detail in found if detail["type"] == "extra_forbidden"), found[0])


def _in_words(detail: ErrorDetails, model: Any, kind: str) -> str:
    """The refusal of a value, of an unknown name or of a missing one, after the tables that lead to it."""
    inside = ""
    names = [str(part) for part in detail["loc"]]
    while len(names) > 1 and hasattr(_type_of(model, names[0]), "model_fields"):
        model, inside = _type_of(model, names[0]), f"{inside}, {names[0]}"
        names = names[1:]
    name = names[0] if names else ""
    if detail["type"] == "extra_forbidden":
        near = near_matches(name, model.model_fields)
        return f"{inside}: unknown {kind} '{name}'{near}; remove or rename it"
    field = model.model_fields.get(name)
    wanted = field.description if field is not None and field.description else f"right ({detail['msg']})"
    is_missing = detail["type"] == "missing"
    got = None if is_missing else detail["input"]
    return f"{inside}: '{name}' must be {wanted}, got {got!r}{'; add it' if is_missing else ''}"


def _type_of(model: Any, name: str) -> Any:
    return getattr(model.model_fields.get(name), "annotation", None)


def read_table(path: Path) -> pd.DataFrame:
    """A CSV or Parquet file as a frame; text stays text and gaps stay gaps.

    CSV cells are read as text so that a model called ``nan`` or a version ``1.10`` survives.
    """
    with needing("reading a table of measurements"):
        import pandas as pd

    if not path.is_file():
        raise RecordError(f"expected a table of measurements at {path}, but there is no such file")
    if path.suffix not in (".csv", ".parquet"):
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
    columns: Iterable[str], table: str, required: Collection[str], optional: Collection[str] | None = None
) -> None:
    """Refuse a table with missing columns and, if ``optional`` is given, one with unknown columns."""
    found = [str(name) for name in columns]
    known = {*required, *(optional or ())}
    unknown = [name for name in found if name not in known and optional is not None]
    if unknown:
        raise RecordError(
            f"{table}: unknown column '{unknown[0]}'{near_matches(unknown[0], known)} "
            "(units are part of a column's name: times in _s, sizes in _bytes); rename or remove it"
        )
    missing = [name for name in required if name not in found]
    if missing:
        raise RecordError(
            f"{table}: expected the columns {', '.join(required)}; missing: {', '.join(missing)}"
            + near_matches(missing[0], found)
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
