"""``forerun compare``: of two kept answers, and of two configurations of a script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forerun.base.errors import UsageError
from forerun.surface.cli.verbs import Verbs, verb

if TYPE_CHECKING:
    from forerun.prediction.comparison import RunComparison

__all__ = ["compare"]


@verb(
    "Compare two predictions kept with --json.",
    page="forerun.surface.report.comparison_page:comparison_page",
    plot="forerun.surface.report.objects:save_plot",
)
def answers(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Answer of 'forerun predict --json'.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The other answer.")],
) -> RunComparison:
    """Compare two predictions: what differs in the question, and which parts of time, memory and money follow."""
    from forerun.prediction.comparison import compare_answers

    return compare_answers(_read(first), _read(second))


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror or error}; make it with forerun predict --json"
        ) from None
    except ValueError as error:
        raise UsageError(
            f"{path}: expected an answer of 'forerun predict --json', got no JSON ({error}); make it anew"
        ) from None


def _chosen(words: Sequence[str]) -> str:
    return "answers" if words and words[0].endswith(".json") else "runs"


compare = Verbs(
    help="Compare two predictions (A.json B.json), or two configurations of a script by running them in turns.",
    short_help="Compare two predictions, or two configurations of a script.",
    questions={"answers": answers, "runs": "forerun.script.commands.compare:compare"},
    chosen=_chosen,
)
