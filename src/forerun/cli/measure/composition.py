"""``forerun measure composition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.measure.options import CompositionOptions, parse_whole_numbers, timing_of
from forerun.cli.options import DebugOption, JsonOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries
from forerun.cli.settings import with_settings

__all__ = ["composition"]


@with_settings(
    CompositionOptions, readers={"batch_sizes": lambda text: parse_whole_numbers("batch sizes", text)}
)
def composition(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Networks, as in predict.")],
    settings: dict[str, Any],
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Plot sums of layers and composed steps against measured steps."
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Time networks and each of their layers alone, and compare the sum of layers with the step."""
    import forerun
    from forerun.cli.measure.progress import progress_bar
    from forerun.measurement.protocol import Protocol

    if plot is not None:
        from forerun.report.figure import check_plot_path

        check_plot_path(plot)  # before minutes of measuring
    protocol = Protocol(**timing_of(settings, num_repetitions=30, max_seconds=5.0, timeout_s=900.0))
    with quiet_libraries(debug=debug), progress_bar() as on_event:
        found = forerun.measure_composition(models, protocol=protocol, on_event=on_event, **settings)
    if plot is not None:
        from forerun.report.composition_page import plot_compositions

        device = settings.get("device", "cpu")
        plot_compositions(plot, {f"layers and steps on {device}": found.compositions})
    if as_json:
        print_json(found.as_dict())
        return
    from forerun.report.composition_page import composition_page

    print_page(composition_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
