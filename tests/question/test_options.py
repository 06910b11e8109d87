"""Settings are declared once: command line, HTTP and documentation follow from it."""

import inspect
from typing import TypedDict

import pytest
from typer.main import get_command

import forerun
from forerun.question.options import CommonOptions, RunOptions, ScaleOptions
from forerun.question.settings import Setting, checked, declared
from forerun.search.options import PlanOptions
from forerun.surface.cli.main import app
from forerun.surface.web.questions import PlanBody, PredictBody, ScaleBody

VERBS = {
    "predict": (RunOptions, PredictBody),
    "scale": (ScaleOptions, ScaleBody),
    "plan": (PlanOptions, PlanBody),
}


def parameters(verb):
    command = get_command(app).commands[verb]
    return (command.commands["devices"] if verb == "scale" else command).params


def flags(verb):
    return {flag for parameter in parameters(verb) for flag in parameter.opts}


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_is_an_option_of_the_command_with_its_help(verb):
    options, _ = VERBS[verb]
    told = {flag: parameter.help for parameter in parameters(verb) for flag in parameter.opts}
    for item in declared(options).values():
        assert told[item.flag].startswith(item.setting.help)


@pytest.mark.parametrize("verb", VERBS)
def test_every_setting_that_names_no_file_can_be_asked_over_http(verb):
    options, body = VERBS[verb]
    fields = {field.alias or name for name, field in body.model_fields.items()}
    # Lengths are numbers or a law there.
    wanted = {
        name for name, item in declared(options).items() if not item.setting.is_local or name == "lengths"
    }
    assert fields - {"model", "models", "device", "devices"} == wanted


@pytest.mark.parametrize("verb", VERBS)
def test_python_takes_the_settings_by_the_same_names(verb):
    options, _ = VERBS[verb]
    takes = inspect.signature(getattr(forerun, verb)).parameters
    assert takes["options"].annotation == f"Unpack[{options.__name__}]"


def test_the_verbs_share_their_settings():
    for options in (RunOptions, ScaleOptions, PlanOptions):
        assert set(declared(CommonOptions)) <= set(declared(options))


def test_flags_and_names_are_unique_and_documented():
    for options in (RunOptions, ScaleOptions, PlanOptions):
        found = [item.flag for item in declared(options).values()]
        assert len(found) == len(set(found))
        for item in declared(options).values():
            assert item.setting.help.endswith("."), item.name
            assert item.setting.group, item.name


def test_a_value_is_checked_against_its_declaration():
    class Options(TypedDict, total=False):
        size: "forerun.question.options.Annotated[int | None, Setting(help='Size.', group='run', low=1, high=9)]"

    assert checked({"size": 3}, Options) == {"size": 3}
    assert checked({"size": None}, Options) == {}
    with pytest.raises(forerun.UsageError, match="size must be at most 9, got 10"):
        checked({"size": 10}, Options)


def test_help_stands_under_headings():
    from typer.testing import CliRunner

    text = CliRunner().invoke(app, ["predict", "--help-all"]).stdout
    places = [
        text.index(f"\n{heading}:") for heading in ("Model", "Run", "Devices and links", "Job", "Output")
    ]
    assert places == sorted(places)


def test_a_call_shows_its_common_settings_with_their_types_and_help():
    for call in (forerun.predict, forerun.scale, forerun.layouts, forerun.advise):
        shown = inspect.signature(call).parameters
        assert str(shown["epochs"]) == "epochs: float | None = None"
        assert list(shown)[-1] == "options"
        assert "batch_size: Batch size of one device" in call.__doc__
    assert shown["num_devices"].annotation == int | None
