"""Work of the process that builds and traces Keras models."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.adapters.keras.request import KerasRequest
    from forerun.graph.graph import Graph

__all__ = ["trace_request"]


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
