"""``python -m studies suite``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.surface.cli.output import (
    TABLE_WIDTH_IN_A_PIPE,
    page_width,
    print_json,
    print_page,
    quiet_libraries,
)
from forerun.surface.cli.settings import DebugOption, JsonOption

if TYPE_CHECKING:
    from studies.suite.run import SuiteRun


def suite(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder of predictions, records and comparison; the same one resumes."
        ),
    ],
    device: Annotated[
        str, typer.Option(metavar="here|cpu|cuda:N", help="Device of this machine to measure.")
    ] = "here",
    minutes: Annotated[
        float, typer.Option(help="Time to measure [min]; the most informative jobs come first.")
    ] = 8.0,
    stages: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME",
            help="Stages: predict (before anything is measured), measure, compare.",
        ),
    ] = "predict,measure,compare",
    on: Annotated[
        str | None,
        typer.Option(
            metavar="DEVICE",
            help="With --stages predict: a device that is not here, as in 'forerun predict --on'.",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of a processor; all if not given.")] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Predict all jobs of the suite, measure the most informative ones for some minutes, and compare."""
    words = [word.strip() for word in stages.split(",") if word.strip()]
    with quiet_libraries(debug=debug):
        run = _run(out, device, minutes, words, on, threads)
    if as_json:
        print_json(run.as_dict())
        return
    from studies.suite.page import suite_page

    print_page(suite_page(run), page_width(TABLE_WIDTH_IN_A_PIPE))


def _run(
    out: Path, device: str, minutes: float, stages: list[str], on: str | None, threads: int | None
) -> SuiteRun:
    from forerun.evidence.commands.measure import progress_bar
    from studies.suite.run import measure_suite

    def say(message: str) -> None:
        typer.echo(message, err=True)

    with progress_bar() as on_event:
        run = measure_suite(
            out,
            device=device,
            minutes=minutes,
            stages=stages,
            on=on,
            num_threads=threads,
            on_event=on_event,
            report=say,
        )
    if run.comparison is not None:
        _write_plot(run, out)
    return run


def _write_plot(run: SuiteRun, folder: Path) -> None:
    import numpy as np

    from forerun.surface.report.figure import predicted_versus_actual

    assert run.comparison is not None
    rows = run.comparison.rows
    predicted_versus_actual(
        folder / "predicted-versus-measured.png",
        title=f"{run.comparison.device}: predicted before it was measured",
        predicted_s=np.asarray([row.predicted_s for row in rows]),
        actual_s=np.asarray([row.measured_s for row in rows]),
        groups=[row.prediction.model_class for row in rows],
    )
