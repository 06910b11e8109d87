"""Parts that the core finds without importing them: entry points of forerun itself, and of other packages.

==========================  ============================================================================
``forerun.sources``         a prefix of model names (``onnx:FILE``) to the source that reads it
``forerun.models``          ``command``: the words after ``--`` to the name of the model that they train
``forerun.verbs``           a command; ``schedule.live`` is a further question of the command ``schedule``
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

from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from typing import Any

from forerun.base.errors import UsageError

__all__ = ["plugin", "plugin_names"]


def plugin(group: str, name: str) -> Any:
    """The object that an entry point names; None if no installed package has it.

    Forerun's own entry points are read first: a name that one of them has needs no look at every installed package.

    Args:
        group: Group of entry points, such as ``forerun.sources``.
        name: Name inside the group.

    Raises:
        UsageError: The entry point cannot be loaded.
    """
    found = _own(group).get(name) or _all(group).get(name)
    if found is None:
        return None
    try:
        return found.load()
    except ModuleNotFoundError as error:
        if error.name is None or not found.module.startswith(error.name):
            raise  # a library that the part needs: the caller names its extra
        raise UsageError(
            f"expected the part of forerun that has '{name}' ({found.module}), but this installation lacks it; "
            "install forerun anew"
        ) from None
    except AttributeError as error:
        raise UsageError(
            f"expected the entry point {name!r} of {group!r} to name an object, but {found.value} does not "
            f"exist ({error}); update or remove the package that declares it"
        ) from None


def plugin_names(group: str) -> list[str]:
    """Names of a group: forerun's own in their order, then those of other packages."""
    return list({**_own(group), **_all(group)})


@cache
def _own(group: str) -> dict[str, EntryPoint]:
    try:
        mine = distribution("forerun").entry_points
    except PackageNotFoundError:  # sources that are only on the path
        return {}
    return {point.name: point for point in mine if point.group == group}


@cache
def _all(group: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=group)}
