"""Folders of forerun: the cache, and temporary ones that name their owner, so that those of a killed process go."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
from pathlib import Path

_NAME = re.compile(r"forerun-of-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-.*")
_CLOCK_ERROR_S = 2.0


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes with its context, or at the next start of a command if this process is killed."""
    return tempfile.TemporaryDirectory(
        prefix=f"forerun-of-{_machine()}-{os.getpid()}-", ignore_cleanup_errors=True
    )


def remove_leftovers() -> int:
    """Removes folders of this user whose processes have ended; returns their number."""
    machine, number = _machine(), 0
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            found = _NAME.fullmatch(entry.name)
            if found is None or found["machine"] != machine:
                continue
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False) and _is_left(int(found["pid"]), Path(entry.path)):
                    shutil.rmtree(entry.path, ignore_errors=True)
                    number += 1
    return number


def _machine() -> str:
    """A name for the numbers of processes: containers and machines that share a folder have numbers of their own."""
    space = ""
    with contextlib.suppress(OSError):
        space = str(Path("/proc/self/ns/pid").readlink())
    return hashlib.sha256(f"{platform.node()} {space}".encode()).hexdigest()[:8]


def _is_left(pid: int, folder: Path) -> bool:
    import psutil

    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    try:
        # A later process may have the number of the owner.
        return bool(psutil.Process(pid).create_time() > status.st_ctime + _CLOCK_ERROR_S)
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def cache_folder() -> Path:
    """Folder of traced graphs and configurations: ``FORERUN_CACHE`` or the user's cache folder."""
    chosen = os.environ.get("FORERUN_CACHE")
    if chosen:
        return Path(chosen)
    import platformdirs

    return Path(platformdirs.user_cache_dir("forerun"))
