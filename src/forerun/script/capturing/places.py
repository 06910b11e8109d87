"""Places in a captured script: which code is the user's, and the line of it that something comes from."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["error_words", "is_of_script", "place_in_script", "place_of"]

_MOST_WORDS = 400
_MOST_CAUSES = 8


def is_of_script(filename: str) -> bool:
    """True for a file of the user; the script itself is one wherever it lies, such as in a library that ``-m`` runs."""
    if filename == getattr(sys.modules["__main__"], "__file__", None):
        return True
    return not filename.startswith(_libraries()) and not filename.startswith("<")


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of forerun, of Python and of installed packages; PyTorch may lie on a path of its own."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    found = {str(Path(__file__).parents[2]), *(sysconfig.get_path(name) for name in ("purelib", "stdlib"))}
    return tuple(found | ({str(Path(torch).parents[1])} if torch else set()))


def place_in_script() -> str:
    """``file.py, line 12`` of the innermost frame of the user's code now."""
    return _innermost(traceback.extract_stack()) or "the script"


def place_of(trace: TracebackType | None) -> str:
    """``file.py, line 12`` of the user's innermost frame of an error; empty if there is none."""
    return _innermost(traceback.extract_tb(trace))


def _innermost(frames: Any) -> str:
    for frame in reversed(frames):
        if is_of_script(frame.filename):
            return f"{Path(frame.filename).name}, line {frame.lineno}"
    return ""


def error_words(error: BaseException) -> str:
    """An error in one line, with the first cause of a chain of failed imports.

    >>> try:
    ...     try:
    ...         raise ModuleNotFoundError("No module named 'sentencepiece'")
    ...     except ImportError as cause:
    ...         raise ImportError("cannot import the tokenizer") from cause
    ... except ImportError as found:
    ...     print(error_words(found))
    ImportError: cannot import the tokenizer; its cause was ModuleNotFoundError: No module named 'sentencepiece'
    """
    cause, causes = error, 0
    while causes < _MOST_CAUSES and (
        inner := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    ):
        cause, causes = inner, causes + 1
    words = _words(error)
    if isinstance(error, ImportError) and cause is not error and _words(cause) not in words:
        words += f"; its cause was {_words(cause)}"
    return words


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_WORDS else text[: _MOST_WORDS - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
