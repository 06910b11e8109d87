"""A verb is declared once, and its part is loaded when it is asked for."""

import csv
import json
import os
import subprocess
import sys

import typer
from command_line import invoke
from typer.main import get_command

from forerun.surface.cli import verbs
from forerun.surface.cli.main import app


def all_commands(command=None):
    command = command or get_command(app)
    yield command
    for child in getattr(command, "commands", {}).values():
        yield from all_commands(child)


def test_every_command_and_option_has_help():
    for command in all_commands():
        assert command.help, command.name
        assert all(parameter.help for parameter in command.params), command.name
        flags = [flag for parameter in command.params for flag in parameter.opts]
        assert len(flags) == len(set(flags)), command.name


def test_a_verb_loads_no_part_of_another():
    code = (
        "from forerun.surface.cli.main import app; app(['predict', '--help'], standalone_mode=False); import sys; "
        "print([name for name in sys.modules if name.startswith(('forerun.evidence', 'forerun.script', 'forerun.jobs', "
        "'forerun.adapters'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_question_is_chosen_by_its_name_or_by_an_option():
    assert "expected a model, got none" in invoke("scale", "--on", "t4").stderr
    assert "no such option: --devicse" in invoke("scale", "servers", "--devicse", "1").stderr
    assert "expected measured points" in invoke("scale", "points").stderr
    assert "give --fit POINTS.csv" in invoke("scale", "points", "--devices", "2").stderr


class _Greeting:
    def as_dict(self):
        return {"greeting": "hello"}


def test_another_package_may_declare_a_verb_and_a_question(monkeypatch):
    @verbs.verb("Greet.", page=lambda found: found.as_dict()["greeting"])
    def greet(name: str = typer.Option("x", help="Name.")) -> _Greeting:
        """Greet somebody."""
        return _Greeting()

    names = ["greet", "schedule.greet"]
    monkeypatch.setattr(verbs, "plugin_names", lambda group: names)
    monkeypatch.setattr(verbs, "plugin", lambda group, name: greet if name in names else None)
    assert "greet" in invoke("--help").stdout
    assert invoke("greet").stdout == "hello\n"
    assert '"greeting": "hello"' in invoke("greet", "--json").stdout


def test_a_part_that_is_not_there_is_left_out_of_the_help(monkeypatch):
    def absent(group, name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(verbs, "plugin_names", lambda group: ["forecast"])
    monkeypatch.setattr(verbs, "plugin", absent)
    done = invoke("--help")
    assert done.exit_code == 0
    assert "forecast" not in done.stdout
    assert "predict" in done.stdout


def test_every_answer_has_its_rows_as_csv_and_markdown():
    rows = list(csv.DictReader(invoke("hardware", "list", "--format", "csv").stdout.splitlines()))
    assert {"t4", "h100-sxm"} <= {row["name"] for row in rows}
    head, line, first = invoke("models", "resnet50", "--format", "markdown").stdout.splitlines()[:3]
    assert (head, line) == ("| models |", "|---|")
    assert "resnet50" in first
    (row,) = csv.DictReader(
        invoke("predict", "resnet50", "--on", "t4", "--format", "csv").stdout.splitlines()
    )
    assert float(row["step_time_s_low"]) < float(row["step_time_s"]) < float(row["step_time_s_high"])
    assert "one of table, json, csv, markdown" in invoke("models", "--format", "xml").stderr
    assert "contradict" in invoke("models", "--json", "--format", "csv").stderr


def test_a_page_is_in_the_currency_that_was_asked_for_and_json_in_dollars():
    asked = [
        "predict",
        "resnet50",
        "--on",
        "t4",
        "--dataset",
        "cifar10",
        "--price",
        "1.0411/h",
        "--currency",
        "eur",
    ]
    page = invoke(*asked).stdout
    assert "€" in page
    assert page.splitlines()[-1].startswith("amounts in EUR: 1 EUR = 1.0411 USD")
    euros = [*asked[:7], "1eur/h", "--json"]
    assert (
        json.loads(invoke(*asked, "--json").stdout)["cost_usd"]
        == json.loads(invoke(*euros).stdout)["cost_usd"]
    )
    assert "unknown currency 'xyz'" in invoke(*asked[:4], "--currency", "xyz").stderr


def completions(*words):
    variables = {
        "_FORERUN_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "forerun"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    return done.stdout.split()


def test_a_shell_completes_models_devices_and_words_of_settings():
    from forerun.surface.cli.settings import known_devices, known_models

    assert "resnet50" in known_models("resnet5")
    assert "torchvision:resnet50" in known_models("torchvision:resnet5")
    assert "4x8xh100-sxm" in known_devices("4x8xh100")
    assert "t4,l40s" in known_devices("t4,l40")
    assert completions("forerun", "predict", "x", "--precision", "amp") == ["amp", "amp-bf16"]
