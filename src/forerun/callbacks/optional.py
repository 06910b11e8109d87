"""Base classes of packages that may not be there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forerun.errors import MissingExtraError

__all__ = ["optuna_pruner_base"]


def optuna_pruner_base() -> type[Any]:
    """Optuna's ``BasePruner``.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    try:
        base: type[Any] = import_module("optuna.pruners").BasePruner
    except ModuleNotFoundError as error:
        raise MissingExtraError("ForecastPruner", "tune") from error
    return base
