"""Options that several commands share, each with its one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.planner.options import PlanOptions
from forerun.run.options import RunOptions
from forerun.run.settings import declared

__all__ = [
    "AXIS_HELP",
    "DEVICE_HERE_HELP",
    "EPOCHS_HELP",
    "RUN_TIME_HELP",
    "SEED_HELP",
    "SETTING_HELP",
    "DebugOption",
    "JsonOption",
    "MetricOption",
    "NoCacheOption",
    "PlotOption",
    "RecordsOption",
    "ShowOutputOption",
]

SETTING_HELP = {name: item.setting.help for name, item in declared(RunOptions).items()}
"""Help of the settings of a run, for commands that declare such an option themselves."""

AXIS_HELP = {name: item.setting.help for name, item in declared(PlanOptions).items()}
"""Help of the settings of a plan, of which several values may be given."""

DEVICE_HERE_HELP = "Device of this machine: cpu or cuda:N, such as cuda:0."
EPOCHS_HELP = "Epochs of each training."
RUN_TIME_HELP = "Longest time of one run of the script, such as 10min."
SEED_HELP = "Seed of all random numbers; another seed draws others."

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Write a plot as well (.png, .svg or .pdf).")
]

DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

NoCacheOption = Annotated[
    bool, typer.Option("--no-cache", help="Trace the model anew instead of reading the cached trace.")
]

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
