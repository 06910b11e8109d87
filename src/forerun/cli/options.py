"""Options that several commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["DebugOption", "JsonOption", "NoCacheOption", "PlotOption"]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Write a plot as well (png, svg or pdf).")
]

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

NoCacheOption = Annotated[bool, typer.Option("--no-cache", help="Trace the model anew.")]
