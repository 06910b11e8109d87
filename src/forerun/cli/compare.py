"""``forerun compare``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page

__all__ = ["compare"]

_AS_IT_IS = "script"


def compare(
    first: Annotated[
        str, typer.Argument(metavar="A", help="A YAML file, or 'script' for the command as it is.")
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="The same.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="After --, the command.")],
    repetitions: Annotated[int, typer.Option(help="Runs of each.")] = 3,
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="Figure that the script prints.")] = None,
    margin: Annotated[float, typer.Option(help="Loss of the metric that counts as none.", min=0.0)] = 0.01,
    show_output: Annotated[
        bool, typer.Option("--show-output", help="Pass on what the script prints.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a command in two configurations in turns, and compare speed and accuracy in pairs."""
    import forerun

    found = forerun.compare(
        command,
        None if first == _AS_IT_IS else Path(first),
        None if second == _AS_IT_IS else Path(second),
        repetitions=repetitions,
        metric=metric,
        margin=margin,
        say=lambda line: typer.echo(line, err=True),
        echo=sys.stderr if show_output else None,
    )
    if as_json:
        print_json(found.as_dict())
        return
    from forerun.report.tune_page import comparison_page

    print_page(comparison_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
