"""What ``forerun forecast`` does beside forecasting one run: back-tests, comparisons, batch sizes, other networks."""

from __future__ import annotations

from pathlib import Path

import typer

from forerun.cli.output import page_width, print_json, print_page, quiet_libraries

__all__ = [
    "PAGE_WIDTH",
    "REFERENCE",
    "compare_configurations",
    "evaluate_forecasters",
    "forecast_batch_sizes",
    "forecast_other_networks",
]

PAGE_WIDTH = 110
REFERENCE = "reference"


def evaluate_forecasters(
    folder: Path,
    metric: str | None,
    schedule: str | None,
    save: Path | None,
    as_json: bool,
    plot: Path | None,
    debug: bool,
) -> None:
    """Prints a back-test; on the public tables the section of the accuracy page."""
    from forerun import api

    section = None
    with quiet_libraries(debug=debug):
        if str(folder) == REFERENCE:
            reference = api.backtest_reference(save)
            found, section = reference.known.as_dict(), reference.section
        else:
            found = api.backtest(folder, metric=metric, schedule=schedule, save=save).as_dict()
    if plot is not None:
        from forerun.report.forecast_plots import backtest_plot

        backtest_plot(plot, found)
    if as_json:
        print_json(found)
        return
    if section is None:
        from forerun.report.forecast_page import backtest_page

        print_page(backtest_page(found), page_width(PAGE_WIDTH))
    else:
        typer.echo(section)
    for path, words in ((save, "figures"), (plot, "plot")):
        if path is not None:
            typer.echo(f"{words} written to {path}", err=True)


def compare_configurations(
    table: Path, target: str | None, metric: str | None, as_json: bool, plot: Path | None, debug: bool
) -> None:
    """Prints configurations against each other; metric names the axis of the plot."""
    from forerun import api

    with quiet_libraries(debug=debug):
        found = api.trade_off(table, target=target, metric=metric).as_dict()
    if plot is not None:
        from forerun.report.forecast_plots import trade_off_plot

        trade_off_plot(plot, found, metric or "value at the end")
    if as_json:
        print_json(found)
        return
    from forerun.report.forecast_page import trade_off_page

    print_page(trade_off_page(found), page_width(PAGE_WIDTH))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def forecast_batch_sizes(
    table: Path, batch_size: int | None, dataset_size: int | None, as_json: bool, debug: bool
) -> None:
    """Prints steps to a target against the batch size."""
    from forerun import api

    with quiet_libraries(debug=debug):
        found = api.forecast_batches(
            table, batch_sizes=() if batch_size is None else (batch_size,), dataset_size=dataset_size
        ).as_dict()
    if as_json:
        print_json(found)
        return
    from forerun.report.convergence_page import batches_page

    print_page(batches_page(found), page_width(PAGE_WIDTH))


def forecast_other_networks(table: Path, value: str | None, as_json: bool, debug: bool) -> None:
    """Prints what networks that were never trained need."""
    from forerun import api

    with quiet_libraries(debug=debug):
        found = api.forecast_networks(table, value=value or "epochs").as_dict()
    if as_json:
        print_json(found)
        return
    from forerun.report.convergence_page import networks_page

    print_page(networks_page(found), page_width(PAGE_WIDTH))
