"""The words of the code: no docstring opens with a clause used as a noun, no stilted phrase stands in a text."""

import ast
from collections.abc import Iterator
from pathlib import Path

import forerun

ROOT = Path(forerun.__file__).parent

CLAUSES = {"What", "How", "Whether", "Who"}
PHRASES = ("parted by", "told alike", "cannot be meant", 'help="The same')


def checked_files() -> Iterator[Path]:
    """Files of the package."""
    yield from sorted(ROOT.rglob("*.py"))


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring and every string that stands below a name as its description."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                value = statement.value.value
                if isinstance(value, str):
                    yield statement.lineno, value


def openings(source: str) -> list[int]:
    """Lines of the docstrings that open with a clause used as a noun."""
    found = texts(ast.parse(source))
    return [line for line, text in found if text.split()[:1] and text.split()[0] in CLAUSES]


def phrases(source: str) -> list[str]:
    """Phrases of ``PHRASES`` in a source, with quotes of either kind."""
    plain = " ".join(source.replace("'", '"').split())
    return [phrase for phrase in PHRASES if phrase in plain]


def test_no_docstring_opens_with_a_clause():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in checked_files()
        for line in openings(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_no_stilted_phrase():
    wrong = [
        f"{path.relative_to(ROOT)}: {phrase}"
        for path in checked_files()
        for phrase in phrases(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


def test_the_check_sees_what_it_forbids():
    assert openings('"""What it is."""\n\n\nclass A:\n    x = 1\n    """Whether so."""\n') == [1, 6]
    assert openings('def f():\n    """The whole, in which What stands later."""\n') == []
    assert phrases("names, parted\n    by commas") == ["parted by"]
    assert phrases("Option(help='The same.')") == ['help="The same']
