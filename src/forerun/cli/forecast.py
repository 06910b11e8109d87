"""``forerun forecast``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import parse_price_usd_per_hour
from forerun.errors import ForecastError, RecordError, UsageError

if TYPE_CHECKING:
    from forerun.prediction.forecast_answer import RunForecast

__all__ = ["forecast"]

_PAGE_WIDTH = 110
_TARGET_HELP = "What is to be reached, such as 'accuracy>=0.92' or 'loss<=1.5'."
_SCHEDULE_HELP = (
    "constant, step:30,60,80x0.1, cosine:epochs=90, linear:, poly:, exponential:, onecycle: or unknown."
)


def forecast(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Curve so far: a CSV, or TensorBoard events.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="METRIC>=VALUE", help=_TARGET_HELP)] = None,
    metric: Annotated[
        str | None, typer.Option(metavar="NAME", help="Metric, where no target names it.")
    ] = None,
    schedule: Annotated[str | None, typer.Option(metavar="WORDS", help=_SCHEDULE_HELP)] = None,
    epochs: Annotated[
        float | None, typer.Option(help="Length of the run; that of the schedule if not given.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Finished runs of the same job, in any of the formats.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="What is trained, as in predict; needs --on.")
    ] = None,
    on: Annotated[
        list[str] | None, typer.Option(metavar="DEVICE", help="Where it might be trained; may be repeated.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="With --model: samples of one step.")] = None,
    precision: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --model: as in predict.")
    ] = None,
    optimizer: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --model: as in predict.")
    ] = None,
    dataset: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --model: a known dataset, such as cifar10.")
    ] = None,
    dataset_size: Annotated[
        int | None, typer.Option(help="With --model: training samples of an epoch, for any other.")
    ] = None,
    price: Annotated[
        str | None, typer.Option(metavar="1.89/h", help="Price of one device [US dollars per hour].")
    ] = None,
    backtest: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Back-test figures of your own, see --save.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Forecast again whenever the file has grown.")
    ] = False,
    every_s: Annotated[float, typer.Option("--every-s", help="With --watch: time between looks [s].")] = 10.0,
    patience_s: Annotated[
        float, typer.Option("--patience-s", help="With --watch: end after so long without a new row [s].")
    ] = 3600.0,
    evaluate: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Test all forecasters on finished runs; a sub-folder is a job."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --evaluate: keep the figures for --backtest.")
    ] = None,
    trade_off: Annotated[
        Path | None,
        typer.Option(
            "--trade-off",
            metavar="FILE.csv",
            help="Compare configurations: columns name, run, model, device, and options of each.",
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Forecast when a training run reaches an accuracy, from its curve so far."""
    _check_asked(run, evaluate, trade_off, save, watch, as_json)
    if plot is not None:
        from forerun.report.figure import check_plot_path

        check_plot_path(plot)
    if evaluate is not None:
        _evaluate(evaluate, metric or _metric_of(target), schedule, save, as_json, debug)
        return
    if trade_off is not None:
        _trade_off(trade_off, target, metric, as_json, plot, debug)
        return
    setup = {
        "batch_size": batch_size,
        "precision": precision,
        "optimizer": optimizer,
        "dataset": dataset,
        "dataset_size": dataset_size,
    }
    question: dict[str, Any] = {
        "target": target,
        "metric": metric,
        "schedule": schedule,
        "epochs": epochs,
        "history": history if history is not None else (),
        "model": model,
        "devices": on or [],
        "price_usd_per_hour": None if price is None else parse_price_usd_per_hour(price),
        "backtest_file": backtest,
        **{name: value for name, value in setup.items() if value is not None},
    }
    assert run is not None
    if watch:
        _watch(run, question, every_s, patience_s, plot, debug)
        return
    _tell(_ask(run, question, debug), as_json, plot)


def _check_asked(
    run: Path | None,
    evaluate: Path | None,
    trade_off: Path | None,
    save: Path | None,
    watch: bool,
    as_json: bool,
) -> None:
    if sum(given is not None for given in (run, evaluate, trade_off)) != 1:
        raise UsageError(
            "expected exactly one of RUN, --evaluate DIR and --trade-off FILE; see 'forerun forecast --help'"
        )
    if save is not None and evaluate is None:
        raise UsageError("--save keeps the figures of --evaluate DIR; give both, or leave it out")
    if watch and (run is None or as_json):
        raise UsageError(
            "--watch follows one RUN and prints a page each time; leave out --json and other modes"
        )


def _metric_of(target: str | None) -> str | None:
    if target is None:
        return None
    from forerun.convergence.target import parse_target

    return parse_target(target).metric


def _ask(run: Path, question: dict[str, Any], debug: bool) -> RunForecast:
    from forerun import api

    with quiet_libraries(debug=debug):
        return api.forecast(run, **question)


def _tell(answer: RunForecast, as_json: bool, plot: Path | None) -> None:
    found = answer.as_dict()
    if plot is not None:
        from forerun.report.forecast_plots import forecast_plot

        curve = answer.curve_forecast.curve
        forecast_plot(plot, found, (curve.epochs, curve.values))
    if as_json:
        print_json(found)
        return
    from forerun.report.forecast_page import forecast_page

    print_page(forecast_page(found), page_width(_PAGE_WIDTH))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)


def _watch(
    run: Path, question: dict[str, Any], every_s: float, patience_s: float, plot: Path | None, debug: bool
) -> None:
    """Forecasts again whenever the file has grown, until the run is at its end, its target, or silent."""
    if every_s <= 0:
        raise UsageError(f"the time between looks must be above zero, got --every-s {every_s:g}")
    last_size, silent_s = -1, 0.0
    while silent_s < patience_s:
        size = run.stat().st_size if run.is_file() else -1
        if size == last_size or size < 0:
            time.sleep(every_s)
            silent_s += every_s
            continue
        last_size, silent_s = size, 0.0
        try:
            answer = _ask(run, question, debug)
        except (ForecastError, RecordError) as error:
            typer.echo(f"not yet: {error}", err=True)
            continue
        _tell(answer, False, plot)
        found = answer.curve_forecast
        if found.reached_epoch is not None or not len(found.epochs):
            return
    typer.echo(f"no new row in {run} for {patience_s:g} s", err=True)


def _evaluate(
    folder: Path, metric: str | None, schedule: str | None, save: Path | None, as_json: bool, debug: bool
) -> None:
    from forerun import api

    with quiet_libraries(debug=debug):
        found = api.backtest(folder, metric=metric, schedule=schedule, save=save).as_dict()
    if as_json:
        print_json(found)
        return
    from forerun.report.forecast_page import backtest_page

    print_page(backtest_page(found), page_width(_PAGE_WIDTH))
    if save is not None:
        typer.echo(f"figures written to {save}", err=True)


def _trade_off(
    table: Path, target: str | None, metric: str | None, as_json: bool, plot: Path | None, debug: bool
) -> None:
    from forerun import api

    with quiet_libraries(debug=debug):
        found = api.trade_off(table, target=target, metric=metric).as_dict()
    if plot is not None:
        from forerun.report.forecast_plots import trade_off_plot

        trade_off_plot(plot, found, metric or _metric_of(target) or "value at the end")
    if as_json:
        print_json(found)
        return
    from forerun.report.forecast_page import trade_off_page

    print_page(trade_off_page(found), page_width(_PAGE_WIDTH))
    if plot is not None:
        typer.echo(f"plot written to {plot}", err=True)
