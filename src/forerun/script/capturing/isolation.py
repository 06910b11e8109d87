"""Keeps a captured script from the network and from the user's files.

The script runs behind a copy-on-write view of all files where the system has it (``view``), else behind a guard that
refuses changes (``guard``). Behind the guard, files that the script opens to write, and folders that it makes, go to a
scratch folder that holds their paths a second time, and are read back from there. Every other change outside that
folder is refused: by an audit hook, which sees what Python's own functions do, and by the kernel (Landlock, Linux
5.13), which sees what C++ code and children do, except changes of permissions, owners, times and attributes. Without
Landlock children and SQLite are refused, and what other C++ code writes is not seen.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import functools
import io
import itertools
import multiprocessing.util
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from forerun.script.capturing.view import enter_view, why_no_view
from forerun.script.patching import tables
from forerun.script.profiling.messages import FileAccess

GUARDED_FILE = "guarded"
"""File of a run that says why its files were guarded; absent with a view."""


def isolate(request: Path, access: FileAccess) -> None:
    """Isolates the rest of this process, which must have one thread.

    Args:
        request: Folder of the run, in the scratch folder of all runs.
        access: Way in which files are kept.
    """
    reason = why_no_view(request.parent, request / "trial") if access == "view" else "it was not asked for"
    if not reason:
        enter_view(request.parent, request / "view")
        os.rename, os.replace = _across_layers(os.rename), _across_layers(os.replace)
    elif access != "unsafe":
        (request / GUARDED_FILE).write_text(reason, encoding="utf-8")
        guard_files(request)
    _close_network()


def _across_layers(rename: Callable[..., None]) -> Callable[..., None]:
    """A function that renames, and copies where an overlay cannot: to another one, and folders of the lower layer."""

    @functools.wraps(rename)
    def renamed(
        source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        try:
            rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
        except OSError as error:
            if error.errno != errno.EXDEV or (src_dir_fd, dst_dir_fd) != (None, None):
                raise
            _copy_over(Path(os.fsdecode(source)), Path(os.fsdecode(target)))

    return renamed


def _copy_over(source: Path, target: Path) -> None:
    if source.is_symlink() or not source.is_dir():
        target.unlink(missing_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
        source.unlink()
        return
    if target.is_dir():
        target.rmdir()
    shutil.copytree(source, target, symlinks=True)
    shutil.rmtree(source)


def _close_network() -> None:
    """Keeps Python from other machines; in a view the kernel does it too, in less clear words."""
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def is_near(host: Any) -> bool:
        return host in (None, "", "localhost", "::1", b"localhost") or str(host).startswith("127.")

    @functools.wraps(connect)
    def near_connect(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_near(address[0]):
            raise OSError(errno.ENETUNREACH, "the network is off while a script is captured")
        return connect(self, address)

    @functools.wraps(resolve)
    def near_resolve(host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_near(host):
            raise socket.gaierror(socket.EAI_AGAIN, "the network is off while a script is captured")
        return resolve(host, *args, **kwargs)

    socket.socket.connect = near_connect  # type: ignore[method-assign,assignment]
    socket.getaddrinfo = near_resolve


_WRITING = frozenset("wax+")
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_NAMES_A_LINK = ("os.remove", "os.rmdir", "os.mkdir", "os.symlink", "os.rename")
_CHILDREN = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn")

_open, _os_open, _mkdir, _stat, _readlink = io.open, os.open, os.mkdir, os.stat, os.readlink


def guard_files(request: Path) -> None:
    """Puts the guard in place for the rest of this process.

    Args:
        request: Folder of the run, in the scratch folder of all runs.
    """
    overlay = _Overlay(request)
    has_landlock = _restrict_writing((overlay.scratch, *_SYSTEM_FOLDERS))
    _cover_open(overlay)
    _cover_os(overlay)
    if not has_landlock:
        _refuse_spawning()
    sys.addaudithook(_auditor(overlay, has_landlock=has_landlock))


class _Overlay:
    """A folder that takes the files which the script writes elsewhere."""

    def __init__(self, request: Path) -> None:
        self.scratch = os.path.realpath(request.parent)  # with the script's temporary folder
        # pathlib is built on what is patched here
        self.files = os.path.join(os.path.realpath(request), "files")  # noqa: PTH118

    def own(self, path: Any) -> str:
        """The user's path; the working folder may be one of the overlay."""
        return os.path.abspath(os.fsdecode(path)).removeprefix(self.files)  # noqa: PTH100

    def place(self, path: Any) -> str | None:
        """The place of a path in the overlay; None for a path that is left alone."""
        if path is None or isinstance(path, int):
            return None
        own = self.own(path)
        return None if own.startswith((*_SYSTEM_FOLDERS, self.scratch)) else self.files + own

    def reading(self, path: Any) -> Any:
        """The path to read from: that in the overlay if something was written there."""
        place = self.place(path)
        if place is None:
            return path
        return place if _exists(place) else self.own(path)

    def writing(self, path: Any, *, keeps: bool) -> Any:
        """The path to write to; ``keeps`` copies what the file held before."""
        place = self.place(path)
        if place is None:
            return path
        own = self.own(path)
        if _exists(self.reading(os.path.dirname(own))):  # noqa: PTH120
            self.folder(os.path.dirname(place))  # noqa: PTH120
        if keeps and not _exists(place) and _exists(own):
            with _open(own, "rb") as source, _open(place, "wb") as target:
                target.write(source.read())
        return place

    def both(self, path: Any) -> list[Any]:
        """The folders that a folder's entries are in, that of the overlay first."""
        place = self.place(path)
        if place is None:
            return [path]
        return [each for each in (place, self.own(path)) if _exists(each)] or [path]

    def folder(self, place: str) -> None:
        """Makes a folder of the overlay, and those that it is in."""
        missing = []
        while not _exists(place):
            missing.append(place)
            place = os.path.dirname(place)  # noqa: PTH120
        for each in reversed(missing):
            _mkdir(each)

    def may_change(self, path: Any, folder: int | None = None, *, names_a_link: bool = False) -> bool:
        """True if a path is one of the scratch folder or of the system's folders, once its links are followed."""
        if isinstance(path, int):
            text = _path_of(path)
        else:
            text = os.fsdecode(path)
            if folder is not None and folder >= 0:
                text = os.path.join(_path_of(folder), text)  # noqa: PTH118
        if names_a_link:
            head, tail = os.path.split(os.path.abspath(text))  # noqa: PTH100
            real = os.path.join(os.path.realpath(head), tail)  # noqa: PTH118
        else:
            real = os.path.realpath(text)
        return real.startswith((self.scratch + "/", *_SYSTEM_FOLDERS))


