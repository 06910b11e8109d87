"""Traces Keras models in a process of their own, whose Keras runs on PyTorch; no process of the user's is touched.

Keras fixes its backend at import, so a model that the user built on TensorFlow cannot be traced where it is: its
configuration is built again in the child. TensorFlow is not loaded there.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forerun.errors import MissingExtraError, ModelBuildError, TraceError
from forerun.tracing.keras_request import KerasRequest, error_from
from forerun.workload.graph import Graph
from forerun.workload.graph_file import read_graph
from forerun.workload.setup import Layout, TrainingSetup

if TYPE_CHECKING:
    from forerun.tracing.trace import ModelRequest

__all__ = ["is_keras", "own_layout", "trace_keras"]

_TIMEOUT_S = 1800.0
_IMPORTS_KERAS = re.compile(r"^\s*(?:import|from)\s+(?:keras|tensorflow)\b", re.MULTILINE)
_IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+(?:torch|torchvision|timm)\b", re.MULTILINE)


def is_keras(model: Any) -> bool:
    """Whether a model is one of Keras; nothing is imported to find out.

    That is ``keras:...``, a ``.keras`` file, a Python file that imports Keras and not PyTorch, or an object of Keras.
    """
    if not isinstance(model, str):
        return any(base.__module__.partition(".")[0] in ("keras", "tf_keras") for base in type(model).__mro__)
    if model.startswith("keras:") or model.endswith(".keras"):
        return True
    if ".py:" not in model:
        return False
    try:
        source = Path(model.rpartition(":")[0]).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return bool(_IMPORTS_KERAS.search(source)) and not _IMPORTS_TORCH.search(source)


def own_layout(model: Any) -> Layout:
    """The layout a framework gives images unless told otherwise: channels last in Keras."""
    return Layout.NHWC if is_keras(model) else Layout.NCHW


def trace_keras(request: ModelRequest, setup: TrainingSetup, model: Any = None) -> Graph:
    """The graph of one step of a Keras model; arguments and errors as of ``trace.trace``.

    Raises:
        MissingExtraError: Keras is not installed.
    """
    if util.find_spec("keras") is None:
        raise MissingExtraError(f"the Keras model {request.model}", "keras")
    with tempfile.TemporaryDirectory(prefix="forerun-keras-") as folder:
        path = Path(folder) / "graph.npz"
        asked = KerasRequest(
            name=request.model,
            config=None if model is None else _config_of(model),
            setup=asdict(setup),
            image_size=request.image_size,
            input_shape=request.input_shape or _built_shape(model),
            sequence_length=request.sequence_length,
            num_classes=request.num_classes,
            graph_file=str(path),
        )
        _run_child(asked)
        graph = read_graph(path)
    if graph is None:
        raise TraceError(f"the process that traced {request.model} left no graph; run it again with --debug")
    return graph


def _config_of(model: Any) -> str:
    try:
        text: str = model.to_json()
    except (NotImplementedError, TypeError, ValueError) as error:
        raise ModelBuildError(
            f"{type(model).__name__} has no configuration it could be built from again "
            f"({str(error).splitlines()[0]}); give its classes get_config(), or name the function that makes it as "
            "path/to/file.py:factory"
        ) from error
    return text


def _built_shape(model: Any) -> tuple[int, ...] | None:
    """Shape of a sample that an object was built for, for those whose configuration does not tell it."""
    shape = getattr(model, "_build_shapes_dict", None) or {}
    first = next(iter(shape.values()), None)
    if (
        not isinstance(first, (tuple, list))
        or len(first) < 2
        or not all(isinstance(n, int) for n in first[1:])
    ):
        return None
    return tuple(first[1:])


def _run_child(asked: KerasRequest) -> None:
    environment = {**os.environ, "KERAS_BACKEND": "torch", "CUDA_VISIBLE_DEVICES": ""}
    package = str(Path(__file__).parents[2])
    known = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = package if not known else os.pathsep.join((package, known))
    command = [sys.executable, "-m", "forerun.tracing.keras_child"]
    try:
        done = subprocess.run(
            command,
            input=asked.as_json(),
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TraceError(f"tracing {asked.name} took more than {_TIMEOUT_S / 60:.0f} minutes") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise error_from(
            done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "",
            f"the process that builds {asked.name} with Keras {metadata.version('keras')} ended: {last[0]}",
        )
