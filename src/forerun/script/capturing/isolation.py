"""Keeps a captured script from the network and from the user's files.

The script runs behind a copy-on-write view of all files where the system has it (``view``), else behind a guard that
refuses changes (``guard``). Behind the guard, files that the script opens to write, and folders that it makes, go to a
scratch folder that holds their paths a second time, and are read back from there. Every other change outside that
folder is refused: by an audit hook, which sees what Python's own functions do, and by the kernel (Landlock, Linux
5.13), which sees what C++ code and children do, except changes of permissions, owners, times and attributes. Without
Landlock children and SQLite are refused, and what other C++ code writes is not seen.

The view is one of a process and its children, on Linux. The process gets mount and network namespaces of its own, for
which a user without rights first needs a user namespace. In them every mounted folder is the lower layer of an overlay,
whose upper layer is a scratch folder: what is written, renamed or removed, in whatever way, changes the upper layer
alone, and is read back. Nothing has to be undone, because the mounts go with the last process that sees them.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import fcntl
import functools
import io
import multiprocessing.util
import os
import re
import shutil
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from forerun.script.patching import surround, tables
from forerun.script.profiling.messages import FileAccess

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000  # flags of unshare(2)
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 1 << 18  # flags of mount(2)
_DETACH = 2  # flag of umount2(2)
_SYSCALL_MOUNT_SETATTR = 442  # the same number on all architectures; Linux 5.12
_AT_NO_FOLDER, _AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = -100, 0x8000, 1
_CAPABILITY_VERSION = 0x20080522
_COPIED_BYTES = 1 << 24
"""Longest file that is copied where there cannot be an overlay; longer ones can only be read."""


def why_no_view(scratch: Path, layers: Path) -> str:
    """Reason why this process cannot have a view; empty if it can.

    A child tries it, because a process cannot leave its namespaces; it makes a folder in the working folder if the user
    could.

    Args:
        scratch: As for ``enter_view``.
        layers: As for ``enter_view``; removed again.
    """
    if sys.platform != "linux":
        return "it is not Linux"
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        reason = ""
        try:
            can_write = os.access(".", os.W_OK)
            enter_view(scratch, layers)
            if can_write:
                trial = Path(f".forerun-{os.getpid()}")
                trial.mkdir()
                trial.rmdir()
        except BaseException as error:
            reason = str(error) or type(error).__name__
        os.write(writing, reason.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        reason = pipe.read().decode()
    os.waitpid(child, 0)
    shutil.rmtree(layers, ignore_errors=True)
    return reason


def enter_view(scratch: Path, layers: Path) -> None:
    """Puts this process, which must have one thread, behind a view.

    Args:
        scratch: Folder that stays what it is, for results.
        layers: New folder in it for the upper layers.

    Raises:
        OSError: The system does not allow it; the process can only end then.
    """
    scratch, folder, own_folders = scratch.resolve(), Path.cwd(), _own_folders()
    in_user_namespace = _enter_namespaces()
    _mount("none", "/", flags=_RECURSIVE | _PRIVATE)
    mounts = dict(_mounts())
    options = "userxattr" if in_user_namespace else "redirect_dir=on"
    view = _View(mounts, _layers(layers, options), options, is_locked=in_user_namespace)
    root = view.layer("root")
    view.show("/", root)
    if in_user_namespace:
        for place in own_folders:
            view.show(place, root + place)
    # Shared memory is empty, and the scratch folder what it is.
    if Path(root, "dev/shm").is_dir():
        _mount("tmpfs", f"{root}/dev/shm", "tmpfs", options="mode=1777")
    target = Path(root, *scratch.parts[1:])
    target.mkdir(parents=True, exist_ok=True)
    _mount(str(scratch), str(target), flags=_BIND)
    os.chroot(root)
    os.chdir(folder)
    if in_user_namespace and os.geteuid():
        # Takes back what the user namespace gave, such as reading files without the permission to.
        header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
        _check(_libc().capset(header, none), "capset")


@dataclass(slots=True)
class _View:
    """The mounts of a view.

    Attributes:
        mounts: Places where something is mounted, and whether that is read-only.
        layers: Folder for upper layers.
        options: Options of an overlay.
        is_locked: Whether a folder with mounts in it cannot be a lower layer, because they would be uncovered.
    """

    mounts: dict[str, bool]
    layers: str
    options: str
    is_locked: bool

    def layer(self, name: str) -> str:
        """A new folder for a layer."""
        return tempfile.mkdtemp(prefix=name, dir=self.layers)

    def show(self, source: str, target: str) -> None:
        """Mounts at a target what a place shows, and what is mounted in it."""
        inner = self._inner(source)
        if f"{source}/" in _SYSTEM_FOLDERS:
            _mount(source, target, flags=_BIND | _RECURSIVE)
            return
        if inner and self.is_locked and not self.mounts.get(source):
            self._rebuild(source, target)
            return
        if not Path(source).is_dir() or self.mounts.get(source):
            _bind_read_only(source, target)
        else:
            try:
                self.overlay(source, target)
            except OSError:  # a file system that cannot be a lower layer
                _bind_read_only(source, target)
        for place in inner:
            with contextlib.suppress(OSError):  # hidden by another mount, or not for this user
                self.show(place, os.path.join(target, os.path.relpath(place, source)))  # noqa: PTH118

    def _inner(self, source: str) -> list[str]:
        """Places mounted in a folder, without those mounted in them."""
        folder = source.rstrip("/") + "/"
        found: list[str] = []
        for place in sorted(self.mounts):
            if (
                place.startswith(folder)
                and place != source
                and not place.startswith(tuple(f"{f}/" for f in found))
            ):
                found.append(place)
        return found

    def overlay(self, source: str, target: str) -> None:
        """Mounts a folder copy-on-write."""
        upper, work = self.layer("upper"), self.layer("work")
        shutil.copystat(source, upper)
        status = Path(source).stat()
        with contextlib.suppress(OSError):  # another user's, which the namespace does not know
            os.chown(upper, status.st_uid, status.st_gid)
        # The options part paths by commas and colons, so that they are given as descriptors and from here.
        os.chdir(self.layers)
        lower = os.open(source, os.O_PATH)
        try:
            layers = f"lowerdir=/proc/self/fd/{lower},upperdir={Path(upper).name},workdir={Path(work).name}"
            _mount("overlay", target, "overlay", options=f"{layers},{self.options}")
        finally:
            os.close(lower)
        Path(work, "work").chmod(0o700)  # else its owner could not remove it

    def _rebuild(self, source: str, target: str) -> None:
        """A folder with mounts in it, as a new folder: its folders are covered one by one, small files copied."""
        folder = self.layer("folder")
        _mount(folder, target, flags=_BIND)
        with os.scandir(source) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # what this user cannot read is left out
                    self._show_entry(entry, Path(target, entry.name))
        shutil.copystat(source, target)

    def _show_entry(self, entry: os.DirEntry[str], target: Path) -> None:
        if entry.is_symlink():
            target.symlink_to(os.readlink(entry.path))  # noqa: PTH115 - as it is written
        elif entry.is_dir():
            target.mkdir()
            self.show(entry.path, str(target))
        elif entry.is_file() and entry.path not in self.mounts and entry.stat().st_size <= _COPIED_BYTES:
            shutil.copy2(entry.path, target)
        else:
            target.touch()
            _bind_read_only(entry.path, str(target))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str = "", *, flags: int = 0, options: str = "") -> None:
    words = [os.fsencode(word) or None for word in (source, target, kind, options)]
    _check(_libc().mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount of {kind or source}")


def _bind_read_only(source: str, target: str) -> None:
    """Shows a place and all mounted in it at a target, where it can only be read."""
    _mount(source, target, flags=_BIND | _RECURSIVE)
    attributes = struct.pack("4Q", _ATTRIBUTE_READ_ONLY, 0, 0, 0)
    try:
        result = _libc().syscall(
            _SYSCALL_MOUNT_SETATTR, _AT_NO_FOLDER, os.fsencode(target), _AT_RECURSIVE, attributes,
            ctypes.c_size_t(len(attributes)),
        )  # fmt: skip
        _check(result, "mount_setattr")
    except OSError:
        _libc().umount2(os.fsencode(target), _DETACH)
        raise


def _enter_namespaces() -> bool:
    """Enters new namespaces, of the network with the loopback alone; true if it took a user namespace."""
    user, group = os.geteuid(), os.getegid()
    needs_user = bool(_libc().unshare(_NEW_MOUNTS | _NEW_NETWORK) < 0)
    if needs_user:
        _check(_libc().unshare(_NEW_USER | _NEW_MOUNTS | _NEW_NETWORK), "unshare")
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            try:
                Path("/proc/self", name).write_text(text, encoding="ascii")
            except OSError as error:
                raise OSError(error.errno, f"{name}: {error.strerror}") from None
    set_flags, is_up = 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, set_flags, struct.pack("16sH14x", b"lo", is_up))
    return needs_user


def _mounts() -> Iterator[tuple[str, bool]]:
    """Places where something is mounted, and whether that is read-only; the last one counts."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        fields = line.split(b" ")
        place = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8)]), fields[4])
        yield os.fsdecode(place), b"ro" in fields[5].split(b",")


