"""``python -m studies option-tables``: the tables of options in docs/commands.md, made from the commands themselves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.main import get_command

from forerun.cli.options import DebugOption
from forerun.cli.settings import grouped_options
from forerun.errors import FailureError, UsageError

__all__ = ["option_tables", "with_option_tables"]

_TABLE = re.compile(
    r"(<!-- options of (?P<command>forerun [a-z -]+) -->\n).*?(<!-- end of options -->)", re.DOTALL
)


def option_tables(
    page: Annotated[Path, typer.Option(metavar="FILE.md", help="The page.")] = Path("docs/commands.md"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; fail if a table is out of date.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Renew the tables of options between the markers of docs/commands.md."""
    if not page.is_file():
        raise UsageError(
            f"expected the page of commands at '{page}', but there is none; run this in the checkout"
        )
    before = page.read_text(encoding="utf-8")
    after = with_option_tables(before)
    if check and after != before:
        raise FailureError(
            f"the tables of options in {page} are out of date; run: python -m studies option-tables"
        )
    if not check:
        page.write_text(after, encoding="utf-8")


def with_option_tables(text: str) -> str:
    """The text of a page with every marked table of options made anew."""
    return _TABLE.sub(lambda found: f"{found[1]}\n{_table(found['command'])}\n{found[3]}", text)


def _table(path: str) -> str:
    """The options of a command by group, as a table."""
    command = _command(path)
    lines = ["| option | meaning |", "|---|---|"]
    for heading, records in grouped_options(command):
        if heading == "Arguments":
            continue
        lines.append(f"| **{heading}** | |")
        lines += [f"| {_names(names)} | {_escaped(words)} |" for names, words in records if names != "--help"]
    return "\n".join(lines) + "\n"


def _command(path: str) -> Any:
    from forerun.cli.main import app

    found: Any = get_command(app)
    for word in path.split()[1:]:
        found = found.commands[word]
    return found


def _names(names: str) -> str:
    """The names of an option, each as code."""
    return "`" + _escaped(names).replace(", --", "`, `--") + "`"


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
