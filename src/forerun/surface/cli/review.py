"""Two answers side by side: ``forerun compare``, and ``forerun review`` of a project before and after a change.

A review is printed as a comment on a pull request shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.base.answers import Answer
from forerun.base.errors import FailureError, UsageError
from forerun.base.received import parsed_yaml, read_json
from forerun.prediction.comparison import QUANTITIES, RunComparison, change_words, compare_answers
from forerun.surface.cli.submit import broken_limits, predicted
from forerun.surface.cli.verbs import Verbs, verb

_LEAST_CHANGE = 0.01
"""Relative change from which a quantity counts as changed: the same run predicted with another trace scatters less."""
_COLUMNS = {"step_time_s": "step", "peak_memory_bytes": "memory", "job_time_s": "job", "cost_usd": "cost"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewedRun(Answer):
    """One run before and after a change.

    Attributes:
        name: Its name in the file.
        command: The words of ``forerun predict`` about it.
        after: The answer after the change; None where there is none.
        comparison: Its differences from the answer before; None where one of the two is missing.
        broken: Limits that it breaks, in words.
        failure: Why there is no answer after the change.
        failure_before: Why there is none to compare with.
    """

    name: str
    command: str
    after: Mapping[str, Any] | None = None
    comparison: RunComparison | None = None
    broken: tuple[str, ...] = ()
    failure: str | None = None
    failure_before: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunsReview(Answer):
    """All runs of a file before and after a change."""

    runs: tuple[ReviewedRun, ...]

    def faults(self) -> Iterator[str]:
        """Broken limits, and runs that cannot be predicted any more."""
        for run in self.runs:
            yield from (f"{run.name} breaks {sentence}" for sentence in run.broken)
            if run.failure is not None:
                yield f"{run.name}: {run.failure}"


def _read_runs(path: Path) -> dict[str, tuple[str, str]]:
    """Words and limits of the runs of a file.

    Raises:
        UsageError: It is no such file.
    """
    wanted = (
        "expected 'runs:' with a name, 'predict: MODEL --on DEVICE ...' and perhaps 'within: LIMITS' for each"
    )
    try:
        found = parsed_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {wanted}; it cannot be read: {' '.join(str(error).split())}") from None
    runs = found.get("runs") if isinstance(found, dict) else None
    if not isinstance(runs, dict) or not runs or set(found) != {"runs"}:
        raise UsageError(f"{path}: {wanted}, got {list(found) if isinstance(found, dict) else found!r}")
    for name, run in runs.items():
        if not isinstance(run, dict) or not {"predict"} <= run.keys() <= {"predict", "within"}:
            raise UsageError(f"{path}, {name}: {wanted}, got {run!r}")
        if not all(isinstance(value, str) for value in run.values()):
            raise UsageError(f"{path}, {name}: expected texts, got {run!r}; put them in quotation marks")
    return {str(name): (run["predict"], run.get("within", "")) for name, run in runs.items()}


def _reviewed(name: str, command: str, within: str, before: Path, after: Path) -> ReviewedRun:
    import shlex

    make = partial(ReviewedRun, name=name, command=command)
    try:
        new = predicted(shlex.split(command), after)
    except (FailureError, ValueError) as error:  # a quotation that is never closed
        return make(failure=str(error))
    broken = tuple(broken_limits(new, within))
    if new["fits"] == "no":
        broken = (*broken, f"the memory of the {new['device_title']}: it does not fit")
    try:
        old = predicted(shlex.split(command), before)
    except FailureError as error:  # a run that the change brings along
        return make(after=new, broken=broken, failure_before=str(error))
    return make(after=new, broken=broken, comparison=compare_answers(old, new))


def review_markdown(found: RunsReview) -> str:
    """The review as a comment: a table of what changed, faults above it and reasons below.

    >>> print(review_markdown(RunsReview(runs=(ReviewedRun(name="a", command="x", failure="no such model"),))))
    ### forerun: what this change does to training
    <BLANKLINE>
    :x: a: no such model
    """
    lines = ["### forerun: what this change does to training", ""]
    lines += [f":x: {_escaped(fault)}" for fault in found.faults()]
    changed = [run for run in found.runs if run.after is not None]
    if changed:
        rows = [(run.name, *(_cell(run, name) for name in _COLUMNS)) for run in changed]
        lines += ["", f"| run | {' | '.join(_COLUMNS.values())} |", "|---" * (1 + len(_COLUMNS)) + "|"]
        lines += [f"| {' | '.join(_escaped(cell) for cell in row)} |" for row in rows]
    for run in changed:
        told = (
            [] if run.comparison is None else [s for s in run.comparison.sentences if "; " in s or "fit" in s]
        )
        if run.failure_before is not None:
            told = [f"nothing to compare with: {run.failure_before}"]
        comparison = run.comparison
        if told and (
            comparison is None
            or any(abs(item.change or 0.0) >= _LEAST_CHANGE for item in comparison.quantities)
        ):
            lines += ["", f"**{_escaped(run.name)}**", *(f"- {_escaped(sentence)}" for sentence in told)]
    return "\n".join(lines)


def _escaped(text: str) -> str:
    """A text without the signs that Markdown or HTML would read."""
    found = text.replace("&", "&amp;").replace("<", "&lt;")
    return "".join(f"\\{sign}" if sign in "|[]`*_\\" else sign for sign in found).replace("\n", " ")


def _cell(run: ReviewedRun, field: str) -> str:
    """A quantity after the change, and its relative change where there is one."""
    assert run.after is not None
    value = run.after.get(field)
    if not value:
        return ""
    shown = QUANTITIES[field][1](value["value"])
    items = () if run.comparison is None else run.comparison.quantities
    change = next((item.change for item in items if item.name == field), None)
    if change is None or abs(change) < _LEAST_CHANGE:
        return shown
    return f"{shown} ({change_words(change)})"


def _refuse(found: RunsReview) -> None:
    faults = list(found.faults())
    if faults:
        raise FailureError(f"{len(faults)} of the checks failed: {'; '.join(faults)}")


@verb("Compare the runs of a project before and after a change.", page=review_markdown, after=_refuse)
def review(
    before: Annotated[
        Path,
        typer.Option("--before", metavar="DIR", help="Checkout without the change, such as a git worktree."),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="[FILE]", help="The runs: forerun.yml of this folder unless given.")
    ] = Path("forerun.yml"),
) -> RunsReview:
    """Predict the runs of forerun.yml in a checkout without a change and in this one, and say what differs.

    Ends with 1 where a run breaks its limits, no longer fits, or can no longer be predicted.
    """
    if not before.is_dir():
        raise UsageError(
            f"expected a folder with the checkout before the change, got {before}; see git worktree"
        )
    runs = _read_runs(file)
    return RunsReview(
        runs=tuple(
            _reviewed(name, command, within, before, file.parent) for name, (command, within) in runs.items()
        )
    )


@verb(
    "Compare two predictions kept with --json.",
    page="forerun.surface.report.page:comparison_page",
    plot="forerun.surface.report.objects:save_plot",
)
def answers(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Answer of 'forerun predict --json'.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="The other answer.")],
) -> RunComparison:
    """Compare two predictions: what differs in the question, and which parts of time, memory and money follow."""
    return compare_answers(_read(first), _read(second))


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path}: expected an answer of 'forerun predict --json', but it cannot be read ({said}); make it anew"
        ) from None


def _chosen(words: Sequence[str]) -> str:
    is_script = "--" in words  # which may take a configuration in JSON
    return "answers" if not is_script and any(word.endswith(".json") for word in words) else "runs"


compare = Verbs(
    help="Compare two predictions (A.json B.json), or two configurations of a script by running them in turns.",
    short_help="Compare two predictions, or two configurations of a script.",
    questions={"answers": answers, "runs": "forerun.script.commands:compare"},
    chosen=_chosen,
)
