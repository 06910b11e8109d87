"""The optional packages, by the extra that installs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from forerun.base.errors import MissingExtraError

__all__ = ["EXTRA_OF_PACKAGE", "extra_of", "installed_version", "needing", "require"]

EXTRA_OF_PACKAGE = {
    "torch": "torch",
    "torchvision": "torchvision",
    "timm": "timm",
    "transformers": "hf",
    "peft": "peft",
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
    """Version of a package, read without importing it; None where it is not installed."""
    from importlib import metadata  # loads a reader of e-mail, and a kept prediction asks for no version

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
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
