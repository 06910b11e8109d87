"""``forerun fit``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.base.errors import InvalidSetupError, UsageError
from forerun.base.extras import plugin_names
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.evidence.fit import FitResult

_MODELS = (*plugin_names("forerun.regressors"), "op")


@verb("Fit a model to measured steps or layers.", page="forerun.evidence.pages.evaluation_page:fit_page")
def fit(
    records: Annotated[
        list[str],
        typer.Argument(metavar="RECORDS...", help="Stores (files or URLs) or tables of measurements."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="File for the fitted model.")],
    model: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Kind of model to fit: {', '.join(_MODELS)}."),
    ] = "op",
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE", help="Device that RECORDS were measured on, if not the one they name."
        ),
    ] = None,
    hidden: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Units of the hidden layers, such as 64,64.")
    ] = None,
    loss: Annotated[
        str | None, typer.Option(metavar="NAME", help="Loss on the logarithm of the time: mse or mae.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="NUMBERS", help="Seeds, such as 0,1,2; one network is fitted per seed."),
    ] = None,
    max_epochs: Annotated[
        int | None,
        typer.Option("--max-epochs", "--epochs", help="Largest number of passes of a network over the rows."),
    ] = None,
    plots: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for plots of the fit and of RECORDS; it is made."),
    ] = None,
) -> FitResult:
    """Fit a model to measured steps or layers."""
    if not out.parent.is_dir():
        raise UsageError(f"the folder of '{out}' does not exist; create it or choose another with --out")
    if plots is not None:
        from forerun.surface.report.figure import make_plot_folder  # loads NumPy, which the help does without

        make_plot_folder(plots)
    from forerun.evidence.fit import fit_regressor

    result = fit_regressor(
        records,
        model,
        device=on,
        hidden_sizes=_whole_numbers(hidden, "--hidden"),
        loss=loss,
        seeds=_whole_numbers(seeds, "--seeds"),
        max_epochs=max_epochs,
    )
    result.model.save(out)
    if plots is not None:
        _write_plots(result, records, on, plots)
    typer.echo(f"model written to {out}", err=True)
    return result


def _whole_numbers(text: str | None, option: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    if re.fullmatch(r"\d+(?:\s*,\s*\d+)*", text.strip()) is None:
        raise InvalidSetupError(f"expected whole numbers such as 64,64 with {option}, got '{text}'")
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _write_plots(result: FitResult, records: list[str], device: str | None, folder: Path) -> None:
    from forerun.evidence.pages import measured_plots as plots
    from forerun.evidence.records.reading import read_all, read_measured_steps
    from forerun.question.devices import find_device
    from forerun.surface.report.figure import STEP_TIMES, TimeAxis, predicted_versus_actual

    title = f"{result.model.kind} on held-out configurations"
    # The table's own target, on the axes that its reader draws it on.
    axis = TimeAxis("time per epoch", "s", 1.0, is_log=False) if result.target == "epoch" else STEP_TIMES
    rows: dict[str, Any] = {"predicted_s": result.predicted_s, "actual_s": result.actual_s}
    rows |= {"groups": result.groups, "times": axis}
    predicted_versus_actual(folder / "predicted-versus-actual.png", title=title, **rows)
    plots.residuals_against_time(folder / "residuals.png", title=f"Residuals, {title}", **rows)
    if result.model.kind == "layers":
        return
    place = None if device is None else find_device(device)
    plots.batch_size_against_throughput(folder / "throughput.png", read_measured_steps(records, place))
    if any(curves := plots.curves(read_all(records, place))):
        plots.accuracy_curves(folder / "accuracy.png", *curves)
    if runs := plots.accuracy_over_time(read_all(records, place)):
        plots.accuracy_against_time(folder / "accuracy-against-time.png", runs)
