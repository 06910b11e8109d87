"""``forerun compare`` and ``forerun apply``."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.surface.cli.output import print_json
from forerun.surface.cli.settings import JsonOption, MetricOption, ShowOutputOption
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.script.compare import Comparison

__all__ = ["apply", "compare"]

_AS_IT_IS = "script"


@verb(
    "Run two configurations in turns and compare them.", page="forerun.script.pages.tune_page:comparison_page"
)
def compare(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A", help="First configuration: a YAML file, or 'script' for the plain command."
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(
            metavar="B", help="Second configuration: a YAML file, or 'script' for the plain command."
        ),
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Training command, after --.")],
    repetitions: Annotated[int, typer.Option(help="Runs of each configuration.")] = 3,
    metric: MetricOption = None,
    margin: Annotated[
        float,
        typer.Option(
            help="Loss of the metric that still counts as equal: a share, of the value itself for losses.",
            min=0.0,
        ),
    ] = 0.01,
    show_output: ShowOutputOption = False,
) -> Comparison:
    """Run a command in two configurations by turns, and compare their speed and accuracy in pairs."""
    import forerun

    return forerun.compare(
        command,
        None if first == _AS_IT_IS else Path(first),
        None if second == _AS_IT_IS else Path(second),
        repetitions=repetitions,
        metric=metric,
        margin=margin,
        say=lambda line: typer.echo(line, err=True),
        echo=sys.stderr if show_output else None,
    )


@verb("Run a script with a configuration that was found.")
def apply(
    configuration: Annotated[
        Path, typer.Argument(metavar="BEST.yaml", help="Configuration that 'forerun tune' wrote.")
    ],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Training command, after --.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the exact command without running it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a command with a configuration that tune found, and print the exact command."""
    import forerun
    from forerun.script.profiling.launch import check_command
    from forerun.script.tuning.configuration import read_configuration

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