def _path_of(descriptor: int) -> str:
    if sys.platform == "darwin":
        import fcntl

        return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return _readlink(f"/proc/self/fd/{descriptor}")


def _exists(path: Any) -> bool:
    try:
        _stat(path)
    except (OSError, ValueError):
        return False
    return True


def _refuse(event: str, what: Any) -> NoReturn:
    raise PermissionError(
        errno.EPERM,
        f"a capture may not change {what} ({event}), because this system has no copy-on-write view of files; "
        "--unsafe-files lets the script change them",
    )


def _refuse_spawning() -> None:
    """Refuses the processes that ``multiprocessing`` starts anew, which the audit does not see."""

    def refuse(path: Any, args: Any, passfds: Any) -> int:
        _refuse("multiprocessing", f"files by the program {path!r}")

    multiprocessing.util.spawnv_passfds = refuse


def _auditor(overlay: _Overlay, *, has_landlock: bool) -> Callable[[str, tuple[Any, ...]], None]:
    paths = tables()["paths_of_events"]

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            # A number is a file that is open already, and was allowed then.
            if not isinstance(path, int) and flags & _WRITE_FLAGS and not overlay.may_change(path):
                _refuse(event, path)
        elif event in paths:
            for place, *folder in paths[event]:
                beside = arguments[folder[0]] if folder else None
                if not overlay.may_change(arguments[place], beside, names_a_link=event in _NAMES_A_LINK):
                    _refuse(event, arguments[place])
        # Without the kernel's help nothing would hold a child process back: it has none of our audit hooks.
        elif not has_landlock and event in _CHILDREN:
            _refuse(event, f"files by the program {arguments[0]!r}")
        elif not has_landlock and event == "sqlite3.connect":
            database = arguments[0]
            if database not in ("", ":memory:") and not overlay.may_change(database):
                _refuse(event, database)

    return audit


