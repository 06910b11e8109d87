"""``forerun profile`` and ``forerun capture``, which run a script."""

from __future__ import annotations

import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.surface.cli.settings import RUN_TIME_HELP, SETTING_HELP, UnsafeFilesOption
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.graph.captured import Capture
    from forerun.script.profiling.profile import Profile

__all__ = ["capture", "profile"]


def _plot(path: Path, found: Profile) -> None:
    from forerun.script.pages.profile_page import parts_plot

    parts_plot(path, {"this run": found})


def _fail(found: Profile) -> None:
    """Ends the command as the script ended."""
    if found.outcome == "interrupted":
        # Shells expect 128 and the number of the signal.
        raise typer.Exit(128 + signal.Signals[found.interrupted_by])
    if found.outcome in ("crashed", "timeout"):
        from forerun.base.errors import ScriptError

        raise ScriptError(
            f"the script {'crashed' if found.outcome == 'crashed' else 'ran into the time limit'} after "
            f"{found.num_steps} steps (exit status {found.status}); the profile is of what was seen"
            + (f"; it said: {found.said}" if found.said else "")
        )


@verb(
    "Tell where a training script spends its time.",
    page="forerun.script.pages.profile_page:profile_page",
    plot=_plot,
    after=_fail,
)
def profile(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Training command, after --, as you would run it.")
    ],
    steps: Annotated[
        int | None,
        typer.Option(help="Number of steps after which the script is stopped.", show_default="its end"),
    ] = None,
    window: Annotated[int, typer.Option(help="Number of steps under torch.profiler; 0 for none.")] = 5,
    warmup: Annotated[int, typer.Option(help="Number of warm-up steps before the profiled ones.")] = 3,
    epochs: Annotated[
        float | None,
        typer.Option(help=SETTING_HELP["epochs"], show_default="by the script's arguments"),
    ] = None,
    timeout: Annotated[str | None, typer.Option(metavar="10min", help=RUN_TIME_HELP)] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep", "--records", metavar="FOLDER", help="Folder for the raw recordings of all processes."
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json",
            help="Write the trace of the profiled steps, for chrome://tracing and Perfetto; an existing folder for "
            "TensorBoard's profiler plugin.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write the JSON to a file as well.")
    ] = None,
) -> Profile:
    """Run a training script unchanged and show where its time goes, what limits it and what to try next."""
    import forerun
    from forerun.base.units import parse_amount

    found = forerun.profile(
        command,
        num_steps=steps,
        window_steps=window,
        warmup_steps=warmup,
        epochs=epochs,
        timeout_s=None if timeout is None else parse_amount(timeout, "time"),
        folder=keep,
        trace=trace,
        echo=sys.stderr,
    )
    if out is not None:
        from forerun.script.profiling.recorded import write_json

        write_json(out, found.as_dict())
    return found


@verb(
    "Capture the step of a training script, to ask about it later.",
    page=lambda found: iter(found[0].facts.notes()),
    as_dict=lambda found: {"file": str(found[1]), **asdict(found[0].facts)},
    after=lambda found: typer.echo(f"written to {found[1]}: ask with capture:{found[1]}", err=True),
)
def capture(
    command: Annotated[
        list[str], typer.Argument(metavar="COMMAND", help="Training command, after --, as you would run it.")
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="File for the captured graph, such as graph.forerun.")
    ],
    timeout: Annotated[
        str, typer.Option(metavar="10min", help="Longest time of the script until its third step.")
    ] = "10min",
    unsafe_files: UnsafeFilesOption = False,
) -> tuple[Capture, Path]:
    """Capture the training step of a script, unchanged and without a GPU, for capture:FILE in any question.

    The script's own code runs until its third step, without network, over a copy-on-write view of all files, so that it
    changes none. Where the system has no such view, changes are redirected or refused, and a note says so.
    """
    import forerun
    from forerun.base.units import parse_amount

    found = forerun.capture(command, timeout_s=parse_amount(timeout, "time"), unsafe_files=unsafe_files)
    return found, found.save(out)
