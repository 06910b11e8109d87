"""``python -m studies``: documented, one line for every mistake, and nothing of it in the package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from studies.__main__ import app
from studies.commands.accuracy import with_accuracy, with_last_section

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
COMMANDS = dict(get_command(app).commands)


def invoke(*words, **environment):
    return CliRunner(env={"COLUMNS": "80", **environment}).invoke(app, list(map(str, words)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name):
    assert COMMANDS[name].help
    assert all(parameter.help for parameter in COMMANDS[name].params)


def test_the_page_lists_every_command_and_no_other():
    assert sorted(re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE)) == sorted(COMMANDS)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["accuracy", "--out", "no/such/folder/page.md"], "does not exist"),
        (["accuracy", "rows.csv"], "unexpected extra argument"),
        (["fit-weights"], "missing option '--out'"),
        (["fit-weights", "--out", "no/such/folder/w.safetensors"], "does not exist"),
        (["fit-scaling", "--out", "no/such/folder/c.json"], "does not exist"),
        (["backtest", "--save", "no/such/folder/b.json"], "does not exist"),
        (["backtest", "--plot", "curves.txt"], ".png"),
        (["stack", "--json"], "no such option"),
        (["parities"], "no such command"),
    ],
)
def test_a_wrong_option_is_status_2_before_any_work(words, told):
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert told in result.stderr


@pytest.mark.parametrize("words", [["stack"], ["backtest"], ["schedule"], ["fit-scaling", "--out", "c.json"]])
def test_without_the_public_tables_one_line_says_what_is_missing(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORERUN_REFERENCE_DATA", raising=False)
    result = invoke(*words)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.count("\n") == 1
    assert "the public measurement tables are needed" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_summary_goes_between_the_markers_of_a_readme():
    text = "before\n<!-- accuracy:begin -->\nold\n<!-- accuracy:end -->\nafter\n"
    found = with_accuracy(text, "| new |\n")
    assert found == "before\n<!-- accuracy:begin -->\n| new |\n<!-- accuracy:end -->\nafter\n"
    assert with_accuracy("nothing to fill", "| new |\n") == "nothing to fill"


def test_figures_that_other_commands_make_stay_when_a_page_is_made_anew(tmp_path):
    earlier = tmp_path / "page.md"
    earlier.write_text("# Accuracy\n\nold\n\n## Large models\n\n| a |\n", encoding="utf-8")
    found = with_last_section("# Accuracy\n\nnew\n", earlier, "\n## Large models\n")
    assert found == "# Accuracy\n\nnew\n\n## Large models\n\n| a |\n"
    earlier.write_text("# Accuracy\n", encoding="utf-8")
    assert with_last_section("# Accuracy\n\nnew\n", earlier, "\n## Large models\n") == "# Accuracy\n\nnew\n"


def test_the_module_runs_and_lists_its_commands():
    done = subprocess.run([sys.executable, "-m", "studies"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
