"""Modules for every job with Keras, imported once by the fork server, which saves seconds per job.

TensorFlow starts its threads when it first computes, so this module must not compute: a child is forked from the
process that imported it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

from forerun.adapters.keras.runner import use_tensorflow

__all__: list[str] = []

KERAS_PRELOADED = (
    "tensorflow",
    "keras",
    "forerun.adapters.keras.layers",
    "forerun.adapters.keras.training",
)
"""The modules imported with this one, after the choice of the backend."""


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Sends the error stream to nowhere, because TensorFlow's native code prints past all of Python's settings."""
    kept = os.dup(2)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


use_tensorflow()
with _without_messages():
    for _name in KERAS_PRELOADED:
        importlib.import_module(_name)
