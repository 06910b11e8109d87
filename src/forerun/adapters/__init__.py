"""Other frameworks, file formats and clusters, found through entry points."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.tables import read_toml


@cache
def words_of(system: str) -> dict[str, Any]:
    """Words of other projects and what they mean here, a table of ``tables.toml``."""
    tables = read_toml(Path(__file__).with_name("tables.toml"), "words of other projects")
    found: dict[str, Any] = tables[system]
    return found
