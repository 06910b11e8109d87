"""The root command."""

from __future__ import annotations

import gc
from typing import Annotated

import typer

from forerun.base.temporary import remove_leftovers
from forerun.surface.cli.failures import OneLineErrors, end_cleanly_on_signals
from forerun.surface.cli.output import show_any_sign, show_own_warnings
from forerun.surface.cli.settings import DebugOption
from forerun.surface.cli.verbs import Root

__all__ = ["app", "run"]


class _Forerun(OneLineErrors, Root):
    """All verbs, with one line for each failure."""


# Plain help: rich's markup would add its import time to every call.
app = typer.Typer(
    name="forerun",
    cls=_Forerun,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version; with --verbose also those of libraries and GPUs."),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="With --version: the details that a bug report needs.")
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Show no progress; answers and errors are still printed."),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Know what a training run will take before you run it."""
    if version:
        from forerun.surface.cli.doctor import version_lines

        for line in version_lines(verbose=verbose):
            typer.echo(line)
        raise typer.Exit
    if verbose:
        raise typer.BadParameter("--verbose goes with --version")
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run() -> None:
    """Entry point of the command ``forerun``."""
    gc.set_threshold(50_000)  # imports and short answers leave few cycles, and looking for them takes time
    show_any_sign()
    show_own_warnings()
    end_cleanly_on_signals()
    remove_leftovers()
    app(prog_name="forerun")
