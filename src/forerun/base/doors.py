"""Doors of packages: public names that load on first use, so that the import itself needs no framework.

Which names there are, and where each is defined, stands once: in the ``__init__.pyi`` beside, which type checkers read.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def door(package: str, file: str) -> tuple[list[str], Callable[[str], object]]:
    """The public names of a package, and the function that loads one: its ``__all__`` and its ``__getattr__``.

    Args:
        package: Name of the package.
        file: Its ``__init__.py``.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [part for part in stub.body if isinstance(part, ast.ImportFrom)]
    modules = {name.name: str(part.module) for part in imports for name in part.names}

    def load(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        return getattr(import_module(modules[name]), name)

    return sorted(modules), load
