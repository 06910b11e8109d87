"""Processes of a command and its descendants: their memory and CPU time, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from forerun.profiling.hooks.settings import STARTUP_VARIABLE

__all__ = ["TreeSample", "TreeWatch", "end_tree", "started_by"]

_GRACE_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSample:
    """One sample of a tree of processes.

    Attributes:
        time_s: Time of the sample, monotonic clock [s].
        memory_bytes: Memory of all processes, with shared memory counted once [bytes].
        cpu_s: CPU time of all processes so far, ended ones included [s].
        num_processes: Number of living processes.
    """

    time_s: float
    memory_bytes: int
    cpu_s: float
    num_processes: int


@dataclass(slots=True)
class TreeWatch:
    """Samples a process and its descendants; keeps the CPU time of ended ones.

    Attributes:
        pid: Process at the root of the tree.
    """

    pid: int
    _cpu_s: dict[int, float] = field(default_factory=dict)

    def sample(self) -> TreeSample:
        """Samples all processes of the tree now."""
        processes = _tree(self.pid)
        memory_bytes = 0
        for process in processes:
            with contextlib.suppress(psutil.Error, OSError):
                times = process.cpu_times()
                self._cpu_s[process.pid] = times.user + times.system
                memory_bytes += _memory_bytes(process)
        return TreeSample(
            time_s=time.monotonic(),
            memory_bytes=memory_bytes,
            cpu_s=sum(self._cpu_s.values()),
            num_processes=len(processes),
        )


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _memory_bytes(process: psutil.Process) -> int:
    """Proportional set size; resident size if the system does not report it."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii")
    except OSError:
        return int(process.memory_info().rss)
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def started_by(settings_file: Path) -> list[psutil.Process]:
    """All processes that inherited the settings of a run, daemons that left the tree included."""
    mark = f"{STARTUP_VARIABLE}={settings_file}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and mark in _environment(process.pid):
                found.append(process)
    return found


def _environment(pid: int) -> list[bytes]:
    return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def end_tree(pid: int, settings_file: Path, *, first: signal.Signals = signal.SIGTERM) -> int:
    """Ends a command and all processes it started: a signal, some seconds, then SIGKILL; returns the number killed."""
    processes = {process.pid: process for process in (*_tree(pid), *started_by(settings_file))}
    for process in processes.values():
        with contextlib.suppress(psutil.Error):
            process.send_signal(first)
    _, alive = psutil.wait_procs(list(processes.values()), timeout=_GRACE_S)
    # Processes that started in the meantime, or ignored the signal.
    rest = {process.pid: process for process in (*alive, *started_by(settings_file))}
    for process in rest.values():
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(list(rest.values()), timeout=_GRACE_S)
    return len(rest)
