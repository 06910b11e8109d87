"""``forerun measure composition``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forerun.cli.measure.options import (
    BatchSizesOption,
    DeviceOption,
    ImageSizeOption,
    MaxSecondsOption,
    OccasionOption,
    OptimizerOption,
    PrecisionOption,
    RepetitionsOption,
    ThreadsOption,
    TimeoutOption,
    parse_whole_numbers,
)
from forerun.cli.options import DebugOption, JsonOption, RecordsOption
from forerun.cli.output import TABLE_WIDTH_IN_A_PIPE, page_width, print_json, print_page, quiet_libraries

__all__ = ["composition"]


def composition(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Models, as in predict.")],
    batch_sizes: BatchSizesOption = "32",
    image_size: ImageSizeOption = None,
    optimizer: OptimizerOption = "adam",
    precision: PrecisionOption = "fp32",
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", help="Plot sums of layers and composed steps against measured steps."
        ),
    ] = None,
    device: DeviceOption = "cpu",
    records: RecordsOption = None,
    occasion: OccasionOption = "",
    repetitions: RepetitionsOption = 30,
    max_seconds: MaxSecondsOption = 5.0,
    timeout_s: TimeoutOption = 900.0,
    threads: ThreadsOption = None,
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
    protocol = Protocol(
        num_repetitions=repetitions, max_seconds=max_seconds, timeout_s=timeout_s, num_threads=threads
    )
    with quiet_libraries(debug=debug), progress_bar() as on_event:
        found = forerun.measure_composition(
            models,
            batch_sizes=parse_whole_numbers("batch sizes", batch_sizes),
            image_size=image_size,
            optimizer=optimizer,
            precision=precision,
            device=device,
            records=records,
            occasion=occasion,
            protocol=protocol,
            on_event=on_event,
        )
    if plot is not None:
        from forerun.report.composition_page import plot_compositions

        plot_compositions(plot, {f"layers and steps on {device}": found.compositions})
    if as_json:
        print_json(found.as_dict())
        return
    from forerun.report.composition_page import composition_page

    print_page(composition_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
