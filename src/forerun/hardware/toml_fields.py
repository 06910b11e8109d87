"""Fields of the TOML files of hardware, links and prices, each checked with the file and the entry in the message."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.errors import CatalogError, near_matches

__all__ = ["positive_figure", "read_toml", "refuse_unknown_keys", "text_field"]


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


def refuse_unknown_keys(table: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    """Raise :class:`CatalogError` for the first unknown key, with similar known keys."""
    known = tuple(known)
    for key in table:
        if key not in known:
            raise CatalogError(f"{where}: unknown key '{key}'{near_matches(key, known)}; remove or rename it")


def text_field(table: Mapping[str, Any], key: str, where: str) -> str:
    """A text that is not empty; anything else raises :class:`CatalogError`."""
    value = table.get(key)
    if not isinstance(value, str) or not value.strip():
        raise CatalogError(f"{where}: '{key}' must be a text that is not empty, got {value!r}; add it")
    return value


def positive_figure(table: Mapping[str, Any], key: str, where: str) -> float:
    """A finite number above zero; anything else raises :class:`CatalogError`."""
    value: Any = table.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise CatalogError(
            f"{where}: '{key}' must be a positive number, got {value!r}; add the figure and its source"
        )
    return float(value)
