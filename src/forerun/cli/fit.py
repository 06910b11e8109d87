"""``forerun fit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import DebugOption
from forerun.cli.output import quiet_libraries
from forerun.errors import UsageError

__all__ = ["fit"]

_MODELS = ("op",)


def fit(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the fitted weights go.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="What to fit: op, the time of single operations.")
    ] = "op",
    debug: DebugOption = False,
) -> None:
    """Fit a cost model to the public reference tables (hours of work on a small machine)."""
    if model not in _MODELS:
        raise UsageError(f"unknown cost model '{model}'; expected one of {', '.join(_MODELS)}")
    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; create it or choose another with --out")
    from forerun import api

    with quiet_libraries(debug=debug):
        api.fit_op_model(out)
    typer.echo(f"weights written to {out}", err=True)