def _layers(folder: Path, options: str) -> str:
    """A folder that can hold upper layers: on its disk, else in memory, at most half of it.

    Some file systems cannot hold them, or (tmpfs before Linux 6.6) not the mark of a folder in the place of a removed
    one; a trial tells.
    """
    folder.mkdir()
    for kind in ("disk", "tmpfs"):
        if kind == "tmpfs":
            _mount("tmpfs", str(folder), "tmpfs", options="mode=700,size=50%")
        trial = _View({}, str(folder), options, is_locked=False)
        below, seen = trial.layer("below"), trial.layer("seen")
        Path(below, "removed").mkdir()
        try:
            trial.overlay(below, seen)
            Path(seen, "removed").rmdir()
            Path(seen, "removed").mkdir()
        except OSError:
            if kind == "tmpfs":
                raise
            continue
        layers = folder / "layers"
        layers.mkdir()
        return str(layers)
    raise AssertionError


def _own_folders() -> set[str]:
    """The outermost folders of this user that hold the working folder and the home.

    An overlay whose user namespace holds one user cannot write beneath a folder of another user, except where that is
    the overlay's own root; so these become roots.
    """
    found = (_outermost_own(Path(place).resolve()) for place in (Path.cwd(), os.path.expanduser("~")))  # noqa: PTH111 - no error
    return {str(place) for place in found if place.is_dir()} - {"/"}


