"""Parts that are looked for where they are used: optional packages, by the extra that installs them, and entry points.

Entry points are those of forerun itself, and of other packages:

==========================  ============================================================================
``forerun.sources``         a prefix of model names (``onnx:FILE``) to the source that reads it
``forerun.models``          ``command``: the words after ``--`` to the name of the model that they train
``forerun.verbs``           a command; ``schedule.live`` is a further question of the command ``schedule``
``forerun.questions``       a question of a satellite that is asked over HTTP and by agents too, by its name in Python
``forerun.formats``         a format of a job that a plan or a report is written in
``forerun.policies``        a policy of the scheduler
``forerun.forecasters``     a forecaster of learning curves
``forerun.targets``         the function that turns the target of a plan into epochs of its candidates
``forerun.clusters``        a kind of running cluster
``forerun.laws``            a law of the time of kernels
``forerun.regressors``      a kind of model that ``fit`` makes
``forerun.baselines``       predictors that stand beside ours in an evaluation
``forerun.record_formats``  a format of files with measurements
``forerun.frameworks``      a framework beside PyTorch whose steps are measured
==========================  ============================================================================
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from forerun.base.errors import MissingExtraError, UsageError

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
    "prometheus_client": "web",
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


def loaded(place: Any) -> Any:
    """The object at ``module:name``, or ``module:name [extra]`` as an entry point may say it; no text is the object."""
    if not isinstance(place, str):
        return place
    module, _, attributes = place.partition("[")[0].partition(":")
    found: Any = import_module(module.strip())
    for name in filter(None, attributes.strip().split(".")):
        found = getattr(found, name)
    return found


class EntryPoint(NamedTuple):
    """A name in a group and the object that it stands for, ``module:name``."""

    name: str
    value: str
    group: str


def plugin(group: str, name: str) -> Any:
    """The object that an entry point names; None if no installed package has it.

    Args:
        group: Group of entry points, such as ``forerun.sources``.
        name: Name inside the group.

    Raises:
        UsageError: The entry point cannot be loaded.
    """
    found = _points(group).get(name)
    if found is None:
        return None
    module = found.value.partition(":")[0].strip()
    try:
        return loaded(found.value)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # a library that the part needs: the caller names its extra
        raise UsageError(
            f"expected the part of forerun that has '{name}' ({module}), but this installation lacks it; "
            "install forerun anew"
        ) from None
    except AttributeError as error:
        raise UsageError(
            f"expected the entry point {name!r} of {group!r} to name an object, but {found.value} does not "
            f"exist ({error}); update or remove the package that declares it"
        ) from None


def plugin_names(group: str) -> list[str]:
    """Names of a group: forerun's own in their order, then those of other packages."""
    return list(_points(group))


@cache
def _points(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name; a name that forerun has is its own."""
    found: dict[str, EntryPoint] = {}
    for _, point in sorted(_kept(), key=lambda kept: kept[0] != "forerun"):
        if point.group == group:
            found.setdefault(point.name, point)
    return found


@cache
def _kept() -> tuple[tuple[str, EntryPoint], ...]:
    """The entry points of all groups of ours with the packages that declare them, kept between commands.

    The library that reads them takes longer to load than a cached prediction to make. What is kept is that of the same
    folders of packages, each with the times of its files of entry points.
    """
    from forerun.base.kept import cache_folder, write_whole

    key = hashlib.sha256(repr(_sources()).encode()).hexdigest()[:16]
    path = cache_folder() / "plugins" / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):
        return tuple((owner, EntryPoint(*point)) for owner, *point in json.loads(path.read_text("utf-8")))
    found = list(dict.fromkeys(_read()))
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps([[owner, *point] for owner, point in found]).encode())
    return tuple(found)


def _sources() -> list[tuple[str, int]]:
    """The files of entry points on the path, with their times [ns]."""
    found = []
    for folder in sys.path:
        with suppress(OSError), os.scandir(folder or ".") as entries:
            for entry in entries:
                if entry.name.endswith((".dist-info", ".egg-info")):
                    file = f"{entry.path}/entry_points.txt"
                    with suppress(OSError):
                        found.append((file, Path(file).stat().st_mtime_ns))
    return sorted(found)


def _read() -> Iterator[tuple[str, EntryPoint]]:
    """Entry points of our groups with the names of their packages; of two installations, those of the first."""
    from importlib.metadata import distributions

    # Reversed, so that the first on the path stays, as for an import.
    for name, package in {one.name: one for one in reversed([*distributions()])}.items():
        for point in package.entry_points:
            if point.group.startswith("forerun."):
                yield name, EntryPoint(point.name, point.value, point.group)
