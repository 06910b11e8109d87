"""Every exception a user can meet, in one small tree.

    ForerunError
    ├── UsageError                 the question cannot be asked like this      (exit status 2)
    │   ├── UnknownModelError
    │   ├── UnknownDeviceError
    │   ├── InvalidSetupError      batch size, precision, shapes, optimizer ...
    │   └── MissingExtraError      an optional dependency is not installed
    └── FailureError               the question is fine, answering it failed   (exit status 1)
        ├── ModelBuildError        the model's own code raised, or it is no model
        ├── TraceError             the training step cannot be recorded
        ├── IsolationError         the process of the model's own code ended, hung or took too much memory
        ├── CatalogError           a hardware file is not usable
        ├── CostModelError         fitted weights are missing, damaged or too old
        ├── RecordError            a table of measurements, or a store of them, is not usable
        ├── ForecastError          a curve from which nothing can be forecast
        ├── ScriptError            a user's script failed, or did nothing that can be measured
        └── MeasurementError       a real run could not be made
            └── DeviceBusyError    another process measures on the device

    StoreWarning                   damaged records, a server that is away, a file of another library; the work goes on

A message names the expectation, the value given, and the next step.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ForerunError(Exception):
    """Base of all errors raised on purpose."""

    exit_status = 1


class UsageError(ForerunError):
    """The request itself must be changed."""

    exit_status = 2


class UnknownModelError(UsageError):
    """No model of this name; the message lists near matches."""


class UnknownDeviceError(UsageError):
    """No device of this name in the catalogue; the message lists near matches."""


class InvalidSetupError(UsageError):
    """A number, shape or choice of the training setup is impossible."""


class MissingExtraError(UsageError):
    """An optional dependency is needed and absent."""

    def __init__(self, needed_for: str, extra: str) -> None:
        without_gpu = (
            ", or on a machine without a GPU, smaller: pip install torch --index-url https://download.pytorch.org/whl/cpu"
            if extra == "torch"
            else ""
        )
        super().__init__(
            f"{needed_for} needs the optional extra '{extra}', which is not installed; "
            f"install it with: pip install 'forerun[{extra}]'{without_gpu}"
        )


class FailureError(ForerunError):
    """The request is well formed and could not be answered."""


class ModelBuildError(FailureError):
    """The model could not be built from what was given."""


class TraceError(FailureError):
    """The training step of the model could not be recorded."""


class IsolationError(FailureError):
    """The process that runs a model's own code ended without an answer, took too long or needed too much memory."""


class CatalogError(FailureError):
    """A hardware description is incomplete, contradictory or unreadable."""


class CostModelError(FailureError):
    """The fitted cost model is missing, damaged, or older than the code that reads it."""


class RecordError(FailureError):
    """A table of measurements has missing columns, mixed units or impossible values."""


class ForecastError(FailureError):
    """The curve has too few points, diverged, does not move, or will change for an unknown reason."""


class ScriptError(FailureError):
    """A user's script could not be started, failed, or made no training step."""


class MeasurementError(FailureError):
    """A real run could not be made: the device, the dataset, the folder or the child process failed."""


class DeviceBusyError(MeasurementError):
    """Another process holds the device's lock."""


class StoreWarning(UserWarning):
    """Something about kept data that its user must know: damage, a server that is away, a file of another library."""


def near_matches(word: str, known: Iterable[str], limit: int = 5, prefix: str = "") -> str:
    """The names nearest to ``word`` as the end of an error message, each after a prefix; empty if none is near."""
    found = difflib.get_close_matches(word.lower(), list(known), n=limit, cutoff=0.5)
    return f"; did you mean {', '.join(prefix + name for name in found)}?" if found else ""
