"""Limits that a container or batch system sets for this process, read from Linux control groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ContainerLimits", "container_limits"]

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
    cores = [cores for folder in folders if (cores := _num_cores(folder)) is not None]
    memory = [size for folder in folders if (size := _memory_bytes(folder)) is not None]
    return ContainerLimits(num_cores=min(cores, default=None), memory_bytes=min(memory, default=None))


def _group_folders(membership: Path, mount: Path) -> Iterator[Path]:
    for line in _read(membership).splitlines():
        parts = line.strip().split(":", 2)
        if len(parts) != 3:
            continue
        # A container sees its own group as the root of the mount: try every ancestor, any may be absent.
        for hierarchy in _hierarchies(mount, parts[1]):
            group = Path(parts[2].lstrip("/"))
            yield from (hierarchy / ancestor for ancestor in (group, *group.parents))


def _hierarchies(mount: Path, controllers: str) -> tuple[Path, ...]:
    if not controllers:
        return (mount, mount / "unified")
    return (mount / controllers, *(mount / controller for controller in controllers.split(",")))


def _num_cores(folder: Path) -> float | None:
    """Quota over period: ``cpu.max`` holds both (version 2), or each has its file (version 1)."""
    words = _read(folder / "cpu.max").split() or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(words) != 2 or not all(word.isdigit() and int(word) > 0 for word in words):
        return None
    return int(words[0]) / int(words[1])


def _memory_bytes(folder: Path) -> int | None:
    for file in ("memory.max", "memory.limit_in_bytes"):
        text = _read(folder / file).strip()
        if text.isdigit() and 0 < int(text) < _UNLIMITED_BYTES:
            return int(text)
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