def _outermost_own(folder: Path) -> Path:
    own = (os.geteuid(), os.getegid())
    for parent in folder.parents:
        with contextlib.suppress(OSError):
            status = parent.stat()
            if (status.st_uid, status.st_gid) == own:
                folder = parent
                continue
        break
    return folder


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
        for name in ("rename", "replace"):
            surround(os, name)(_renamed)
    elif access != "unsafe":
        (request / GUARDED_FILE).write_text(reason, encoding="utf-8")
        guard_files(request)
    _close_network()


def _renamed(rename: Callable[..., None], source: Any, target: Any, **folders: int | None) -> None:
    """Renames, and copies where an overlay cannot: to another one, and folders of the lower layer."""
    try:
        rename(source, target, **folders)
    except OSError as error:
        if error.errno != errno.EXDEV or any(folder is not None for folder in folders.values()):
            raise
        _copy_over(Path(os.fsdecode(source)), Path(os.fsdecode(target)))


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

    def is_near(host: Any) -> bool:
        return host in (None, "", "localhost", "::1", b"localhost") or str(host).startswith("127.")

    @surround(socket.socket, "connect")
    def near_connect(connect: Any, self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not is_near(address[0]):
            raise OSError(errno.ENETUNREACH, "a capture has no network: load what it needs before")
        return connect(self, address)

    @surround(socket, "getaddrinfo")
    def near_resolve(resolve: Any, host: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_near(host):
            raise socket.gaierror(socket.EAI_AGAIN, "a capture has no network: load what it needs before")
        return resolve(host, *args, **kwargs)


_WRITING = frozenset("wax+")
_SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS, _FUNCTIONS = tables()["paths_of_events"], tables()["functions_of_paths"]
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
        # The audit does not see the processes that it starts anew.
        multiprocessing.util.spawnv_passfds = lambda path, args, passfds: _refuse(
            "multiprocessing", f"files by the program {path!r}"
        )
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
        text = _path_of(path) if isinstance(path, int) else os.fsdecode(path)
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


def _auditor(overlay: _Overlay, *, has_landlock: bool) -> Callable[[str, tuple[Any, ...]], None]:
    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            # A number is a file that is open already, and was allowed then.
            if not isinstance(path, int) and flags & _WRITE_FLAGS and not overlay.may_change(path):
                _refuse(event, path)
        elif event in _EVENTS:
            for place, *folder in _EVENTS[event]:
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
        if not flags & _WRITE_FLAGS:
            return _os_open(overlay.reading(path), flags, mode)
        keeps = not (flags & os.O_TRUNC and flags & os.O_CREAT)
        return _os_open(overlay.writing(path, keeps=keeps), flags, mode)

    builtins.open = io.open = opened
    os.open = os_opened


def _cover_os(overlay: _Overlay) -> None:
    for name in (*_FUNCTIONS["readers"], *_FUNCTIONS["changers"]):
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


class _Entries(Iterator[os.DirEntry[Any]], contextlib.AbstractContextManager["_Entries"]):
    """Entries of folders, in the form of ``os.scandir``'s result."""

    def __init__(self, entries: Iterable[os.DirEntry[Any]]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> os.DirEntry[Any]:
        return next(self._entries)

    def __exit__(self, *args: object) -> None:
        """Does nothing: the folders are closed."""

    close = __exit__


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
    libc = _libc()
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
