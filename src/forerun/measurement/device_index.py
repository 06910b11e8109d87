"""Which device of this process is meant: ``cpu``, ``cuda`` or ``cuda:N``."""

from __future__ import annotations

import re

from forerun.errors import InvalidSetupError

__all__ = ["first_device", "gpu_index"]


def gpu_index(device_index: str) -> int | None:
    """Number of a GPU among those this process sees, None for the processor; ``cuda`` is ``cuda:0``."""
    if device_index == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d+))?", device_index)
    if match is None:
        raise InvalidSetupError(f"expected device cpu or cuda:N, got '{device_index}'; give one of them")
    return int(match[1] or 0)


def first_device() -> str:
    """The first visible GPU of this machine, or its processor."""
    from forerun.hardware.host_gpus import list_gpus, visible_gpus

    return "cuda:0" if visible_gpus(list_gpus()) else "cpu"
