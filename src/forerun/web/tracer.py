"""Tracing in a child process, which is ended if a trace takes too long.

The server itself never loads a framework: the child leaves traces in the cache of graphs, where later
questions find them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from forerun.errors import FailureError, ForerunError, UsageError

__all__ = ["Tracer"]


class Tracer:
    """Runs functions of modules in a child process, one at a time.

    Args:
        limit_s: Time a call may take before the child is ended [s].
    """

    def __init__(self, limit_s: float = 60.0) -> None:
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._context = multiprocessing.get_context("spawn")
        self._child: multiprocessing.process.BaseProcess | None = None
        self._end: Connection | None = None

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``work(*arguments)``.

        Raises:
            UsageError, FailureError: The work raised one of them, or took too long.
        """
        with self._lock:
            end = self._started()
            try:
                end.send((work, arguments))
                if not end.poll(self._limit_s):
                    self._stop()
                    raise UsageError(
                        f"the model took longer than {self._limit_s:g} s to trace, which is not answered over HTTP; "
                        "use the command line"
                    )
                kind, answer = end.recv()
            except (EOFError, OSError) as error:
                self._stop()
                raise FailureError("the process that traces models ended; ask again") from error
        if kind == "error":
            raise answer
        return answer

    def close(self) -> None:
        """Ends the child."""
        with self._lock:
            self._stop()

    def _started(self) -> Connection:
        if self._child is None or not self._child.is_alive() or self._end is None:
            self._end, other = self._context.Pipe()
            self._child = self._context.Process(target=_serve, args=(other,), daemon=True)
            self._child.start()
            other.close()
        return self._end

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.join()
        if self._end is not None:
            self._end.close()
        self._child = self._end = None


def _serve(end: Connection) -> None:
    """The child's loop: calls arrive, answers go back; it ends with its parent."""
    with contextlib.suppress(EOFError, OSError, KeyboardInterrupt):
        while True:
            work, arguments = end.recv()
            end.send(_answer(work, arguments))


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    try:
        return "result", work(*arguments)
    except ForerunError as error:
        known = UsageError if isinstance(error, UsageError) else FailureError
        return "error", known(str(error))
    except Exception as error:  # a library may raise anything on a model it cannot build
        return "error", FailureError(f"{type(error).__name__}: {error}")
