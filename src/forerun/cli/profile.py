"""``forerun profile``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.failures import INTERRUPTED_STATUS
from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page

__all__ = ["profile"]


def profile(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="After --, the command as you would run it.")
    ],
    steps: Annotated[
        int | None, typer.Option(help="Stop the script after so many steps; it runs to its end if not given.")
    ] = None,
    window: Annotated[int, typer.Option(help="Steps under torch.profiler; 0 for none.")] = 5,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 3,
    epochs: Annotated[
        float | None, typer.Option(help="Epochs of the whole job, where the script's arguments do not tell.")
    ] = None,
    timeout: Annotated[str | None, typer.Option(metavar="10min", help="Longest time of the run.")] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep what the processes recorded here.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the JSON here as well.")
    ] = None,
    plot: PlotOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Run a training script unchanged and tell where its time goes, what limits it and what to try next."""
    import forerun
    from forerun.report.figure import check_plot_path
    from forerun.units import parse_amount

    if plot is not None:
        check_plot_path(plot)
    found = forerun.profile(
        command,
        num_steps=steps,
        window_steps=window,
        warmup_steps=warmup,
        epochs=epochs,
        timeout_s=None if timeout is None else parse_amount(timeout, "time"),
        folder=records,
        echo=sys.stderr,
    )
    if out is not None:
        from forerun.profiling.files import write_json

        write_json(out, found.as_dict())
    if plot is not None:
        from forerun.report.profile_plots import parts_plot

        parts_plot(plot, {"this run": found})
    if as_json:
        print_json(found.as_dict())
    else:
        from forerun.report.profile_page import profile_page

        print_page(profile_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
    if found.outcome == "interrupted":
        raise typer.Exit(INTERRUPTED_STATUS)
    if found.outcome in ("crashed", "timeout"):
        from forerun.errors import ScriptError

        raise ScriptError(
            f"the script {'crashed' if found.outcome == 'crashed' else 'ran into the time limit'} after "
            f"{found.num_steps} steps (exit status {found.status}); the profile is of what was seen"
            + (f"; it said: {found.said}" if found.said else "")
        )
