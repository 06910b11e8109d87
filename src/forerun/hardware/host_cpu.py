"""The processor of this machine: model, features, clock and cache, as the operating system reports them."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HostCpu", "describe_cpu"]

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
        num_allowed_cores=_num_allowed_cores(num_logical),
        clock_hz=_clock_hz(info),
        last_level_cache_bytes=_last_level_cache_bytes(Path("/sys/devices/system/cpu/cpu0/cache")),
    )


def _num_allowed_cores(num_logical: int) -> int:
    # Only Linux tells a process which cores it may run on.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_logical


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