def _cover_open(overlay: _Overlay) -> None:
    @functools.wraps(_open)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int):
            writes = bool(_WRITING & set(mode))
            file = overlay.writing(file, keeps="w" not in mode) if writes else overlay.reading(file)
        return _open(file, mode, *args, **kwargs)

    @functools.wraps(_os_open)
    def os_opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:  # the event of the audit does not have it
            path = os.path.join(_path_of(dir_fd), os.fsdecode(path))  # noqa: PTH118
        writes = flags & _WRITE_FLAGS
        path = (
            overlay.writing(path, keeps=not (flags & os.O_TRUNC and flags & os.O_CREAT))
            if writes
            else overlay.reading(path)
        )
        return _os_open(path, flags, mode)

    builtins.open = io.open = opened
    os.open = os_opened


def _cover_os(overlay: _Overlay) -> None:
    for name in itertools.chain(*tables()["functions_of_paths"].values()):
        setattr(os, name, _redirected(getattr(os, name), overlay.reading))
    _cover_lists(overlay)
    for name in ("mkfifo", "mknod"):
        setattr(os, name, _redirected(getattr(os, name), functools.partial(overlay.writing, keeps=False)))
    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, _mover(getattr(os, name), overlay))

    @functools.wraps(_mkdir)
    def mkdir(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        place = overlay.place(path)
        if place is None or dir_fd is not None:
            return _mkdir(path, mode, dir_fd=dir_fd)
        own = overlay.own(path)
        if _exists(own) or _exists(place):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not _exists(overlay.reading(os.path.dirname(own))):  # noqa: PTH120
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return overlay.folder(place)

    os.mkdir = mkdir


def _cover_lists(overlay: _Overlay) -> None:
    """Entries of a folder are those that the script wrote, and the user's others."""
    listdir, scandir = os.listdir, os.scandir

    @functools.wraps(listdir)
    def listed(path: Any = ".") -> list[Any]:
        return list(dict.fromkeys(name for folder in overlay.both(path) for name in listdir(folder)))

    def scanned(path: Any = ".") -> _Entries:
        entries: dict[Any, os.DirEntry[Any]] = {}
        for folder in overlay.both(path):
            with scandir(folder) as found:
                entries = {entry.name: entry for entry in found} | entries
        return _Entries(entries.values())

    os.listdir, os.scandir = listed, scanned  # type: ignore[assignment]


class _Entries:
    """Entries of folders, in the form of ``os.scandir``'s result."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *args: object) -> None:
        pass

    def close(self) -> None:
        """Does nothing: the folders are closed."""


def _redirected(function: Callable[..., Any], redirect: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def redirected(path: Any = None, *args: Any, **kwargs: Any) -> Any:
        if path is None:
            return function(*args, **kwargs)
        if kwargs.get("dir_fd") is None:
            path = redirect(path)
        return function(path, *args, **kwargs)

    return redirected


def _mover(function: Callable[..., Any], overlay: _Overlay) -> Callable[..., Any]:
    """A function that moves what the script wrote; of the user's files the audit refuses it."""

    @functools.wraps(function)
    def move(source: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        if all(kwargs.get(name) is None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            if function.__name__ != "symlink":
                source = overlay.reading(source)
            target = overlay.writing(target, keeps=False)
        return function(source, target, *args, **kwargs)

    return move


def _restrict_writing(folders: tuple[str, ...]) -> bool:
    """Has the kernel refuse changes outside some folders, to this process and its children; false if it cannot.

    Source: the manual page landlock(7); the numbers of its calls are the same on all architectures.
    """
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    create, add, restrict, no_new_privileges, as_version, beneath = 444, 445, 446, 38, 1, 1
    version = libc.syscall(create, None, ctypes.c_size_t(0), as_version)
    if version < 1:
        return False
    writing, removing_and_making, moving, truncating = 1 << 1, (1 << 13) - (1 << 4), 1 << 13, 1 << 14
    rights = writing | removing_and_making
    # A kernel refuses rights that it does not know yet.
    rights |= (moving if version > 1 else 0) | (truncating if version > 2 else 0)
    rules = libc.syscall(create, struct.pack("Q", rights), ctypes.c_size_t(8), 0)
    for folder in folders:
        handle = os.open(folder, os.O_PATH)
        libc.syscall(add, rules, beneath, struct.pack("=Qi", rights, handle), 0)
        os.close(handle)
    libc.prctl(no_new_privileges, 1, 0, 0, 0)
    result = libc.syscall(restrict, rules, 0)
    os.close(rules)
    return bool(result == 0)
