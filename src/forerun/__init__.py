"""Know what a training run will take before you run it.

    >>> import forerun
    >>> estimate = forerun.predict("torchvision:resnet50", device="a100-sxm4-40gb", batch_size=64)
    >>> estimate.step_time_s.low <= estimate.step_time_s.value <= estimate.step_time_s.high
    True

Names are loaded on first use, so that the import itself needs no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api import Evaluation, Sweep, evaluate, predict, sweep
    from forerun.errors import FailureError, ForerunError, UsageError
    from forerun.hardware import Device, Host, describe_host, find_device, load_catalog
    from forerun.prediction.estimate import Estimate, Interval

__all__ = [
    "Device",
    "Estimate",
    "Evaluation",
    "FailureError",
    "ForerunError",
    "Host",
    "Interval",
    "Sweep",
    "UsageError",
    "__version__",
    "describe_host",
    "evaluate",
    "find_device",
    "load_catalog",
    "predict",
    "sweep",
]

__version__ = "0.1.0"

_MODULES = {
    "Device": "forerun.hardware",
    "Estimate": "forerun.prediction.estimate",
    "Evaluation": "forerun.api",
    "FailureError": "forerun.errors",
    "ForerunError": "forerun.errors",
    "Host": "forerun.hardware",
    "Interval": "forerun.prediction.estimate",
    "Sweep": "forerun.api",
    "UsageError": "forerun.errors",
    "describe_host": "forerun.hardware",
    "evaluate": "forerun.api",
    "find_device": "forerun.hardware",
    "load_catalog": "forerun.hardware",
    "predict": "forerun.api",
    "sweep": "forerun.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
