"""This machine: processor, memory, disk, GPUs, limits and software, without loading a framework."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from forerun.base.answers import Answer
from forerun.base.extras import installed_version

# Version 1 cannot express "no limit": the kernel shows the largest page-aligned number instead.
_UNLIMITED_BYTES = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLimits:
    """Limits of the control groups of this process; None without a limit.

    Attributes:
        num_cores: CPU time the group may use, in cores; 1.5 is possible.
        memory_bytes: Memory the group may use [bytes].
    """

    num_cores: float | None
    memory_bytes: int | None


def container_limits(
    membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")
) -> ContainerLimits:
    """The tightest limits between the group of this process and the root, for versions 1 and 2.

    Args:
        membership: File with the groups of the process, lines of ``id:controllers:path``.
        mount: Folder at which the control groups are mounted.
    """
    folders = list(_group_folders(membership, mount))
    cores = [cores for folder in folders if (cores := _limit_cores(folder)) is not None]
    memory = [size for folder in folders if (size := _limit_bytes(folder)) is not None]
    return ContainerLimits(num_cores=min(cores, default=None), memory_bytes=min(memory, default=None))


def _group_folders(membership: Path, mount: Path) -> Iterator[Path]:
    for line in _read_limit(membership).splitlines():
        parts = line.strip().split(":", 2)
        if len(parts) != 3:
            continue
        controllers, group = parts[1], Path(parts[2].lstrip("/"))
        hierarchies = (controllers, *controllers.split(",")) if controllers else ("", "unified")
        # A container sees its own group as the root of the mount: try every ancestor, any may be absent.
        for hierarchy in hierarchies:
            yield from (mount / hierarchy / ancestor for ancestor in (group, *group.parents))


def _limit_cores(folder: Path) -> float | None:
    """Quota over period: ``cpu.max`` holds both (version 2), or each has its file (version 1)."""
    words = _read_limit(folder / "cpu.max").split() or [
        _read_limit(folder / "cpu.cfs_quota_us").strip(),
        _read_limit(folder / "cpu.cfs_period_us").strip(),
    ]
    # Without a limit the quota is "max" or -1.
    if len(words) != 2 or not all(word.isdigit() and int(word) > 0 for word in words):
        return None
    return int(words[0]) / int(words[1])


def _limit_bytes(folder: Path) -> int | None:
    for file in ("memory.max", "memory.limit_in_bytes"):
        text = _read_limit(folder / file).strip()
        if text.isdigit() and 0 < int(text) < _UNLIMITED_BYTES:
            return int(text)
    return None


def _read_limit(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


# Features that decide how many operations a core finishes per clock.
_FEATURES = ("sse2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
_SIZE_UNITS_BYTES = {"": 1, "K": 1024, "M": 1024**2}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCpu:
    """One processor; a field is None if the operating system does not report it.

    Attributes:
        model: Name that the operating system reports.
        features: Vector extensions of the processor, as Linux spells them.
        num_physical_cores: Cores of the machine.
        num_logical_cores: Hardware threads of the machine.
        num_allowed_cores: Hardware threads this process may be scheduled on.
        clock_hz: Highest clock, or the current one if the highest is not known [Hz].
        last_level_cache_bytes: Largest cache that core 0 can use [bytes].
    """

    model: str
    features: tuple[str, ...]
    num_physical_cores: int
    num_logical_cores: int
    num_allowed_cores: int
    clock_hz: float | None
    last_level_cache_bytes: float | None


def describe_cpu() -> HostCpu:
    """The processor of this machine."""
    import psutil

    info = _first_cpu_info(Path("/proc/cpuinfo"))
    num_logical = psutil.cpu_count(logical=True) or os.cpu_count() or 1
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return HostCpu(
        model=info.get("model name") or platform.processor() or platform.machine() or "unknown",
        features=tuple(feature for feature in _FEATURES if feature in flags),
        num_physical_cores=psutil.cpu_count(logical=False) or num_logical,
        num_logical_cores=num_logical,
        # Only Linux tells a process which cores it may run on.
        num_allowed_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_logical,
        clock_hz=_clock_hz(info),
        last_level_cache_bytes=_last_level_cache_bytes(Path("/sys/devices/system/cpu/cpu0/cache")),
    )


def _first_cpu_info(path: Path) -> dict[str, str]:
    """The lines ``key : value`` of the first processor; empty if the system has no such file."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _clock_hz(info: dict[str, str]) -> float | None:
    import psutil

    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError, RuntimeError):
        # Virtual machines and some containers do not tell it.
        frequency = None
    if frequency is not None and (frequency.max or frequency.current):
        return float(frequency.max or frequency.current) * 1e6
    mhz = re.fullmatch(r"\d+(\.\d+)?", info.get("cpu MHz", ""))
    return float(mhz[0]) * 1e6 if mhz and float(mhz[0]) > 0 else None


def _last_level_cache_bytes(folder: Path) -> float | None:
    sizes: list[int] = []
    for file in folder.glob("index*/size"):
        try:
            found = re.fullmatch(r"(\d+)([KM]?)", file.read_text(encoding="utf-8").strip())
        except OSError:
            continue
        if found and int(found[1]) > 0:
            sizes.append(int(found[1]) * _SIZE_UNITS_BYTES[found[2]])
    return float(max(sizes)) if sizes else None


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
    # Virtual and old boards refuse single questions: each is asked alone, and its absence is None.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host(Answer):
    """One machine as this process sees it.

    Attributes:
        cpu: The processor.
        num_usable_cores: Hardware threads this process may use, after affinity and container quota.
        memory_total_bytes: Memory of the machine [bytes].
        memory_available_bytes: Memory a program could take now [bytes].
        memory_limit_bytes: Limit of the container, None without one [bytes].
        swap_total_bytes: Swap space [bytes].
        disk_free_bytes: Free space on the disk of the working directory [bytes].
        gpus: NVIDIA GPUs, empty without a driver.
        operating_system: Name and version, such as ``Linux-6.8.0-x86_64``.
        python_version: Version of Python, such as ``3.12.3``.
        torch_version: Version of PyTorch; None if it is not installed.
    """

    cpu: HostCpu
    num_usable_cores: float
    memory_total_bytes: int
    memory_available_bytes: int
    memory_limit_bytes: int | None
    swap_total_bytes: int
    disk_free_bytes: int
    gpus: tuple[HostGpu, ...]
    operating_system: str
    python_version: str
    torch_version: str | None

    @property
    def memory_usable_bytes(self) -> int:
        """Memory this process may use: the smaller of the machine's memory and the container's limit [bytes]."""
        return min(self.memory_total_bytes, self.memory_limit_bytes or self.memory_total_bytes)


def describe_host() -> Host:
    """Describe this machine as it is now."""
    import psutil

    cpu = describe_cpu()
    limits = container_limits()
    memory = psutil.virtual_memory()
    return Host(
        cpu=cpu,
        num_usable_cores=min(float(cpu.num_allowed_cores), limits.num_cores or float("inf")),
        memory_total_bytes=memory.total,
        memory_available_bytes=memory.available,
        memory_limit_bytes=limits.memory_bytes,
        swap_total_bytes=psutil.swap_memory().total,
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        gpus=list_gpus(),
        operating_system=platform.platform(terse=True),
        python_version=platform.python_version(),
        torch_version=installed_version("torch"),
    )
