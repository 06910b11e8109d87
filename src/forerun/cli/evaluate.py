"""``forerun evaluate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.errors import UsageError

if TYPE_CHECKING:
    from forerun.api.predict import Evaluation

__all__ = ["evaluate"]

_ACCURACY_PAGE = Path("docs/accuracy.md")


def evaluate(
    records: Annotated[
        str | None, typer.Argument(metavar="[RECORDS]", help="Table or store of measured steps.")
    ] = None,
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
    reference: Annotated[
        bool, typer.Option("--reference", help="Evaluate on the public reference tables and write a page.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="With --reference: a sample of the rows.")] = False,
    out: Annotated[
        Path, typer.Option(metavar="FILE.md", help="With --reference: the page.")
    ] = _ACCURACY_PAGE,
    parity: Annotated[
        bool, typer.Option("--parity", help="Compare networks in PyTorch with the same in Keras instead.")
    ] = False,
    stack: Annotated[
        bool,
        typer.Option("--stack", help="Study steps of Keras and TensorFlow in the public tables instead."),
    ] = False,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Compare predictions with measured steps, beside simple baselines."""
    if stack:
        if records is not None or reference or parity or as_json or plot is not None:
            raise UsageError("--stack takes no RECORDS and no other option but --debug; leave them out")
        from studies.keras.frameworks import stack_study

        with quiet_libraries(debug=debug):
            page = stack_study()
        typer.echo(page)
        return
    if parity:
        if records is not None or reference or plot is not None:
            raise UsageError("--parity takes no RECORDS, --reference or --plot; leave them out")
        _print_parity(as_json, debug)
        return
    if reference:
        if records is not None or as_json or plot is not None:
            raise UsageError("--reference takes no RECORDS, --json or --plot; leave them out")
        _evaluate_reference(out, quick, debug)
        return
    if records is None:
        raise UsageError(
            "expected a table of measured steps, or --reference for the public tables; got neither"
        )
    with quiet_libraries(debug=debug):
        evaluation = _evaluate(records, file_format, on or [], plot)
    if as_json:
        print_json(evaluation.as_dict())
        return
    from forerun.report.evaluation_page import evaluation_page
    from forerun.report.page import PAGE_WIDTH

    print_page(evaluation_page(evaluation), page_width(PAGE_WIDTH))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _print_parity(as_json: bool, debug: bool) -> None:
    from studies.keras.frameworks import keras_parity

    with quiet_libraries(debug=debug):
        rows = keras_parity()
    if as_json:
        print_json({"pairs": [row.as_dict() for row in rows]})
        return
    from studies.keras.parity import parity_markdown

    typer.echo(parity_markdown(rows))


def _evaluate(records: str, file_format: str, devices: list[str], plot: Path | None) -> Evaluation:
    from forerun.report.plots import check_plot_path, predicted_versus_actual

    if plot is not None:
        check_plot_path(plot)
    import forerun

    evaluation = forerun.evaluate(records, format=file_format, devices=devices)
    if plot is not None:
        predicted_versus_actual(
            plot,
            title=f"Step times of {Path(records).name}",
            predicted_s=evaluation.predicted_s,
            actual_s=evaluation.actual_s,
            groups=evaluation.row_groups,
        )
    return evaluation


def _evaluate_reference(out: Path, quick: bool, debug: bool) -> None:
    from forerun.api.predict import evaluate_reference

    if not out.parent.is_dir():
        raise UsageError(
            f"the folder of the page '{out}' does not exist; create it or choose another with --out"
        )
    with quiet_libraries(debug=debug):
        page = evaluate_reference(out, quick)
    typer.echo(page)
    typer.echo(f"page written to {out}", err=True)
    _draw_pictures(out.parent / "methods")


def _draw_pictures(folder: Path) -> None:
    """Renews the pictures of the methods that stand beside the page."""
    if not folder.is_dir():
        return
    from forerun.api.measure_composition import recorded_compositions
    from forerun.report.composition_page import plot_compositions

    picture = folder / "composition.png"
    plot_compositions(picture, recorded_compositions())
    typer.echo(f"picture written to {picture}", err=True)
