"""The NVIDIA GPUs of this machine, as the driver describes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

__all__ = ["HostGpu", "list_gpus", "visible_gpus"]

_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGpu:
    """One GPU; a field is None if the driver does not report it.

    Attributes:
        index: Number the driver gives the GPU.
        uuid: Identity of the GPU, which stays the same when GPUs are reordered.
        name: Name the driver gives the GPU, which ``find_device`` understands.
        memory_bytes: Total memory the driver reports [bytes]; error correction may take a part of it.
        memory_used_bytes: Memory in use now by all processes [bytes].
        driver_version: Version of the driver.
        cuda_version: Newest CUDA version the driver supports.
        power_limit_w: Enforced power limit [W].
        max_sm_clock_hz: Highest clock of the multiprocessors [Hz].
        max_memory_clock_hz: Highest clock of the memory [Hz].
        compute_capability: CUDA compute capability, such as ``8.6``.
    """

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_used_bytes: int
    driver_version: str | None
    cuda_version: str | None
    power_limit_w: float | None
    max_sm_clock_hz: float | None
    max_memory_clock_hz: float | None
    compute_capability: str | None


def list_gpus() -> tuple[HostGpu, ...]:
    """All NVIDIA GPUs the driver reports; empty without a driver or its Python binding."""
    try:
        import pynvml
    except ImportError:
        return ()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        # A driver that is being replaced answers the first calls and refuses later ones: count it as absent.
        return ()
    finally:
        pynvml.nvmlShutdown()


def _describe(nvml: ModuleType, index: int) -> HostGpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    cuda = _answer(nvml, nvml.nvmlSystemGetCudaDriverVersion)
    power_mw = _answer(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))
    sm_mhz = _answer(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
    memory_mhz = _answer(nvml, lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_MEM))
    capability = _answer(nvml, lambda: nvml.nvmlDeviceGetCudaComputeCapability(handle))
    return HostGpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        memory_bytes=int(memory.total),
        memory_used_bytes=int(memory.used),
        driver_version=None if (v := _answer(nvml, nvml.nvmlSystemGetDriverVersion)) is None else _text(v),
        cuda_version=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        power_limit_w=None if power_mw is None else power_mw / 1e3,
        max_sm_clock_hz=None if sm_mhz is None else sm_mhz * 1e6,
        max_memory_clock_hz=None if memory_mhz is None else memory_mhz * 1e6,
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
    )


def _answer(nvml: ModuleType, question: Callable[[], _Answer]) -> _Answer | None:
    """The driver's answer; None if the board does not support the question."""
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(
    gpus: Sequence[HostGpu] | None = None, visible_devices: str | None = None
) -> tuple[HostGpu, ...]:
    """GPUs that a CUDA program started now would see, in the order of that program.

    Args:
        gpus: All GPUs of the machine; None asks the driver.
        visible_devices: Value of ``CUDA_VISIBLE_DEVICES``; None reads the environment. Numbers are
            taken in the driver's order (``CUDA_DEVICE_ORDER=PCI_BUS_ID``). As in CUDA, the first unknown
            entry ends the list.
    """
    gpus = list_gpus() if gpus is None else gpus
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES") if visible_devices is None else visible_devices
    if chosen is None:
        return tuple(gpus)
    seen: list[HostGpu] = []
    for entry in chosen.split(","):
        found = [gpu for gpu in gpus if _is_entry(gpu, entry.strip())]
        if len(found) != 1:
            break
        seen += found
    return tuple(seen)


def _is_entry(gpu: HostGpu, entry: str) -> bool:
    return entry == str(gpu.index) or (entry.startswith("GPU-") and gpu.uuid.startswith(entry))
