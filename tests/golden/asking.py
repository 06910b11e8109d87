"""Asks the questions in this process, and tells in which places two answers differ."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import shutil
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from forerun.surface.cli.main import app
from golden.made_files import make_files
from golden.questions import CALLS, COMMANDS, TRIMMED

__all__ = ["answer_file", "ask", "differences", "folder_of_questions", "question_names"]

ANSWERS = Path(__file__).parent / "answers"

NOT_KEPT = {"scheduler_ms", "forerun"}
"""Keys of what belongs to this machine and version: the time of a decision, the version of the package."""

RELATIVE = 3e-6
"""The network of kernel times multiplies in single precision: another processor's order of sums moves parts of a step
by up to 1.5e-6."""
OF_ONE = ("excess", "regret")
"""Keys of ratios less one: they are compared as the ratios, of which the difference keeps few digits."""
SMALLEST = 1e-12
"""Differences of times below a picosecond are those of rounding."""


def question_names() -> list[str]:
    """Names of all questions."""
    return [*COMMANDS, *CALLS]


def answer_file(name: str) -> Path:
    """Where the answer to a question is kept."""
    return ANSWERS / f"{name}.json"


@contextlib.contextmanager
def folder_of_questions(folder: Path) -> Iterator[None]:
    """A folder with the files that the questions name is the current one, and ``python`` the Python that asks."""
    before, paths = Path.cwd(), os.environ.get("PATH", "")
    make_files(folder)
    shutil.copytree(ANSWERS, folder / "answers")
    os.chdir(folder)
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), paths])
    try:
        yield
    finally:
        os.environ["PATH"] = paths
        os.chdir(before)


def ask(name: str) -> Any:
    """The answer to a question, without what belongs to this machine and day.

    Raises:
        AssertionError: The command failed.
    """
    if name in CALLS:
        answer = CALLS[name]()
    else:
        words = shlex.split(COMMANDS[name])
        given = [] if "--format" in words else ["--json"]
        at = words.index("--") if "--" in words else len(words)
        done = CliRunner().invoke(app, [*words[:at], *given, *words[at:]])
        assert done.exit_code == 0, f"{name}: {done.stderr or done.exception}"
        answer = json.loads(done.stdout)
    trim = TRIMMED.get(name, lambda whole: whole)
    return _lasting(json.loads(json.dumps(trim(answer))))


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in NOT_KEPT}
    if isinstance(value, list):
        # Whether a price is old is a matter of the day.
        return [_lasting(item) for item in value if not str(item).startswith("prices older than")]
    return value


def differences(kept: Any, new: Any, added_keys: Collection[str] = (), place: str = "") -> list[str]:
    """Places where a new answer is not the one that was kept.

    Args:
        kept: The stored answer.
        new: The new one.
        added_keys: Keys that the new answer may have beside those of the stored one.
        place: Where in the answer both are.
    """
    if isinstance(kept, dict) and isinstance(new, dict):
        found = [f"{place}.{key}: gone" for key in kept if key not in new]
        found += [f"{place}.{key}: new" for key in new if key not in kept and key not in added_keys]
        both = [key for key in kept if key in new]
        return found + [
            d for key in both for d in differences(kept[key], new[key], added_keys, f"{place}.{key}")
        ]
    if isinstance(kept, list) and isinstance(new, list):
        if len(kept) != len(new):
            return [f"{place}: {len(kept)} entries before, {len(new)} now"]
        pairs = enumerate(zip(kept, new, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, added_keys, f"{place}[{i}]")]
    abs_tol = RELATIVE if place.endswith(OF_ONE) else SMALLEST
    return [] if _is_same(kept, new, abs_tol) else [f"{place}: {kept!r} before, {new!r} now"]


def _is_same(kept: Any, new: Any, abs_tol: float) -> bool:
    numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (kept, new)]
    if all(numbers):
        if isinstance(kept, int) and isinstance(new, int):
            return kept == new
        return math.isclose(kept, new, rel_tol=RELATIVE, abs_tol=abs_tol)
    return type(kept) is type(new) and kept == new
