"""``python -m studies schedule``."""

from __future__ import annotations

from typing import Annotated

import typer

from forerun.surface.cli.output import quiet_libraries
from forerun.surface.cli.settings import DebugOption, PlotOption


def schedule(
    quick: Annotated[bool, typer.Option("--quick", help="Two workloads, no integer program.")] = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Replay public workloads under every policy; print the section of the page of accuracy (some minutes)."""
    if plot is not None:
        from forerun.surface.report.figure import check_plot_path

        check_plot_path(plot)
    from studies.schedule.page import schedule_section
    from studies.schedule.plots import error_plot
    from studies.schedule.study import schedule_study
    from studies.tables.reference_steps import require_reference_folder

    with quiet_libraries(debug=debug):
        found = schedule_study(require_reference_folder(), lambda line: typer.echo(line, err=True), quick)
    typer.echo(schedule_section(found))
    if plot is not None:
        error_plot(plot, found.errors)
        typer.echo(f"plot written to {plot}", err=True)
