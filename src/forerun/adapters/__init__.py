"""Other frameworks, file formats and clusters, found through entry points."""

from __future__ import annotations

from typing import Any

from forerun.base.tables import own_table


def words_of(system: str) -> dict[str, Any]:
    """Words of other projects and what they mean here, a table of ``tables.toml``."""
    words: dict[str, Any] = own_table(__file__, "tables.toml")[system]
    return words
