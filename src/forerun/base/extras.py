"""The optional packages, by the extra that installs them."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from forerun.base.errors import MissingExtraError

EXTRA_OF_PACKAGE = {
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "hf",
    "peft": "peft",
    "diffusers": "diffusers",
    "onnx": "onnx",
    "keras": "keras",
    "tensorflow": "keras",
    "sklearn": "fit",
    "sqlalchemy": "records",
    "pyarrow": "records",
    "pandas": "records",
    "psycopg": "postgres",
    "optuna": "tune",
    "matplotlib": "plot",
    "jinja2": "report",
    "fastapi": "web",
    "uvicorn": "web",
    "ray": "ray",
    "tensorboard": "tensorboard",
    "mcp": "mcp",
    "PIL": "torchvision",
}
"""Extra of each package that is imported only where it is needed, by the name it is imported under."""


def installed_version(package: str) -> str | None:
    """Version of a package, read without importing it; None where it is not installed.

    It is read from the folder of the package's metadata: Python's own reader of these brings one of e-mail along, and
    takes longer to load than a kept prediction to make.
    """
    wanted = _plain_name(package)
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                found = _METADATA.fullmatch(entry.name)
                if found is not None and _plain_name(found[1]) == wanted:
                    return _version_in(Path(entry.path))
    return None


_METADATA = re.compile(r"(.+?)(?:-.*)?\.(?:dist|egg)-info")


def _plain_name(package: str) -> str:
    """The name that all spellings of a package share."""
    return re.sub(r"[-_.]+", "-", package).lower()


def _version_in(metadata: Path) -> str | None:
    for path in (metadata / "METADATA", metadata / "PKG-INFO", metadata):
        with suppress(OSError), path.open(encoding="utf-8") as file:
            return next((line[9:].strip() for line in file if line.startswith("Version: ")), None)
    return None


def extra_of(error: BaseException) -> str | None:
    """The extra that would install the module that was not found, None for another module."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    return EXTRA_OF_PACKAGE.get((error.name or "").partition(".")[0])


@contextmanager
def needing(what: str) -> Iterator[None]:
    """Names the extra to install where an import inside fails.

    Args:
        what: The thing asked for, as it begins the message: ``"a plot"``.

    Raises:
        MissingExtraError: A package of an extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = extra_of(error)
        if extra is None:
            raise
        raise MissingExtraError(what, extra) from error


def require(what: str, *packages: str) -> None:
    """Checks that packages are installed, without importing them.

    Raises:
        MissingExtraError: One is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(what, EXTRA_OF_PACKAGE[package])
