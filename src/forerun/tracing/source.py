"""Sources of models: what stands before the colon of a model's name, and what reads the rest.

Sources of PyTorch's libraries are named here; others are entry points of the group ``forerun.sources`` (``onnx``,
``mlpredict`` and ``keras`` come with forerun). Another package adds one by an entry point that names a ``Source``.

Models are built and traced in a process of their own, which has limits.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, InvalidSetupError, UsageError
from forerun.base.extras import plugin, plugin_names

if TYPE_CHECKING:
    from forerun.base.isolation import Worker
    from forerun.graph.graph import Graph
    from forerun.question.model import ModelRequest
    from forerun.question.setup import TrainingSetup
    from forerun.tracing.models.built_model import BuiltModel, InputOptions

Question = tuple["ModelRequest", "TrainingSetup", Any]
"""A model, its setup, and an object in place of the model's name or None."""

_GROUP = "forerun.sources"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One kind of models; a declaration, which loads nothing before it is asked.

    Attributes:
        build: Makes a module with a batch and a loss from the name without its prefix; None for a source that traces.
        trace: Traces models itself, all in one go: a graph for each question, or the error in its place.
        library: Package whose version decides what a name means; None without one.
        reads_file: True if the name is the path of a file, whose content is the model's definition.
        like: Its names for what people call otherwise, such as a repository of the hub.
        is_trusted: False if a file or code of somebody else is read, so that it is built in a process of its own.
    """

    build: Callable[[str, InputOptions], BuiltModel] | None = None
    trace: Callable[[Sequence[Question]], list[Graph | ForerunError]] | None = None
    library: str | None = None
    reads_file: bool = False
    is_trusted: bool = True
    like: Callable[[str], Sequence[str]] = lambda name: ()


def later(module: str, name: str) -> Callable[[str, InputOptions], BuiltModel]:
    """A function of a module that loads a framework, imported when it is called."""

    def build(rest: str, options: InputOptions) -> BuiltModel:
        built: BuiltModel = getattr(import_module(module), name)(rest, options)
        return built

    return build


_MODELS = "forerun.tracing.models"

_OF_PYTORCH = {
    "torchvision": Source(
        build=later(f"{_MODELS}.vision_models", "build_torchvision"), library="torchvision"
    ),
    "timm": Source(build=later(f"{_MODELS}.vision_models", "build_timm"), library="timm"),
    "hf": Source(
        build=later(f"{_MODELS}.transformers_models", "build_transformers"),
        library="transformers",
        reads_file=True,
        is_trusted=False,
    ),
}


def find_source(prefix: str) -> Source | None:
    """The source of a prefix; None if no installed package has it.

    Raises:
        UsageError: An entry point of the prefix is broken.
    """
    if prefix in _OF_PYTORCH:
        return _OF_PYTORCH[prefix]
    found = plugin(_GROUP, prefix)
    if found is not None and not isinstance(found, Source):
        raise UsageError(
            f"expected the entry point {prefix!r} of {_GROUP!r} to be a Source, got {type(found).__name__}; "
            "update or remove the package that declares it"
        )
    return found


def named_source(model: str) -> Source | None:
    """The source that a model's name begins with; None for a bare name, a path, or an unknown prefix."""
    prefix, colon, _ = model.partition(":")
    return find_source(prefix) if colon and prefix.isidentifier() else None


def source_names() -> list[str]:
    """All prefixes."""
    return [*_OF_PYTORCH, *plugin_names(_GROUP)]


TRACED_MODULES = ("forerun.tracing.models.sources", "forerun.tracing.step")
"""Modules that a fork server loads for processes that trace."""

_SHARE_OF_MEMORY = 0.9
_LEAST_BYTES = 1e9  # a language model of two layers takes 0.2 GB, the largest of the catalogue 0.9


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
    longest = TraceLimits().timeout_s if timeout_s is None else timeout_s
    token = _limits.set(TraceLimits(timeout_s=longest, in_process=in_process))
    try:
        yield
    finally:
        _limits.reset(token)


def trace_timeout_s() -> float:
    """Longest time of building and tracing one model, as ``trace_limits`` has set it [s]."""
    return _limits.get().timeout_s


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
            _worker = Worker(memory_limit_bytes=trace_memory_bytes, preload=TRACED_MODULES)
        return _worker.call(work, *arguments, what=what, timeout_s=_limits.get().timeout_s)


def trace_memory_bytes(num_children: int = 1) -> float:
    """Memory that building a model may take: most of what is free on this machine now, at least 1 GB [bytes].

    Below 1 GB no answer is sure; the system ends the process where it lacks so much.

    Args:
        num_children: Number of processes that share what is free.
    """
    import psutil

    from forerun.question.devices.here import container_limits

    free = float(psutil.virtual_memory().available)
    limit = container_limits().memory_bytes
    return max(
        _LEAST_BYTES, _SHARE_OF_MEMORY * min(free, free if limit is None else float(limit)) / num_children
    )
