"""``forerun evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.surface.cli.settings import SETTING_HELP
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.evidence.evaluate import Evaluation

_TIMM = " For timm's CSV only."


def _plot(path: Path, found: tuple[Evaluation, str]) -> None:
    from forerun.surface.report.figure import predicted_versus_actual

    evaluation, records = found
    predicted_versus_actual(
        path,
        title=f"Step times of {Path(records).name}",
        predicted_s=evaluation.predicted_s,
        actual_s=evaluation.actual_s,
        groups=evaluation.row_groups,
    )


def _page(found: tuple[Evaluation, str]) -> Any:
    from forerun.evidence.pages.evaluation_page import evaluation_page

    return evaluation_page(found[0])


@verb(
    "Compare predicted with measured steps.",
    page=_page,
    plot=_plot,
    as_dict=lambda found: found[0].as_dict(),
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
) -> tuple[Evaluation, str]:
    """Compare predictions with measured steps, and with simple baselines."""
    import forerun

    evaluation = forerun.evaluate(
        records,
        format=file_format,
        devices=on or [],
        precision=precision,
        layout=layout,
        compile=compile,
        torch_version=torch_version,
        calibration=calibration,
    )
    return evaluation, records


evaluate = Verbs(
    "Compare predictions with measurements.",
    {"steps": steps},
    short_help="Compare predictions with measured steps.",
    chosen=lambda words: "steps",
)
