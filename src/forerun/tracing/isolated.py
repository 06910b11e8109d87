"""The process in which models are built and traced, and its limits."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError
from forerun.tracing.source import named_source

if TYPE_CHECKING:
    from forerun.base.isolation import Worker

__all__ = [
    "TRACED_MODULES",
    "TraceLimits",
    "is_isolated",
    "run_isolated",
    "trace_limits",
    "trace_memory_bytes",
]

TRACED_MODULES = ("forerun.tracing.models.sources", "forerun.tracing.step")
"""Modules that a fork server loads for processes that trace."""

_SHARE_OF_MEMORY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceLimits:
    """Limits of building and tracing a model.

    Attributes:
        timeout_s: Longest time of one model [s].
        in_process: True builds models in this process, without limits.
    """

    timeout_s: float = 120.0
    in_process: bool = False


_limits: ContextVar[TraceLimits] = ContextVar("forerun_trace_limits", default=TraceLimits())  # noqa: B039 - frozen
_worker: Worker | None = None
_lock = threading.Lock()
"""One question at a time uses the process."""


@contextlib.contextmanager
def trace_limits(*, timeout_s: float | None = None, in_process: bool = False) -> Iterator[None]:
    """Sets the limits of building and tracing models inside the context.

    Args:
        timeout_s: Longest time of one model [s]; None for 120 s.
        in_process: True builds models in this process, where nothing limits them.

    Raises:
        InvalidSetupError: The time is not positive.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise InvalidSetupError(f"the time limit of tracing must be above 0 s, got {timeout_s:g}; give 120")
    chosen = TraceLimits(in_process=in_process) if timeout_s is None else TraceLimits(
        timeout_s=timeout_s, in_process=in_process
    )  # fmt: skip
    token = _limits.set(chosen)
    try:
        yield
    finally:
        _limits.reset(token)


def is_isolated(model: str) -> bool:
    """True if a named model is built in a process of its own.

    Files of the user always are; models of libraries where this process has not loaded the framework anyway.
    """
    from forerun.base.isolation import in_worker  # children are not needed for a kept graph

    if in_worker() or _limits.get().in_process:
        return False
    source = named_source(model)
    is_strange = source is not None and not source.is_trusted
    return is_strange or ".py:" in model or "torch" not in sys.modules


def run_isolated(work: Callable[..., Any], *arguments: Any, what: str) -> Any:
    """The result of a function of a module, made in the process for models.

    Raises:
        ForerunError: The work raised it.
        IsolationError: The process ended, or a limit was reached.
    """
    global _worker
    from forerun.base.isolation import Worker

    with _lock:
        if _worker is None:
            _worker = Worker(memory_limit_bytes=trace_memory_bytes(), preload=TRACED_MODULES)
        return _worker.call(work, *arguments, what=what, timeout_s=_limits.get().timeout_s)


def trace_memory_bytes() -> float:
    """Memory that building a model may take: most of what is free on this machine now [bytes]."""
    import psutil

    from forerun.question.devices.here import container_limits

    free = float(psutil.virtual_memory().available)
    limit = container_limits().memory_bytes
    return _SHARE_OF_MEMORY * min(free, free if limit is None else float(limit))
