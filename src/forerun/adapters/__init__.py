"""Other frameworks, file formats and clusters, found through entry points."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from forerun.base.tables import read_toml


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_toml(Path(__file__).with_name("tables.toml"), "words of other projects")


def words_of(system: str) -> dict[str, Any]:
    """Words of other projects and what they mean here, a table of ``tables.toml``."""
    return _tables()[system]
