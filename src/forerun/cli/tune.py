"""``forerun tune``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forerun.cli.options import (
    DEVICE_HERE_HELP,
    EPOCHS_HELP,
    RUN_TIME_HELP,
    SEED_HELP,
    SETTING_HELP,
    DebugOption,
    JsonOption,
    MetricOption,
    ShowOutputOption,
)
from forerun.cli.output import (
    TABLE_WIDTH_IN_A_PIPE,
    page_width,
    print_json,
    print_page,
    quiet_libraries,
)
from forerun.errors import UsageError

if TYPE_CHECKING:
    from forerun.api.tune import TuneResult
    from forerun.tuning.scenarios.answer import ScenarioRuns

__all__ = ["tune"]


def tune(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SPACE.yaml] -- COMMAND",
            help="Space of the settings to try, and the training command as you run it.",
        ),
    ] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="2h", help="Budget: 2h, '40 trials', 10usd, or several separated by commas."),
    ] = "15min",
    objective: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Objective: speed, time, time-to-target, accuracy or cost; several, "
            "separated by commas, give a Pareto front.",
        ),
    ] = "speed",
    metric: MetricOption = None,
    target: Annotated[float | None, typer.Option(help="Value of the metric to reach, such as 0.9.")] = None,
    study: Annotated[
        Path,
        typer.Option(metavar="FOLDER", help="Folder of the study; an existing study is resumed or shared."),
    ] = Path("forerun-study"),
    trial_time: Annotated[
        str, typer.Option(metavar="8s", help="Time of the steps in a trial for speed, such as 8s.")
    ] = "8s",
    timeout: Annotated[str, typer.Option(metavar="30min", help=RUN_TIME_HELP)] = "30min",
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="4GB", help="Largest memory of a trial, such as 4GB.", show_default="all there is"
        ),
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Loss of the metric that is accepted for speed.", min=0.0)
    ] = 0.01,
    price: Annotated[
        str | None, typer.Option(metavar="1.89/h", help="Price of this machine [US dollars per hour].")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda:N", help=DEVICE_HERE_HELP, show_default="the first GPU"),
    ] = None,
    sessions: Annotated[
        int,
        typer.Option(
            "--sessions",
            "--workers",
            help="Sessions that search at once, each on another GPU or, with --ray, on another node.",
            min=1,
        ),
    ] = 1,
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help="Sampler of the trials: tpe or random.")
    ] = "tpe",
    seed: Annotated[int | None, typer.Option(help=SEED_HELP)] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT", help="Ray cluster whose nodes run the trials: auto or HOST:PORT."
        ),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="With --objective accuracy: end trials whose forecast cannot win.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Model that the script trains, as in predict; its predicted steps choose the first trials.",
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(help=SETTING_HELP["image_size"], min=1, show_default="the script's own"),
    ] = None,
    input_shape: Annotated[
        str | None, typer.Option(metavar="3,224,224", help=SETTING_HELP["input_shape"])
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help=SETTING_HELP["sequence_length"], min=1)] = None,
    no_check: Annotated[
        bool,
        typer.Option(
            "--no-check", help="Skip the full run of the best configuration beside the unchanged script."
        ),
    ] = False,
    no_priors: Annotated[
        bool, typer.Option("--no-priors", help="Choose no first trials by the cost model.")
    ] = False,
    no_prediction: Annotated[
        bool, typer.Option("--no-prediction", help="Reject no trial by its predicted memory.")
    ] = False,
    show_output: ShowOutputOption = False,
    scenario: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Scenario of --task: baseline, resolution, hyperparameters, hardware or all.",
        ),
    ] = None,
    task: Annotated[
        str, typer.Option(metavar="NAME", help="Built-in task of the scenarios: squeezenet.")
    ] = "squeezenet",
    data: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder with the images of the task in seg_train and seg_test."),
    ] = None,
    generate: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Number of training images to generate in --data if it has none.", min=6
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="Initial weights of the task: imagenet or none.")
    ] = "imagenet",
    epochs: Annotated[int, typer.Option(help=EPOCHS_HELP, min=1)] = 10,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find a faster or better configuration of a training script within a budget, without editing it."""
    import forerun
    from forerun.cli.parsing import parse_input_shape, parse_price_usd_per_hour
    from forerun.units import parse_amount

    words = list(command or [])
    if scenario is not None:
        if words:
            raise UsageError("expected a scenario of a built-in task or a command, got both")
        with quiet_libraries(debug=debug):
            found = forerun.tune_scenarios(
                scenario,
                task=task,
                data=data,
                weights=weights,
                epochs=epochs,
                budget=budget,
                trial_s=parse_amount(trial_time, "time"),
                num_generated=generate,
                folder=study,
                seed=seed,
                device_index=device,
                say=_say,
            )
        _print_scenarios(found, as_json=as_json)
        return
    space = Path(words.pop(0)) if words and words[0].endswith((".yaml", ".yml")) else None
    if sampler not in ("tpe", "random"):
        raise UsageError(f"expected the sampler tpe or random, got '{sampler}'")
    with quiet_libraries(debug=debug):
        result = forerun.tune(
            words,
            budget=budget,
            space=space,
            objective=objective,
            study=study,
            metric=metric,
            target=target,
            trial_s=parse_amount(trial_time, "time"),
            timeout_s=parse_amount(timeout, "time"),
            memory_limit_bytes=None if memory is None else parse_amount(memory, "memory"),
            with_memory_law=not no_prediction,
            with_priors=not no_priors,
            model=model,
            image_size=image_size,
            input_shape=None if input_shape is None else parse_input_shape(input_shape),
            sequence_length=sequence_length,
            with_pruning=prune,
            max_accuracy_loss=max_loss,
            check=not no_check,
            sampler=sampler,
            seed=seed,
            price_usd_per_hour=None if price is None else parse_price_usd_per_hour(price),
            device_index=device,
            num_sessions=sessions,
            ray_address=ray,
            say=_say,
            echo=sys.stderr if show_output else None,
        )
    _print(result, as_json=as_json)


def _print(found: TuneResult, *, as_json: bool) -> None:
    if as_json:
        print_json(found.as_dict())
        return
    from forerun.report.tune_page import tune_page

    print_page(tune_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _print_scenarios(found: ScenarioRuns, *, as_json: bool) -> None:
    from forerun.report.scenario_page import scenario_page
    from forerun.report.scenario_plots import write_scenario_plots

    write_scenario_plots(found)
    if as_json:
        print_json(found.as_dict())
    else:
        print_page(scenario_page(found), page_width(TABLE_WIDTH_IN_A_PIPE))
