"""This machine: processor, memory, disk, GPUs and software, without loading a framework."""

from __future__ import annotations

import platform
import shutil
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from forerun.answers import Answer
from forerun.hardware.container import container_limits
from forerun.hardware.host_cpu import HostCpu, describe_cpu
from forerun.hardware.host_gpus import HostGpu, list_gpus

__all__ = ["Host", "describe_host"]


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
        torch_version=_installed_version("torch"),
    )


def _installed_version(package: str) -> str | None:
    """Version of a package, read from its metadata without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
