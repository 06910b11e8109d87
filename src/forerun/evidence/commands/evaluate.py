"""``forerun evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.surface.cli.settings import SETTING_HELP
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.evidence.evaluate import Evaluation

_TIMM = " For timm's CSV only."


def _plot(path: Path, found: Evaluation) -> None:
    from forerun.surface.report.figure import predicted_versus_actual

    predicted_versus_actual(
        path,
        title=f"Step times of {found.table}",
        predicted_s=found.predicted_s,
        actual_s=found.actual_s,
        groups=found.row_groups,
    )


@verb(
    "Compare predicted with measured steps.",
    page="forerun.evidence.pages.evaluation_page:evaluation_page",
    plot=_plot,
    width=96,
)
def steps(
    records: Annotated[str, typer.Argument(metavar="RECORDS", help="Table or store of measured steps.")],
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Format of RECORDS: timm (the CSV of timm's benchmark script), forerun, or auto (by the columns).",
        ),
    ] = "auto",
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE",
            help="Device that RECORDS were measured on, or devices whose rows to keep; 'here' for this machine.",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=SETTING_HELP["precision"] + _TIMM, show_default="amp"),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=SETTING_HELP["layout"] + _TIMM, show_default="nchw"),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="The steps were measured under torch.compile." + _TIMM)
    ] = False,
    torch_version: Annotated[
        str | None,
        typer.Option(
            metavar="2.4", help=SETTING_HELP["torch_version"] + _TIMM, show_default="the newest known"
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=SETTING_HELP["calibration"]),
    ] = None,
) -> Evaluation:
    """Compare predictions with measured steps, and with simple baselines."""
    import forerun

    return forerun.evaluate(
        records,
        format=file_format,
        devices=on or [],
        precision=precision,
        layout=layout,
        compile=compile,
        torch_version=torch_version,
        calibration=calibration,
    )


evaluate = Verbs(
    "Compare predictions with measurements.",
    {"steps": steps},
    short_help="Compare predictions with measured steps.",
    chosen=lambda words: "steps",
)
