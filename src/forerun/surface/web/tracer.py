"""Tracing in child processes, which are ended if a trace takes too long.

The server itself never loads a framework: a child leaves traces in the cache of graphs, where later questions find
them. Several questions are traced at once, each in a child of its own; a bounded number of others waits.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from forerun.base.errors import FailureError, ForerunError, IsolationError, UsageError
from forerun.base.isolation import Worker
from forerun.tracing.isolated import TRACED_MODULES, trace_memory_bytes

__all__ = ["BusyError", "Tracer"]


_NICENESS = 10
"""Traces give way to the server's answers."""


class BusyError(FailureError):
    """More questions wait than may; ask again later.

    Args:
        message: The error in words.
        status: HTTP status: 429 where the client has too many questions of its own, else 503.
    """

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class Tracer:
    """Runs functions of modules in child processes.

    Args:
        limit_s: Time a call may take before its child is ended [s].
        num_children: Number of calls at once.
        num_waiting: Largest number of further calls that wait for a child.
    """

    def __init__(self, limit_s: float = 60.0, *, num_children: int = 2, num_waiting: int = 8) -> None:
        self._limit_s = limit_s
        self._num_places = num_children + num_waiting
        self._num_taken = 0
        self._lock = threading.Lock()
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        memory_bytes = trace_memory_bytes() / num_children
        self._workers = [
            Worker(
                memory_limit_bytes=memory_bytes, preload=TRACED_MODULES, may_fork=False, niceness=_NICENESS
            )
            for _ in range(num_children)
        ]
        for worker in reversed(self._workers):
            self._free.put(worker)

    @property
    def num_calls(self) -> int:
        """Number of calls that run or wait."""
        return self._num_taken

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of ``work(*arguments)``.

        Raises:
            BusyError: Too many calls wait already.
            UsageError, FailureError: The work raised one of them, or took too long.
        """
        with self._lock:
            if self._num_taken >= self._num_places:
                raise BusyError("too many models are being traced just now; ask again in some seconds")
            self._num_taken += 1
        try:
            worker = self._free.get()
            try:
                return worker.call(work, *arguments, what="the model", timeout_s=self._limit_s)
            finally:
                self._free.put(worker)
        except IsolationError as error:
            if "took longer" in str(error):
                raise UsageError(
                    f"the model took longer than {self._limit_s:g} s to trace, which is not answered over HTTP; "
                    "use the command line"
                ) from None
            if "the process" in str(error):
                raise FailureError("the process that traces models ended; ask for a smaller model") from None
            raise FailureError(str(error).removeprefix("the model: ")) from None
        except ForerunError as error:
            known = UsageError if isinstance(error, UsageError) else FailureError
            raise known(str(error)) from None
        finally:
            with self._lock:
                self._num_taken -= 1

    def close(self) -> None:
        """Ends the children."""
        for worker in self._workers:
            worker.close()
