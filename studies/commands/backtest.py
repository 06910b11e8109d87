"""``python -m studies backtest``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.output import print_json, quiet_libraries
from forerun.surface.cli.settings import DebugOption, JsonOption, PlotOption


def backtest(
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the figures that the package ships, from a new study."),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Test all forecasters on the public learning curves; print the section of the page of accuracy."""
    if save is not None and not save.parent.is_dir():
        raise UsageError(f"the folder of '{save}' does not exist; create it or choose another with --save")
    if plot is not None:
        from forerun.surface.report.figure import check_plot_path

        check_plot_path(plot)
    from studies.forecast.section import forecast_section
    from studies.reference_run import forecast_figures
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        figures = forecast_figures(require_reference_folder(), save)
        scheduled = figures.curves.scheduled
    if plot is not None:
        from forerun.jobs.plots import backtest_plot

        backtest_plot(plot, scheduled)
    if as_json:
        print_json(scheduled.as_dict())
    else:
        typer.echo(forecast_section(figures))
    for path, words in ((save, "figures"), (plot, "plot")):
        if path is not None:
            typer.echo(f"{words} written to {path}", err=True)
