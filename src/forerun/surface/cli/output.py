"""Output of a command: answers go to stdout, all else to stderr, slow stages after two seconds."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forerun.base.errors import StoreWarning
from forerun.base.stages import LOGGER

if TYPE_CHECKING:
    from rich.console import RenderableType

TABLE_WIDTH_IN_A_PIPE = 140
"""Width where output goes to a pipe; a line of a table stays one line for grep."""


def show_any_sign() -> None:
    """Lets a terminal print '?' for a sign it cannot show, and writes all that is printed.

    Under PYTHONUNBUFFERED, Python drops what a nearly full disk did not take, without an error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(raw := sys.stdout.buffer, io.RawIOBase):
        encoding = sys.stdout.encoding
        sys.stdout = io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=True)


def show_own_warnings() -> None:
    """Prints the warnings of this package as one line each on stderr."""
    others = warnings.showwarning

    def show(message: Any, category: Any, *place: Any, **more: Any) -> None:
        if issubclass(category, StoreWarning):
            sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")
        else:
            others(message, category, *place, **more)

    warnings.showwarning = show
    warnings.simplefilter("always", StoreWarning)


def json_text(answer: Mapping[str, Any]) -> str:
    """An answer as text, as ``--json`` prints it."""
    return json.dumps(answer, indent=2, allow_nan=False, ensure_ascii=False)


def print_json(answer: Mapping[str, Any]) -> None:
    """Prints exactly one JSON object on stdout."""
    sys.stdout.write(json_text(answer) + "\n")


def page_width(most: int) -> int:
    """Columns to write for: those of the terminal or of COLUMNS, at most ``most``."""
    import shutil

    return min(most, shutil.get_terminal_size(fallback=(most, 24)).columns)


def print_page(page: RenderableType, width: int) -> None:
    """Prints a page on stdout, with colours on a terminal only; no text is read as markup."""
    from rich.console import Console

    console = Console(width=width, markup=False, highlight=False, emoji=False, soft_wrap=False)
    console.print(page)


@contextlib.contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Keeps what libraries and a user's model file print off stdout; shows warnings with ``debug`` only."""
    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", StoreWarning)
            os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        yield


STAGE_DELAY_S = 2.0
"""Time after which a stage is shown [s]."""


class _Shown(logging.Handler):
    """A spinner with the words of the innermost stage."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._stages: list[str] = []
        self._timer: threading.Timer | None = None
        self._status: Any = None
        self._held = threading.RLock()

    def emit(self, record: logging.LogRecord) -> None:
        """Opens or closes a stage."""
        if record.levelno >= logging.WARNING:
            self.end()
            sys.stderr.write(f"{record.getMessage()}\n")
            return
        with self._held:
            if getattr(record, "stage", None) == "begin":
                self._stages.append(record.getMessage())
            elif getattr(record, "stage", None) == "end" and self._stages:
                self._stages.pop()
            else:
                return
            if not self._stages:
                self.end()
            elif self._status is not None:
                self._status.update(self._words())
            elif self._timer is None:
                self._timer = threading.Timer(STAGE_DELAY_S, self._show)
                self._timer.daemon = True
                self._timer.start()

    def end(self) -> None:
        """Clears the line of words."""
        with self._held:
            if self._timer is not None:
                self._timer.cancel()
            if self._status is not None:
                self._status.stop()
            self._timer = self._status = None

    def _show(self) -> None:
        from rich.console import Console

        with self._held:
            if self._timer is None or not self._stages:
                return
            self._status = Console(stderr=True, markup=False, highlight=False).status(self._words())
            self._status.start()

    def _words(self) -> str:
        return f"{self._stages[-1]} ..."


@contextmanager
def warned_once() -> Iterator[None]:
    """Shows each warning once, however many parts of the command meet its cause."""
    told: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        is_known = record.levelno >= logging.WARNING and text in told
        told.add(text)
        return not is_known

    LOGGER.addFilter(is_new)
    try:
        yield
    finally:
        LOGGER.removeFilter(is_new)


@contextmanager
def shown_stages(words: Sequence[str]) -> Iterator[None]:
    """Shows the stages of a command.

    Args:
        words: The command line; ``--json``, ``--quiet`` and ``-q`` before ``--`` turn it off.
    """
    own = words[: words.index("--")] if "--" in words else words
    if not sys.stderr.isatty() or {"--json", "--quiet", "-q"} & set(own):
        yield
        return
    handler = _Shown()
    level = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        handler.end()
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
