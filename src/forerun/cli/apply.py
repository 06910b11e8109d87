"""``forerun apply``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import print_json

__all__ = ["apply"]


def apply(
    configuration: Annotated[
        Path, typer.Argument(metavar="BEST.yaml", help="Configuration that 'forerun tune' wrote.")
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Training command, after --.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command without running it.")
    ] = False,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a command with a configuration that tune found, and print the exact command."""
    import forerun
    from forerun.profiling.launch import check_command
    from forerun.tuning.configuration import read_configuration

    found = read_configuration(configuration)
    exact = shlex.join(found.command(check_command(command)))
    answer = {"command": exact, "arguments": found.arguments, "hooks": found.hooks}
    if dry_run:
        if as_json:
            print_json({**answer, "wall_s": None})
            return
        typer.echo(exact)
        for name, value in found.hooks.items():
            typer.echo(f"hook: {name}={value}")
        return
    run = forerun.apply(
        command,
        found,
        say=lambda line: typer.echo(line, err=True),
        # The script's own output is the answer, unless JSON was asked for.
        echo=sys.stderr if as_json else sys.stdout,
    )
    if as_json:
        print_json({**answer, "wall_s": run.end_s - run.begin_s})
