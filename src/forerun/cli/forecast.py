"""``forerun forecast``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.forecast_modes import (
    PAGE_WIDTH,
    compare_configurations,
    evaluate_forecasters,
    forecast_batch_sizes,
    forecast_other_networks,
)
from forerun.cli.options import DebugOption, JsonOption, PlotOption
from forerun.cli.output import page_width, print_json, print_page, quiet_libraries
from forerun.cli.parsing import parse_price_usd_per_hour
from forerun.errors import ForecastError, RecordError, UsageError

if TYPE_CHECKING:
    from forerun.prediction.forecast_answer import RunForecast

__all__ = ["forecast"]

_TARGET_HELP = "What is to be reached, such as 'accuracy>=0.92' or 'loss<=1.5'."
_SCHEDULE_HELP = (
    "constant, step:30,60,80x0.1, cosine:epochs=90, linear:, poly:, exponential:, onecycle:, "
    "trapezoid:epochs=90,decay_from=60, reduce-on-plateau, logged (the rates in the file) or unknown."
)


def forecast(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]",
            help="Curve so far: a CSV, TensorBoard events, trainer_state.json, or a nanoGPT log.",
        ),
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
    cut: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", help="Forecast a finished run after this share of it, beside what came."
        ),
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
        typer.Option(
            metavar="DIR",
            help="Test forecasters on finished runs, a sub-folder being a job; 'reference': the public tables.",
        ),
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
    batches: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="Steps to a target at other batch sizes: columns batch_size, and steps or epochs.",
        ),
    ] = None,
    networks: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.csv",
            help="A network never trained, from others: columns network, features, and --metric (epochs).",
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: PlotOption = None,
    debug: DebugOption = False,
) -> None:
    """Forecast when a training run reaches an accuracy, from its curve so far."""
    _check_one_mode(run, evaluate, trade_off, batches, networks)
    _check_asked(run, evaluate, save, watch, cut, as_json)
    if plot is not None:
        if batches is not None or networks is not None:
            raise UsageError("--plot draws a forecast, --evaluate or --trade-off; leave it out")
        from forerun.report.figure import check_plot_path

        check_plot_path(plot)
    if evaluate is not None:
        evaluate_forecasters(evaluate, metric or _metric_of(target), schedule, save, as_json, plot, debug)
        return
    if trade_off is not None:
        compare_configurations(trade_off, target, metric or _metric_of(target), as_json, plot, debug)
        return
    if batches is not None:
        forecast_batch_sizes(batches, batch_size, dataset_size, as_json, debug)
        return
    if networks is not None:
        forecast_other_networks(networks, metric, as_json, debug)
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
        "cut": cut,
        **{name: value for name, value in setup.items() if value is not None},
    }
    assert run is not None
    if watch:
        _watch(run, question, every_s, patience_s, plot, debug)
        return
    _tell(_ask(run, question, debug), as_json, plot)


def _check_one_mode(run: Path | None, *modes: Path | None) -> None:
    if sum(given is not None for given in (run, *modes)) != 1:
        raise UsageError(
            "expected exactly one of RUN, --evaluate DIR, --trade-off FILE, --batches FILE and --networks FILE; see "
            "'forerun forecast --help'"
        )


def _check_asked(
    run: Path | None, evaluate: Path | None, save: Path | None, watch: bool, cut: float | None, as_json: bool
) -> None:
    if save is not None and evaluate is None:
        raise UsageError("--save keeps the figures of --evaluate DIR; give both, or leave it out")
    if watch and (run is None or as_json or cut is not None):
        raise UsageError(
            "--watch follows one RUN and prints a page each time; leave out --json, --cut and other modes"
        )
    if cut is not None and run is None:
        raise UsageError("--cut looks back at one finished RUN; name it")


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

        curve, outcome = answer.curve_forecast.curve, answer.outcome
        came = None if outcome is None else (outcome.epochs, outcome.values)
        forecast_plot(plot, found, (curve.epochs, curve.values), came)
    if as_json:
        print_json(found)
        return
    from forerun.report.forecast_page import forecast_page

    print_page(forecast_page(found), page_width(PAGE_WIDTH))
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
