"""Limits of what the server does at once, figures of what it did, and the children that trace models for it.

The server itself never loads a framework: a child leaves traces in the cache of graphs, where later questions find
them. Several questions are traced at once, each in a child of its own; a bounded number of others waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as Count

from forerun.base.errors import FailureError, ForerunError, IsolationError, UsageError
from forerun.base.isolation import Worker
from forerun.tracing.source import TRACED_MODULES, trace_memory_bytes

_Result = TypeVar("_Result")


class Lane:
    """Threads for one sort of work, with a bounded number of waiting calls.

    Args:
        name: Sort of work, for messages.
        num_threads: Calls at once.
        num_waiting: Largest number of further calls that wait.
    """

    def __init__(self, name: str, num_threads: int, num_waiting: int) -> None:
        self._name = name
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"forerun-{name}")
        self._num_places = num_threads + num_waiting
        self.num_calls = 0

    async def run(self, work: Callable[..., _Result], *arguments: Any) -> _Result:
        """The result of ``work(*arguments)``, computed in a thread of this lane.

        Raises:
            BusyError: Too many calls wait.
        """
        if self.num_calls >= self._num_places:
            raise BusyError(f"too many questions wait to be {self._name}; ask again in a few seconds")
        self.num_calls += 1
        future = self._pool.submit(work, *arguments)
        loop = asyncio.get_running_loop()
        # A caller that gave up does not free the place: its work still runs.
        future.add_done_callback(lambda _: self._free(loop))
        return await asyncio.wrap_future(future)

    def _free(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed at the end of the server
            loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self.num_calls -= 1

    def close(self) -> None:
        """Starts no further call."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class ClientLimit:
    """Number of questions of one client that may be in work at once.

    Args:
        most: The number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_client: Counter[str] = Counter()

    @contextlib.contextmanager
    def question(self, client: str) -> Iterator[None]:
        """Counts a question of a client while it is in work.

        Raises:
            BusyError: The client has too many.
        """
        if self._of_client[client] >= self._most:
            raise BusyError(
                f"you have {self._most} questions that need a model traced already; wait for one of them", 429
            )
        self._of_client[client] += 1
        try:
            yield
        finally:
            self._of_client[client] -= 1
            if not self._of_client[client]:
                # Else every address that ever asked would be kept.
                del self._of_client[client]


class Figures:
    """Figures of the server for Prometheus."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._requests = Count(
            "forerun_requests", "Requests by path and status", ["path", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "forerun_request_seconds", "Time from a request to its answer", ["path"], registry=self._registry,
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        )  # fmt: skip

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Shows a figure that is read when it is asked for."""
        Gauge(f"forerun_{name}", text, registry=self._registry).set_function(value)

    def count(self, path: str, status: int, time_s: float) -> None:
        """Counts a request."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(time_s)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(self._registry)


_NICENESS = 10
"""Traces give way to the server's answers."""

_LACKS_MEMORY = re.compile("needs more memory|memory limit|allocate memory|bad_?alloc")


class BusyError(FailureError):
    """More questions wait than are allowed; ask again later.

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
        num_children: Number of calls at once; further ones wait, and the ``Lane`` of whoever calls bounds these.
        preload: Modules that its children have from their start.
    """

    def __init__(
        self,
        limit_s: float = 60.0,
        *,
        num_children: int = 2,
        preload: Sequence[str] = TRACED_MODULES,
    ) -> None:
        self._limit_s = limit_s
        self._free: queue.LifoQueue[Worker] = queue.LifoQueue()
        memory_bytes = functools.partial(trace_memory_bytes, num_children)
        self._workers = [
            Worker(memory_limit_bytes=memory_bytes, preload=preload, may_fork=False, niceness=_NICENESS)
            for _ in range(num_children)
        ]
        for worker in reversed(self._workers):
            self._free.put(worker)

    def call(self, work: Callable[..., Any], *arguments: Any, what: str = "the model") -> Any:
        """The result of ``work(*arguments)``; ``what`` it is about is named in refusals.

        Raises:
            UsageError, FailureError: The work raised one of them, or took too long.
        """
        worker = self._free.get()
        try:
            return worker.call(work, *arguments, what=what, timeout_s=self._limit_s)
        except IsolationError as error:
            # The user can ask for less; that the process ended is the server's affair.
            if "took longer" in str(error):
                raise UsageError(
                    f"{what} took longer than {self._limit_s:g} s, which is not answered over HTTP; "
                    "use the command line"
                ) from None
            if _LACKS_MEMORY.search(str(error)):
                raise FailureError(
                    "the server has too little free memory to trace this model; ask later, for a smaller model, or use "
                    "the command line"
                ) from None
            if "the process" in str(error):
                raise FailureError(
                    "the process that traces models ended; ask again, or use the command line"
                ) from None
            raise FailureError(str(error).removeprefix(f"{what}: ")) from None
        except ForerunError as error:
            known = UsageError if isinstance(error, UsageError) else FailureError
            raise known(str(error)) from None
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the children."""
        for worker in self._workers:
            worker.close()
