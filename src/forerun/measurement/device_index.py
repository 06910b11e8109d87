"""Names of this process's devices: ``cpu``, ``cuda`` or ``cuda:N``."""

from __future__ import annotations

import os
import re

from forerun.errors import InvalidSetupError, UsageError

__all__ = ["check_device", "first_device", "gpu_index", "only_device"]


def gpu_index(device_index: str) -> int | None:
    """Number of a GPU among those this process sees; None for the processor; ``cuda`` is ``cuda:0``."""
    if device_index == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d+))?", device_index)
    if match is None:
        raise InvalidSetupError(f"expected device cpu or cuda:N, got '{device_index}'; give one of them")
    return int(match[1] or 0)


def first_device() -> str:
    """The first visible GPU of this machine, or its processor."""
    from forerun.hardware.host_gpus import visible_gpus

    return "cuda:0" if visible_gpus() else "cpu"


def check_device(device_index: str) -> str:
    """The device as ``cpu`` or ``cuda:N``, checked to exist on this machine.

    Raises:
        UsageError: The text is not a device, or this machine has no such GPU.
    """
    from forerun.hardware.host_gpus import visible_gpus

    index = gpu_index(device_index)
    if index is None:
        return "cpu"
    num_gpus = len(visible_gpus())
    if index >= num_gpus:
        raise UsageError(f"expected cpu or one of this machine's {num_gpus} GPUs, got '{device_index}'")
    return f"cuda:{index}"


def only_device(device_index: str) -> dict[str, str]:
    """Environment in which a script that takes the first GPU, or without a GPU the processor, takes this device.

    A script finds the first GPU anyhow; for that GPU nothing is hidden, so a script may use several.
    """
    index = gpu_index(device_index)
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    if index is None:
        return {"CUDA_VISIBLE_DEVICES": ""} if first_device() != "cpu" else {}
    if index == 0:
        return {}
    # Numbers count among those that this process sees.
    entries = known.split(",") if known else []
    return {"CUDA_VISIBLE_DEVICES": entries[index].strip() if index < len(entries) else str(index)}
