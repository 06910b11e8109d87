"""Options that a process sets for itself in the kernel, and the loading of libraries inside a fork server.

A server that loads libraries looks at no pipe, and would outlive a killed command by the seconds of a framework's
import. So the kernel ends it with the thread that waits for it, on Linux, until the libraries are loaded. After that
the server ends with the last process that uses it, at once, and that thread may end before. Other systems have no such
requests (``prctl``).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
from collections.abc import Iterable
from enum import IntEnum


class ProcessOption(IntEnum):
    """Options of ``prctl(2)``."""

    PARENT_DEATH_SIGNAL = 1
    """Signal that the process gets when the thread that started it ends; 0 for none."""
    CHILD_SUBREAPER = 36
    """1 if orphans among its descendants become its children."""


def set_process_option(option: ProcessOption, value: int) -> None:
    """Sets an option of this process, where the kernel knows it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option.value, value)


MODULE = __name__
"""Module for ``set_forkserver_preload``."""
_MODULES, _PARENT = "FORERUN_PRELOADED_MODULES", "FORERUN_PRELOADING_FOR"


def preload_variables(modules: Iterable[str]) -> dict[str, str]:
    """Environment in which a fork server starts that shall load some modules."""
    return {_MODULES: ",".join(modules), _PARENT: str(os.getpid())}


def _load(modules: Iterable[str], parent_pid: int) -> None:
    set_process_option(ProcessOption.PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    gc.disable()  # what is loaded stays: looking for garbage in it takes a sixth of the time
    for name in modules:
        with contextlib.suppress(ImportError):  # the work says what it needs
            importlib.import_module(name)
    gc.freeze()
    gc.enable()
    set_process_option(ProcessOption.PARENT_DEATH_SIGNAL, 0)
    # Taking a framework apart at the end costs a second of a processor, in which the server outlives its command.
    atexit.register(os._exit, 0)


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to end this process when its parent dies, even by SIGKILL; on Linux alone.

    A process whose parent died before this call ends at once.

    Args:
        parent_pid: Process that must be the parent; in a child of a child the kernel is not asked.
    """
    if sys.platform != "linux":
        return
    if os.getppid() == parent_pid:
        set_process_option(ProcessOption.PARENT_DEATH_SIGNAL, signal.SIGKILL)
    try:
        os.kill(parent_pid, 0)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except PermissionError:  # it lives, and belongs to another user
        pass


if _wanted := os.environ.pop(_MODULES, ""):
    _load(_wanted.split(","), int(os.environ.pop(_PARENT)))
