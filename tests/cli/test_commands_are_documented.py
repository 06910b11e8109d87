"""docs/commands.md knows every command and option, and no others."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from forerun.cli.main import app

PAGE = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")


def all_commands(command: Any = None, path: str = "forerun") -> Iterator[tuple[str, Any]]:
    command = command or get_command(app)
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from all_commands(child, f"{path} {name}")


COMMANDS = dict(all_commands())


def section(path: str) -> str:
    """Text under the heading of a command, without the headings below it."""
    if path == "forerun":
        return PAGE.partition("\n## ")[0]
    found = re.search(rf"^#+ {re.escape(path)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"docs/commands.md has no section '{path}'"
    return found[1]


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_is_documented(path):
    text = section(path)
    missing = {name for name in options(COMMANDS[path]) if not re.search(rf"`[^`\n]*{name}\b", text)}
    assert missing - {"--version"} == set()


@pytest.mark.parametrize("path", COMMANDS)
def test_no_option_is_documented_that_does_not_exist(path):
    own = set(re.findall(r"`(--[a-z0-9-]+)", section(path)))
    assert own - options(COMMANDS[path]) - {"--help", "--json", "--debug"} == set()


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_and_option_has_help(path):
    command = COMMANDS[path]
    assert command.help
    assert all(parameter.help for parameter in command.params)
