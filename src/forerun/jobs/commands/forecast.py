"""``forerun forecast``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from forerun.base.errors import ForecastError, RecordError
from forerun.question.settings import Setting, checked
from forerun.surface.cli.output import page_width, print_page, quiet_libraries
from forerun.surface.cli.settings import PlotOption
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.jobs.fitted_laws import CurveFit, ScalingForecast
    from forerun.jobs.forecast import TradeOff
    from forerun.jobs.forecast_tables import BatchForecast, NetworkForecast
    from forerun.jobs.forecasting.backtest import Backtest
    from forerun.jobs.forecasting.forecast_answer import RunForecast
    from forerun.jobs.forecasting.next_trial import NextTrial

_PAGES, _PLOTS = "forerun.jobs.pages", "forerun.jobs.plots"
_WIDTH = 110

_RANGE_OF_TARGETS = "accuracy>=0.92, val_acc>=92%, loss<=1.5, or accuracy=0.92"
_SCHEDULES = (
    "constant, step:30,60,80x0.1, cosine:epochs=90,min=0.01, linear:epochs=90, poly:epochs=38,power=2, "
    "exponential:0.95, onecycle:epochs=30,peak=0.3, trapezoid:epochs=90,decay_from=60, each with warmup=5 if need be; "
    "reduce-on-plateau, logged (the rates in the file), or unknown"
)


class DeviceOptions(TypedDict, total=False):
    """Settings of the model that is timed, and the price of what it is timed on."""

    batch_size: Annotated[int | None, Setting(help="With --model: samples of one step.", group="run")]
    precision: Annotated[
        str | None, Setting(help="With --model: numeric recipe, as in predict.", group="run", metavar="NAME")
    ]
    price_usd_per_hour: Annotated[
        float | None,
        Setting(
            help="Price of one device [US dollars per hour].", group="price", metavar="1.89/h", flag="price"
        ),
    ]


class ForecastOptions(DeviceOptions, total=False):
    """Settings of a forecast on the command line."""

    target: Annotated[
        str | None,
        Setting(help=f"Target of the run: {_RANGE_OF_TARGETS}.", group="target", metavar="METRIC>=VALUE"),
    ]
    metric: Annotated[
        str | None,
        Setting(
            help="Metric, if no target names it.",
            group="target",
            default="a validation accuracy, a validation loss, or the first",
            metavar="NAME",
        ),
    ]
    schedule: Annotated[
        str | None,
        Setting(
            help=f"Learning rate from first to last epoch: {_SCHEDULES}.",
            group="job",
            metavar="WORDS",
            default="the line or cosine that logged rates follow, else unknown",
        ),
    ]
    epochs: Annotated[
        float | None,
        Setting(
            help="Length of the run, in steps where the file knows steps only.",
            group="job",
            default="that of the schedule or of the finished runs, else twice what was seen",
        ),
    ]
    history: Annotated[
        Path | None,
        Setting(
            help="Finished runs of the same job: the same network and data with another batch size, seed or rate.",
            group="job",
            metavar="DIR",
            is_local=True,
        ),
    ]
    model: Annotated[
        str | None,
        Setting(
            help="Model that is trained, as in 'forerun predict'; with --on, its epochs are timed.",
            group="model",
            metavar="MODEL",
        ),
    ]
    optimizer: Annotated[
        str | None, Setting(help="With --model: optimizer, as in predict.", group="run", metavar="NAME")
    ]
    dataset: Annotated[
        str | None,
        Setting(help="With --model: a known dataset, such as cifar10.", group="job", metavar="NAME"),
    ]
    dataset_size: Annotated[
        int | None,
        Setting(help="With --model: training samples of an epoch.", metavar="1M", group="job"),
    ]
    backtest_file: Annotated[
        Path | None,
        Setting(
            help="Your own back-test, written by 'forerun forecast backtest --save'.",
            group="software",
            default="the shipped figures",
            metavar="FILE",
            flag="backtest",
            is_local=True,
        ),
    ]


class CutOptions(ForecastOptions, total=False):
    """Settings of one forecast."""

    cut: Annotated[
        float | None,
        Setting(
            help="Forecast a finished run from this share of it, and compare with its real end.",
            group="main",
            metavar="SHARE",
        ),
    ]


class WatchOptions(ForecastOptions, total=False):
    """Settings of forecasts that are made again and again."""

    every_s: Annotated[
        float | None,
        Setting(help="Time between looks [s].", group="main", default="10", above=0),
    ]
    patience_s: Annotated[
        float | None,
        Setting(
            help="End after so long without a new row [s].",
            group="main",
            default="3600",
            above=0,
        ),
    ]


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="Curve so far: a CSV, JSON rows, a printed log, trainer_state.json, or a run of TensorBoard, W&B, MLflow.",
    ),
]
OnDevices = Annotated[
    list[str] | None, typer.Option(metavar="DEVICE", help="Device to train on; may be repeated.")
]
TargetOption = Annotated[
    str | None,
    typer.Option(metavar="METRIC>=VALUE", help=f"Target of the run: {_RANGE_OF_TARGETS}."),
]
MetricOption = Annotated[str | None, typer.Option(metavar="NAME", help="Metric, if no target names it.")]


@verb(
    "Forecast one run.",
    options=CutOptions,
    page=f"{_PAGES}:forecast_page",
    plot=f"{_PLOTS}:forecast_plot",
    width=_WIDTH,
)
def run(run: RunArgument, settings: dict[str, Any], on: OnDevices = None) -> RunForecast:
    """Forecast when a training run reaches an accuracy, from its curve so far."""
    import forerun

    return forerun.forecast(run, devices=on or [], **checked(settings, CutOptions))


@verb("Forecast a run again whenever it has grown.", options=WatchOptions)
def watch(
    run: RunArgument, settings: dict[str, Any], debug: bool, on: OnDevices = None, plot: PlotOption = None
) -> None:
    """Forecast a run again whenever its file has grown, until the target, the end, or silence."""
    import forerun
    from forerun.jobs.pages import forecast_page
    from forerun.jobs.plots import forecast_plot
    from forerun.surface.report.figure import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    question = {"devices": on or [], **checked(settings, WatchOptions)}
    every_s, patience_s = question.pop("every_s", 10.0), question.pop("patience_s", 3600.0)
    last_size, silent_s = -1, 0.0
    while silent_s < patience_s:
        files = run.rglob("*") if run.is_dir() else (run,)
        size = sum((file.stat().st_size for file in files if file.is_file()), start=-1)
        if size == last_size or size < 0:
            time.sleep(every_s)
            silent_s += every_s
            continue
        last_size, silent_s = size, 0.0
        try:
            with quiet_libraries(debug=debug):
                answer = forerun.forecast(run, **question)
        except (ForecastError, RecordError) as error:
            typer.echo(f"not yet: {error}", err=True)
            continue
        if plot is not None:
            forecast_plot(plot, answer)
        print_page(forecast_page(answer), page_width(_WIDTH))
        found = answer.curve_forecast
        if found.reached_epoch is not None or not len(found.epochs):
            return
    typer.echo(f"no new row in {run} for {patience_s:g} s", err=True)


@verb(
    "Try the forecasters on finished runs.",
    page=f"{_PAGES}:backtest_page",
    plot=f"{_PLOTS}:backtest_plot",
    width=_WIDTH,
)
def backtest(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Finished runs; a sub-folder is a job of its own.")
    ],
    metric: MetricOption = None,
    schedule: Annotated[
        str | None,
        typer.Option(metavar="WORDS", help=f"Learning rate from first to last epoch: {_SCHEDULES}."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep errors and quantiles for forecast run --backtest."),
    ] = None,
) -> Backtest:
    """Cut every finished run below a folder, forecast what is known, and count the errors of each forecaster."""
    import forerun

    found = forerun.backtest(folder, metric=metric, schedule=schedule, save=save)
    if save is not None:
        typer.echo(f"figures written to {save}", err=True)
    return found


@verb("Choose the trial that runs next.", page=f"{_PAGES}:next_page", width=_WIDTH)
def next_trial(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Logs of the trials so far: whole, paused or running.")
    ],
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="Metric of the trials.")] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Length of a whole trial, in steps where logs know no epochs. [default: that which each log names]",
            show_default=False,
        ),
    ] = None,
    waiting: Annotated[int, typer.Option(help="Trials that wait to begin.")] = 0,
    budget: Annotated[float | None, typer.Option(help="Work that is left, in whole trials.")] = None,
) -> NextTrial:
    """Choose which trial of a search runs on next, or whether a new one begins, where trials can be paused."""
    from forerun.jobs.forecast import forecast_next

    return forecast_next(folder, metric=metric, epochs=epochs, waiting=waiting, budget=budget)


@verb(
    "Compare configurations by accuracy and time.",
    page=f"{_PAGES}:trade_off_page",
    plot=f"{_PLOTS}:trade_off_plot",
    width=_WIDTH,
)
def trade_off(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="Configurations: columns name, run, model, device, and options of each.",
        ),
    ],
    target: TargetOption = None,
    metric: MetricOption = None,
) -> TradeOff:
    """Forecast the accuracy of several configurations against the time that each takes."""
    import forerun

    return forerun.trade_off(table, target=target, metric=metric)


@verb("Forecast the steps at other batch sizes.", page=f"{_PAGES}:batches_page", width=_WIDTH)
def batches(
    table: Annotated[
        Path, typer.Argument(metavar="FILE.csv", help="Columns batch_size, and steps or epochs to a target.")
    ],
    batch_size: Annotated[int | None, typer.Option(help="Batch size to answer.")] = None,
    dataset_size: Annotated[int | None, typer.Option(help="Training samples of an epoch.")] = None,
) -> BatchForecast:
    """Forecast the steps to a target at other batch sizes, from those that were measured."""
    from forerun.jobs.forecast_tables import forecast_batches

    sizes = () if batch_size is None else (batch_size,)
    return forecast_batches(table, batch_sizes=sizes, dataset_size=dataset_size)


@verb(
    "Forecast a network that was never trained.",
    page=f"{_PAGES}:networks_page",
    plot=f"{_PLOTS}:networks_plot",
    width=_WIDTH,
)
def networks(
    table: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.csv",
            help="Networks that were trained: columns network or depth, features, and epochs, b0_per_step or "
            "b0_per_epoch, b1, b2, steps_per_epoch.",
        ),
    ],
    metric: Annotated[str | None, typer.Option(metavar="NAME", help="Column that is wanted.")] = None,
    leave_out: Annotated[
        str | None,
        typer.Option(
            metavar="NETWORK",
            help="Predict this network from the others, and compare with its own values. "
            "[default: each in turn, unless one has an empty value]",
            show_default=False,
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(metavar="steps|epochs", help="Unit of a column that is called b0 alone."),
    ] = None,
) -> NetworkForecast:
    """Forecast what a network that was never trained needs, from others."""
    from forerun.jobs.forecast_tables import forecast_networks

    return forecast_networks(table, value=metric, leave_out=leave_out, unit=unit)


class ScalingOptions(DeviceOptions, total=False):
    """Settings of the runs that a law of scaling is asked about."""

    target: Annotated[
        str | None,
        Setting(
            help="Loss to reach with the least work, such as loss<=2.3.",
            group="target",
            metavar="LOSS<=VALUE",
        ),
    ]
    model: Annotated[
        str | None,
        Setting(
            help="A language model of the kind, as in predict; with --on its rate of useful work times the answers.",
            group="model",
            metavar="MODEL",
        ),
    ]
    sequence_length: Annotated[int | None, Setting(help="With --model: tokens of one sample.", group="model")]
    seed: Annotated[
        int | None, Setting(help="Seed of the draws behind the intervals.", group="limits", low=0)
    ]


@verb(
    "Forecast the best size of a language model.",
    options=ScalingOptions,
    page=f"{_PAGES}:scaling_page",
    plot=f"{_PLOTS}:scaling_plot",
    width=_WIDTH,
)
def scaling(
    runs: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS",
            help="Finished runs: a CSV with the columns parameters, tokens and loss, or run (the file of a curve), and "
            "optionally learning_rate and batch_size; or a folder of such tables.",
        ),
    ],
    settings: dict[str, Any],
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORK",
            help="Work, such as 1e21flop, hours of a device, such as 500gpuh, or 10000usd; may be repeated. "
            "[default: ten times the largest run, without a target]",
            show_default=False,
        ),
    ] = None,
    on: OnDevices = None,
) -> ScalingForecast:
    """Forecast the best size and tokens for a budget, and the price of a loss, from a few finished runs."""
    from forerun.jobs.fitted_laws import forecast_scaling

    asked = checked(settings, ScalingOptions)
    return forecast_scaling(runs, budgets=budget or [], devices=on or [], **asked)


@verb(
    "Fit a law to the losses of a run.",
    page=f"{_PAGES}:curve_fit_page",
    plot=f"{_PLOTS}:curve_fit_plot",
    width=_WIDTH,
)
def law(
    run: RunArgument,
    name: Annotated[
        str, typer.Option("--law", metavar="NAME", help="Law: optimus, which is 1 / (b0 k + b1) + b2.")
    ] = "optimus",
    target: TargetOption = None,
    metric: MetricOption = None,
) -> CurveFit:
    """Fit a law to the losses of a run and print its coefficients."""
    from forerun.jobs.fitted_laws import fit_curve

    return fit_curve(run, name, metric=metric, target=target)


forecast = Verbs(
    "Forecast when a run reaches an accuracy, and what other batch sizes, networks and sizes of a model need.",
    {
        "run": run,
        "watch": watch,
        "backtest": backtest,
        "next": next_trial,
        "trade-off": trade_off,
        "batches": batches,
        "networks": networks,
        "scaling": scaling,
        "law": law,
    },
    short_help="Forecast when a run reaches an accuracy.",
    chosen=lambda words: "run",
)
