"""The folder of public tables, and each of them as a frame.

The tables are not part of forerun (some sources carry no licence). Readers apply each table's own caveats; nothing is
fitted or filtered by result.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.base.errors import RecordError
from forerun.base.tables import check_columns, read_table

if TYPE_CHECKING:
    import pandas as pd

FOLDER_VARIABLE = "FORERUN_REFERENCE_DATA"


def reference_folder() -> Path | None:
    """Folder of the public tables: ``FORERUN_REFERENCE_DATA``, else ``../shared/data`` beside the repository.

    The repository is the nearest folder above the current one that holds ``pyproject.toml``. None if neither
    exists.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise RecordError(f"{FOLDER_VARIABLE} names '{named}', which is no folder; correct or unset it")
        return Path(named)
    here = Path.cwd()
    roots = (folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file())
    root = next(roots, None)
    beside = root.parent / "shared" / "data" if root else None
    return beside if beside is not None and beside.is_dir() else None


def require_reference_folder() -> Path:
    """Folder of the public tables.

    Raises:
        RecordError: There is none.
    """
    folder = reference_folder()
    if folder is None:
        raise RecordError(
            "the public measurement tables are needed and were not found: expected a folder with "
            f"timm_train.parquet and its siblings; name it in {FOLDER_VARIABLE}"
        )
    return folder


def public_table(folder: Path, name: str, columns: Collection[str] = ()) -> pd.DataFrame:
    """A table of the folder.

    Args:
        folder: Folder of the public tables.
        name: Name without its ending, such as ``llm/gemm``.
        columns: Columns that it must have.

    Raises:
        RecordError: The table is missing, is damaged or lacks a column.
    """
    path = folder / f"{name}.parquet"
    frame = read_table(path)
    check_columns(frame.columns, path.name, columns)
    return frame


def integer_or_none(value: object) -> int | None:
    """A whole number from a nullable cell; gaps arrive as NaN, None or pandas' NA."""
    import pandas as pd

    return None if pd.isna(value) else int(float(str(value)))  # type: ignore[call-overload]
