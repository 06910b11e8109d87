"""Results that are kept for repeated questions, by the objects and the values of the question; and folders.

Temporary folders name their owner, so that those of a killed process go.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

from forerun.base.errors import FailureError

Result = TypeVar("Result")


@contextlib.contextmanager
def writes(path: str | Path, failure: type[FailureError]) -> Iterator[None]:
    """Says of a file that cannot be written in its block what was expected and what to do.

    Raises:
        FailureError: It cannot be written; ``failure`` says which error that is.
    """
    try:
        yield
    except OSError as error:
        raise failure(
            f"expected a file that can be written, '{path}' cannot be written: {error.strerror or error}; free "
            "some space or name another file"
        ) from error


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file as ``whole_file`` does.

    Raises:
        OSError: It cannot be written.
    """
    with whole_file(path) as partial:
        partial.write_bytes(content)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file to write, which takes the place of ``path`` at the end of the block.

    No reader finds it half written, and after an error, such as a full disk, the old one stays. Commands at the same
    time replace the whole, one by one.

    Raises:
        OSError: It cannot be replaced.
    """
    if path.exists() and not path.is_file():  # such as /dev/stdout
        yield path
        return
    path = path.resolve()  # what a link leads to is replaced, not the link
    partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


class KeptBytes(Generic[Result]):
    """A memory of results bounded by their size; the result that was asked for longest ago goes first.

    Args:
        most_bytes: Largest size of all results together [bytes]; a result above a quarter of it is not kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._results: OrderedDict[Hashable, tuple[Result, int]] = OrderedDict()
        self._lock = threading.Lock()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def find(self, key: Hashable) -> Result | None:
        """The result for a key, None if there is none."""
        with self._lock:
            if key not in self._results:
                return None
            self._results.move_to_end(key)
            return self._results[key][0]

    def keep(self, key: Hashable, result: Result, size_bytes: int) -> None:
        """Keeps a result of a given size."""
        # One large result would drive out all others.
        if size_bytes > self._most_bytes // 4:
            return
        with self._lock:
            _, before = self._results.pop(key, (None, 0))
            self._results[key] = (result, size_bytes)
            self.size_bytes += size_bytes - before
            while self.size_bytes > self._most_bytes:
                _, (_, size) = self._results.popitem(last=False)
                self.size_bytes -= size


class Kept(Generic[Result]):
    """A bounded memory of results.

    Traced models and cost models are distinguished by identity, because comparing their arrays would take longer than
    the computation.
    They are kept beside the result, so that no other object can get their identity.

    Args:
        most: Largest number of results; one more drops them all.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Result]] = {}

    def find(self, parts: tuple[object, ...], values: tuple[Hashable, ...]) -> Result | None:
        """The result for these objects and values, None if there is none."""
        found = self._results.get((*map(id, parts), *values))
        return None if found is None else found[1]

    def keep(self, parts: tuple[object, ...], values: tuple[Hashable, ...], result: Result) -> None:
        """Keeps a result."""
        if len(self._results) >= self._most:
            self._results.clear()
        # With the objects themselves, so that no other gets the id of one of them.
        self._results[(*map(id, parts), *values)] = (parts, result)

    def get(
        self, parts: tuple[object, ...], values: tuple[Hashable, ...], make: Callable[[], Result]
    ) -> Result:
        """The result for these objects and values, made if there is none."""
        found = self.find(parts, values)
        if found is None:
            found = make()
            self.keep(parts, values, found)
        return found


_NAME = re.compile(r"forerun-of-(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-.*")
_CLOCK_ERROR_S = 2.0
_OWNER_S = 3600.0


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
    status = folder.stat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return False
    # Numbers come again after days: of a young folder a process with its number is the owner.
    if time.time() - status.st_ctime < _OWNER_S and Path(f"/proc/{pid}").is_dir():
        return False
    import psutil

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
