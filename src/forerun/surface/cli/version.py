"""``forerun --version --verbose``: the versions that a report of a fault needs."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from forerun import __version__

__all__ = ["version_lines"]

_LIBRARIES = (
    "numpy", "scipy", "pydantic", "typer", "rich", "torch", "torchvision", "timm", "transformers", "onnx", "keras",
    "tensorflow-cpu", "tensorflow", "scikit-learn", "pandas", "pyarrow", "sqlalchemy", "optuna", "matplotlib", "ray",
    "fastapi", "mcp",
)  # fmt: skip


def version_lines(*, verbose: bool) -> Iterator[str]:
    """The version, and with ``verbose`` those of Python, the system, the libraries and the GPUs."""
    yield f"forerun {__version__}"
    if not verbose:
        return
    from forerun.base.temporary import cache_folder
    from forerun.cost.time.weights import shipped_weights_path
    from forerun.question.devices.here import describe_host
    from forerun.tracing.shipped import shipped_models

    yield f"Python {platform.python_version()} at {sys.executable}"
    yield platform.platform()
    host = describe_host()
    yield f"{host.cpu.model}, {host.num_usable_cores:g} cores usable"
    for gpu in host.gpus:
        yield f"GPU {gpu.name}, driver {gpu.driver_version}"
    yield "libraries: " + ", ".join(_versions())
    yield f"cost model {shipped_weights_path().name}, graphs of {len(shipped_models())} models"
    yield f"traced graphs are kept in {cache_folder()}"


def _versions() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
