"""A hook of mkdocs: the page of commands, written from the help and the settings that each command declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from forerun.surface.cli.main import app
from forerun.surface.cli.settings import grouped_options

PAGE = "commands.md"

_INTRODUCTION = """# Commands

This page is made from the commands themselves: `forerun COMMAND --help` prints the same.
[Files and output](files.md) has the columns of tables, the exit statuses and the fields of answers.
[How to](how-to/index.md) has a command for each task.
"""


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """The pages of the site with that of commands among them."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=commands_page()))
    return files


def commands_page() -> str:
    """The page: one section for each command, with its arguments and options by group."""
    sections = [_section(path, command) for path, command in all_commands(get_command(app), "forerun")]
    return "\n".join([_INTRODUCTION, *sections])


def all_commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command and those below it, each with its words on the command line."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from all_commands(child, f"{path} {name}")


def _section(path: str, command: Any) -> str:
    heading = "#" * (len(path.split()) + 1)
    return f"{heading} {path}\n\n{_plain(command.help)}\n{_options(command)}"


def _options(command: Any) -> str:
    lines = []
    for title, records in grouped_options(command):
        rows = [
            f"| {_names(names)} | {_escaped(meaning)} |"
            for names, meaning in records
            if "--help" not in names
        ]
        lines += [f"| **{title}** | |", *rows] if rows else []
    return "\n".join(["", "| option | meaning |", "|---|---|", *lines, ""]) if lines else ""


def _plain(text: str) -> str:
    """The paragraphs of a docstring, without what click keeps for itself."""
    return text.partition("\f")[0].replace("\b\n", "").strip()


def _names(names: str) -> str:
    """The names of an option, each as code."""
    return "`" + _escaped(names).replace(", -", "`, `-") + "`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
