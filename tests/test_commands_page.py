"""The page of commands, made when the site is built, knows every command and option."""

import importlib.util
import re
from pathlib import Path

import pytest
from typer.main import get_command

from forerun.surface.cli.main import app

HOOK = Path(__file__).parents[1] / "docs" / "commands_page.py"


def loaded_hook():
    """The hook as mkdocs loads it: from its file, for docs/ is no package."""
    spec = importlib.util.spec_from_file_location("commands_page", HOOK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


maker = loaded_hook()
PAGE = maker.commands_page()
COMMANDS = dict(maker.all_commands(get_command(app), "forerun"))


def section(path: str) -> str:
    """Text under the heading of a command, without the headings below it."""
    found = re.search(rf"^#+ {re.escape(path)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section '{path}'"
    return found[1]


def options(command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_option_is_on_the_page(path):
    text = section(path)
    assert COMMANDS[path].help.split(".")[0] in text
    missing = {name for name in options(COMMANDS[path]) if not re.search(rf"`[^`\n]*{name}\b", text)}
    assert missing - {"--help"} == set()


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_option_has_help(path):
    command = COMMANDS[path]
    assert command.help
    assert all(parameter.help for parameter in command.params)


def test_a_bar_in_a_help_text_does_not_end_its_cell():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {3}


def test_the_site_gets_the_page(tmp_path):
    build = pytest.importorskip("mkdocs.commands.build").build
    from mkdocs.config import load_config

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[Commands](commands.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(f"site_name: made\nhooks: [{HOOK}]\n", encoding="utf-8")
    build(load_config(str(tmp_path / "mkdocs.yml")))
    made = (tmp_path / "site" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "forerun measure curve" in made
