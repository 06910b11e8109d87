"""Options that several commands share, each with its one help text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.base.plugins import plugin
from forerun.question.options import DEVICE_HELP, MODEL_HELP, RunOptions
from forerun.question.settings import declared

__all__ = [
    "COMMAND_HELP",
    "RUN_TIME_HELP",
    "SETTING_HELP",
    "DebugOption",
    "InProcessOption",
    "JsonOption",
    "MetricOption",
    "ModelArgument",
    "NoCacheOption",
    "OnDevice",
    "PlotOption",
    "RecordsOption",
    "ShowOutputOption",
    "TimeoutOption",
    "UnsafeFilesOption",
    "model_of",
]

SETTING_HELP = {name: item.setting.help for name, item in declared(RunOptions).items()}
"""Help of the settings of a run, for commands that declare such an option themselves."""

COMMAND_HELP = " Or, after --, the command of a training script, such as: -- python train.py --epochs 3."
"""End of the help of a model that may also be a command."""

RUN_TIME_HELP = "Longest time of one run of the script, such as 10min."

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Write a plot as well (.png, .svg or .pdf).")
]

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Trace the model anew instead of reading the cached trace.")
]

ModelArgument = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
OnDevice = Annotated[str, typer.Option(metavar="DEVICE", help=DEVICE_HELP)]

RecordsOption = Annotated[
    str | None,
    typer.Option(
        "--records",
        metavar="STORE",
        help="Store of the records: a file or a database URL; if not given, the variable FORERUN_RECORDS or a "
        "file in your data folder.",
    ),
]

MetricOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Metric that the script prints, such as val_acc.")
]

ShowOutputOption = Annotated[
    bool, typer.Option("--show-output", help="Show the output of the script on stderr.")
]

UnsafeFilesOption = Annotated[
    bool,
    typer.Option(
        "--unsafe-files",
        help="Let a captured script change your files; without it, it sees a copy of what it changes.",
    ),
]

TimeoutOption = Annotated[
    str,
    typer.Option(
        "--timeout", metavar="120s", help="Longest time of building and tracing one model, on processors."
    ),
]
InProcessOption = Annotated[
    bool,
    typer.Option(
        "--in-process",
        help="Build the model in this process, not in one of its own; without limits of time and memory.",
    ),
]


def model_of(words: Sequence[str], *, unsafe_files: bool = False) -> str:
    """The model of a question: its name, or the capture of the command that stands in its place.

    Raises:
        UsageError, FailureError: The command cannot be captured.
    """
    if len(words) == 1 and not words[0].endswith(".py"):
        return words[0]
    captured = plugin("forerun.models", "command")
    if captured is None:
        raise UsageError(
            f"expected the name of one MODEL, got '{' '.join(words)}'; no installed part captures the command of a "
            "script"
        )
    model: str = captured(list(words), unsafe_files=unsafe_files)
    typer.echo(f"captured {' '.join(words)}; without the script ask again with {model}", err=True)
    return model
