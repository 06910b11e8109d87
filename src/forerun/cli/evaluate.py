"""``forerun evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries

if TYPE_CHECKING:
    from forerun.api.evaluate import Evaluation

__all__ = ["evaluate"]


def evaluate(
    records: Annotated[str, typer.Argument(metavar="RECORDS", help="Table or store of measured steps.")],
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="timm (the CSV of timm's benchmark script), forerun, or auto: what the columns say.",
        ),
    ] = "auto",
    on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICE", help="Device of the records, or the ones to keep; here: of this machine."
        ),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="Precision of a timm table, as in predict; amp.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="NAME", help="Layout of a timm table: nchw or nhwc; nchw.")
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="A timm table was measured under torch.compile.")
    ] = False,
    torch_version: Annotated[
        str | None, typer.Option(metavar="2.4", help="PyTorch version of a timm table; the newest.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Predict by this calibration of the device, from forerun calibrate."
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Compare predictions with measured steps, beside simple baselines."""
    with quiet_libraries(debug=debug):
        evaluation = _evaluate(
            records,
            plot,
            format=file_format,
            devices=on or [],
            precision=precision,
            layout=layout,
            compile=compile,
            torch_version=torch_version,
            calibration=calibration,
        )
    if as_json:
        print_json(evaluation.as_dict())
        return
    from forerun.report.evaluation_page import evaluation_page
    from forerun.report.page import PAGE_WIDTH

    print_page(evaluation_page(evaluation), page_width(PAGE_WIDTH))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _evaluate(records: str, plot: Path | None, **options: Any) -> Evaluation:
    from forerun.report.plots import check_plot_path, predicted_versus_actual

    if plot is not None:
        check_plot_path(plot)
    import forerun

    evaluation = forerun.evaluate(records, **options)
    if plot is not None:
        predicted_versus_actual(
            plot,
            title=f"Step times of {Path(records).name}",
            predicted_s=evaluation.predicted_s,
            actual_s=evaluation.actual_s,
            groups=evaluation.row_groups,
        )
    return evaluation
