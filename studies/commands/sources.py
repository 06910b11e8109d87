"""The option of studies whose rows come from named sources."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import typer

from forerun.base.errors import UsageError

SourceOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Source of the rows, several times for several.")
]


def chosen_sources(given: list[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """The sources that were named, all if none was.

    Raises:
        UsageError: A source is not known.
    """
    for name in given or ():
        if name not in known:
            raise UsageError(f"unknown source '{name}'; expected one of {', '.join(known)}")
    return tuple(given or known)
