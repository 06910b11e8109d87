"""``forerun calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.base.errors import UsageError
from forerun.base.units import parse_amount
from forerun.surface.cli.settings import SETTING_HELP, RecordsOption
from forerun.surface.cli.verbs import verb

if TYPE_CHECKING:
    from forerun.evidence.calibrate import Calibration


@verb(
    "Measure this machine and fit the cost model to it.",
    page="forerun.evidence.pages.evaluation_page:calibration_page",
)
def calibrate(
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Device of this machine: cpu or cuda:N, such as cuda:0. With --from: device that was measured, as in "
            "predict --on.",
        ),
    ] = "cpu",
    minutes: Annotated[
        float | None, typer.Option(help="Time for measuring and fitting [min].", show_default="3")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=SETTING_HELP["precision"], show_default="fp32"),
    ] = None,
    framework: Annotated[
        str, typer.Option(metavar="NAME", help="pytorch, or keras on TensorFlow.")
    ] = "pytorch",
    from_records: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RECORDS",
            help="Measurements to fit instead of measuring: a store, .csv or .parquet.",
        ),
    ] = None,
    records: RecordsOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File for the calibration.",
            show_default="the one that predict --on here reads",
        ),
    ] = None,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="10min",
            help="Longest wait for another process that measures on the device.",
            show_default="none",
        ),
    ] = None,
) -> Calibration:
    """Measure this machine for some minutes and fit the cost model to it."""
    if from_records is not None:
        given = {"--minutes": minutes, "--precision": precision, "--records": records, "--wait": wait}
        for name in (name for name, value in given.items() if value is not None):
            raise UsageError(f"{name} is for measuring; with --from nothing is measured: leave it out")
    from forerun.evidence.calibrate import calibrate as run
    from forerun.evidence.commands.measure import progress_bar

    def say(message: str) -> None:
        typer.echo(message, err=True)

    if from_records is not None:
        return run(device, framework=framework, from_records=from_records, out=out, report=say)
    with progress_bar() as on_event:
        return run(
            device,
            minutes=3.0 if minutes is None else minutes,
            precision=precision or "fp32",
            framework=framework,
            records=records,
            out=out,
            wait_s=0.0 if wait is None else parse_amount(wait, "time"),
            on_event=on_event,
            report=say,
        )
