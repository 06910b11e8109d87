"""Traces Keras models in a separate process, whose Keras runs on PyTorch; the user's processes are not touched.

Keras fixes its backend at import, so a model that the user built on TensorFlow cannot be traced in its process: its
configuration is built again in the child. TensorFlow is not loaded there.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, IsolationError, MissingExtraError, ModelBuildError
from forerun.base.isolation import Worker
from forerun.base.kept import temporary_folder
from forerun.graph.graph import Graph
from forerun.question.setup import TrainingSetup
from forerun.tracing.source import Question, Source

if TYPE_CHECKING:
    from forerun.question.model import ModelRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class KerasRequest:
    """One trace of a Keras model.

    Attributes:
        model: The model as the user named it, and its inputs.
        setup: The training setup.
        config: ``keras.Model.to_json`` of a model object, None for a named model or a file.
        builder: Function that makes the model in place of the name, as ``module:function``.
        arguments: Keyword arguments of the builder, plain values.
        is_layer: True for a layer alone: a gradient of its output takes the place of a loss, and its input gets a
            gradient.
    """

    model: ModelRequest
    setup: TrainingSetup
    config: str | None = None
    builder: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    is_layer: bool = False


_NOT_NEEDED = ("IPython", "matplotlib", "pandas", "sklearn")
"""Packages that Keras imports for plots and wrappers if they are installed, a quarter of its start."""


def trace_request(request: KerasRequest, said: Path) -> Graph:
    """The graph of a request.

    Args:
        request: The model and its setup.
        said: File that receives what the user's file and Keras print.
    """
    output = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    if "keras" not in sys.modules:
        with _hidden(_NOT_NEEDED):
            importlib.import_module("keras")
        gc.freeze()  # imported objects live on: collections need not look at them again and again
    sys.modules["keras"].utils.clear_session()  # layers are numbered from 1 in every model
    from forerun.adapters.keras.build import build_keras
    from forerun.adapters.keras.step import trace_built_keras

    return trace_built_keras(build_keras(request, request.setup), request.setup)


@contextlib.contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    """Hides installed packages for a while; afterwards the user's file may import them."""
    hidden = [name for name in names if name not in sys.modules and util.find_spec(name) is not None]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None is how the import system marks it
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


_TIMEOUT_S = 1800.0


def _trace(questions: Sequence[Question]) -> list[Graph | ForerunError]:
    return trace_keras_requests([keras_request(*question) for question in questions])


SOURCE = Source(trace=_trace, library="keras", is_trusted=False)


def keras_request(request: ModelRequest, setup: TrainingSetup, model: Any = None) -> KerasRequest:
    """The request for a model to the process that traces.

    Raises:
        ModelBuildError: The object has no configuration from which it could be built again.
    """
    return KerasRequest(
        model=replace(request, input_shape=request.input_shape or _built_shape(model)),
        setup=setup,
        config=None if model is None else _config_of(model),
    )


def trace_keras_requests(requests: Sequence[KerasRequest]) -> list[Graph | ForerunError]:
    """The graph of each request, or the error in its place; all are traced in one process, which stays.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    if util.find_spec("keras") is None:
        raise MissingExtraError(f"the Keras model {requests[0].model.model}", "keras")
    # One question at a time: the process has one output, which names the reason of its end.
    with _lock, temporary_folder() as folder:
        said = Path(folder) / "said"
        return [_graph_or_error(_worker(os.getpid()), request, said) for request in requests]


_lock = threading.Lock()


@functools.cache
def _worker(asking_pid: int) -> Worker:
    """The process that traces for a process; it stays for the next question, because Keras takes seconds to load."""
    # Without a GPU: fake tensors need none, and a context would take its memory from the user.
    return Worker(environment={"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""})


def _graph_or_error(worker: Worker, request: KerasRequest, said: Path) -> Graph | ForerunError:
    name = request.model.model
    try:
        graph: Graph = worker.call(trace_request, request, said, what=f"tracing {name}", timeout_s=_TIMEOUT_S)
    except IsolationError as error:
        text = said.read_text(encoding="utf-8", errors="replace") if said.exists() else ""
        words = text.strip().splitlines()
        return ModelBuildError(
            f"the process that builds {name} with Keras {metadata.version('keras')} ended: "
            f"{(words or [str(error)])[-1]}"
        )
    except ForerunError as error:
        return error
    return graph


def _config_of(model: Any) -> str:
    try:
        text: str = model.to_json()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelBuildError(
            f"{type(model).__name__} has no configuration from which it could be built again "
            f"({str(error).splitlines()[0]}); give its classes get_config(), or name the function that makes it as "
            "path/to/file.py:factory"
        ) from error
    return text


def _built_shape(model: Any) -> tuple[int, ...] | None:
    """Shape of a sample for which an object was built, if its configuration lacks the shape."""
    shape = getattr(model, "_build_shapes_dict", None) or {}
    first = next(iter(shape.values()), None)
    axes = tuple(first[1:]) if isinstance(first, (tuple, list)) else ()
    return axes if axes and all(isinstance(n, int) for n in axes) else None
