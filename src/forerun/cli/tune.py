"""``forerun tune``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.cli.options import (
    DebugOption,
    JsonOption,
    ShowOutputOption,
)
from forerun.cli.output import (
    TABLE_WIDTH_IN_A_PIPE,
    page_width,
    print_json,
    print_page,
    quiet_libraries,
)
from forerun.cli.settings import with_settings
from forerun.errors import UsageError
from forerun.run.settings import checked, declared, flag_of
from forerun.tuning.options import ScenarioOptions, TuneOptions
from forerun.units import parse_amount

if TYPE_CHECKING:
    from forerun.api.tune import TuneResult
    from forerun.tuning.scenarios.answer import ScenarioRuns

__all__ = ["tune"]


class _Options(TuneOptions, ScenarioOptions, total=False):
    pass


_OF_SCENARIOS = ("budget", "trial_s", "study", "seed", "device_index")
"""Settings of a search that a scenario takes as well."""

_FOR_SCENARIOS = {"study": "folder"}
"""Settings that ``tune_scenarios`` calls otherwise."""


@with_settings(
    _Options,
    without=("check", "with_priors", "with_memory_law"),
    readers={
        "trial_s": lambda text: parse_amount(text, "time"),
        "timeout_s": lambda text: parse_amount(text, "time"),
        "memory_limit_bytes": lambda text: parse_amount(text, "memory"),
    },
)
def tune(
    settings: dict[str, Any],
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SPACE.yaml] -- COMMAND",
            help="Space of the settings to try, and the training command as you run it.",
        ),
    ] = None,
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
            metavar="NAME", help="Scenario of --task: baseline, resolution, hyperparameters, hardware or all."
        ),
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Find a faster or better configuration of a training script within a budget, without editing it."""
    import forerun

    words, settings = list(command or []), checked(settings, _Options)
    switches: dict[str, Any] = {
        "check": not no_check,
        "with_priors": not no_priors,
        "with_memory_law": not no_prediction,
    }
    if scenario is not None:
        if words:
            raise UsageError("expected a scenario of a built-in task or a command, got both")
        refused = [name for name in settings if name in declared(TuneOptions) and name not in _OF_SCENARIOS]
        if refused or show_output or not all(switches.values()):
            given = (
                flag_of(refused[0], TuneOptions) if refused else "--no-check or --show-output and the like"
            )
            raise UsageError(
                f"a scenario has no use for {given}, which is of the search for a command; leave it out"
            )
        asked = {_FOR_SCENARIOS.get(name, name): value for name, value in settings.items()}
        with quiet_libraries(debug=debug):
            found = forerun.tune_scenarios(scenario, **{"data": None, **asked}, say=_say)
        _print_scenarios(found, as_json=as_json)
        return
    if refused := [name for name in settings if name in declared(ScenarioOptions)]:
        raise UsageError(f"{flag_of(refused[0], ScenarioOptions)} is of a scenario: --scenario all")
    space = Path(words.pop(0)) if words and words[0].endswith((".yaml", ".yml")) else None
    with quiet_libraries(debug=debug):
        result = forerun.tune(
            words, space=space, say=_say, echo=sys.stderr if show_output else None, **switches, **settings
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
