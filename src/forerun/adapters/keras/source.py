"""Traces Keras models in a separate process, whose Keras runs on PyTorch; the user's processes are not touched.

Keras fixes its backend at import, so a model that the user built on TensorFlow cannot be traced in its process: its
configuration is built again in the child. TensorFlow is not loaded there.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.adapters.keras.child import trace_request
from forerun.adapters.keras.request import KerasRequest
from forerun.base.errors import ForerunError, IsolationError, MissingExtraError, ModelBuildError
from forerun.base.isolation import Worker
from forerun.base.kept import temporary_folder
from forerun.graph.graph import Graph
from forerun.question.setup import TrainingSetup
from forerun.tracing.source import Question, Source

if TYPE_CHECKING:
    from forerun.question.model import ModelRequest

__all__ = ["SOURCE", "keras_request", "trace_keras_requests"]

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
        name=request.model,
        config=None if model is None else _config_of(model),
        setup=setup,
        image_size=request.image_size,
        input_shape=request.input_shape or _built_shape(model),
        sequence_length=request.sequence_length,
        num_classes=request.num_classes,
    )


def trace_keras_requests(requests: Sequence[KerasRequest]) -> list[Graph | ForerunError]:
    """The graph of each request, or the error in its place; all are traced in one process.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    if util.find_spec("keras") is None:
        raise MissingExtraError(f"the Keras model {requests[0].name}", "keras")
    worker = Worker(environment={"KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""})
    try:
        with temporary_folder() as folder:
            said = Path(folder) / "said"
            return [_graph_or_error(worker, request, said) for request in requests]
    finally:
        worker.close()


def _graph_or_error(worker: Worker, request: KerasRequest, said: Path) -> Graph | ForerunError:
    try:
        graph: Graph = worker.call(
            trace_request, request, said, what=f"tracing {request.name}", timeout_s=_TIMEOUT_S
        )
    except IsolationError as error:
        words = (
            said.read_text(encoding="utf-8", errors="replace").strip().splitlines() if said.exists() else []
        )
        return ModelBuildError(
            f"the process that builds {request.name} with Keras {metadata.version('keras')} ended: "
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
    if (
        not isinstance(first, (tuple, list))
        or len(first) < 2
        or not all(isinstance(n, int) for n in first[1:])
    ):
        return None
    return tuple(first[1:])
