"""Tables that a user gives: rows of a CSV file and tables of a TOML file, each checked against a pydantic model.

A refusal names the file, the line or the entry, the column, and what it must be: the ``description`` of the field.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from forerun.base.errors import CatalogError, RecordError, near_matches

if TYPE_CHECKING:  # its users have it; whoever reads the shipped catalogue alone does without
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

__all__ = ["checked_table", "csv_cells", "read_rows", "read_toml"]

_Row = TypeVar("_Row", bound="BaseModel")


def read_rows(path: Path, row: type[_Row]) -> list[tuple[int, _Row]]:
    """The rows of a CSV file with a header, each with its line; an empty cell is one that is left out.

    Args:
        path: The file.
        row: Model of a row; its fields are the columns.

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
    for number, values in cells.items():
        try:
            found.append((number, row.model_validate(values)))
        except ValidationError as error:
            refusal = _in_words(_first(error), row, "column")
            raise RecordError(f"{path.name}, line {number}{refusal}") from None
    return found


def csv_cells(path: Path) -> dict[int, dict[str, str]]:
    """The cells of a CSV file by line and column, without spaces around them and without the empty ones.

    Raises:
        RecordError: The file cannot be read, or a line has more cells than columns.
    """
    import csv

    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            rows = [(reader.line_num, row) for row in reader]  # the reader counts as it goes
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        said = getattr(error, "strerror", None) or error
        raise RecordError(
            f"expected a CSV file at '{path}', but it cannot be read: {said}; check the path"
        ) from error
    for number, row in rows:
        if None in row:
            raise RecordError(
                f"{path.name}, line {number}: more cells than columns; quote cells that contain commas"
            )
    return {
        number: {str(name).strip(): cell.strip() for name, cell in row.items() if cell and cell.strip()}
        for number, row in rows
    }


def read_toml(path: Path, content: str) -> dict[str, Any]:
    """The parsed file; ``content`` names the expected kind of file in messages.

    Raises:
        CatalogError: The file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(
            f"{path}: expected a readable {content} file, got {error.strerror or error}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    field = model.model_fields.get(name)
    return None if field is None else field.annotation
