"""Base classes of packages that may not be installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from forerun.errors import UsageError

__all__ = ["optuna_pruner_base"]


def optuna_pruner_base() -> type[Any]:
    """Optuna's ``BasePruner``.

    Raises:
        UsageError: Optuna is not installed.
    """
    try:
        base: type[Any] = import_module("optuna.pruners").BasePruner
    except ModuleNotFoundError as error:
        raise UsageError(
            "ForecastPruner expects Optuna, which was not found; install it with: pip install 'optuna>=5'"
        ) from error
    return base
