"""``forerun capture``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.surface.cli.settings import UnsafeFilesOption
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.graph.captured import Capture

__all__ = ["capture"]


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
