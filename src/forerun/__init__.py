"""Know what a training run will take before you run it.

    >>> import forerun
    >>> estimate = forerun.predict("torchvision:resnet50", device="a100-sxm4-40gb", batch_size=64)
    >>> estimate.step_time_s.low <= estimate.step_time_s.value <= estimate.step_time_s.high
    True

Names are loaded on first use, so that the import itself needs no framework. Which there are, and where each is defined,
stands once: in ``__init__.pyi``, which type checkers read.
"""

from __future__ import annotations

from forerun.base.doors import door

_names, _load = door(__name__, __file__)
__all__ = sorted([*_names, "__version__"])


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _names:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    from forerun.base.extras import needing

    with needing(f"forerun.{name}"):
        return _load(name)


def _version() -> str:
    """The version of the installed package, which its build took from the tag of git."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:  # sources that are only on the path
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
