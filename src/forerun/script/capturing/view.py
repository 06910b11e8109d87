"""A copy-on-write view of all files for one process and its children, without a network; on Linux.

The process gets mount and network namespaces of its own, for which a user without rights first needs a user namespace.
In them every mounted folder is the lower layer of an overlay, whose upper layer is a scratch folder: what is written,
renamed or removed, in whatever way, changes the upper layer alone, and is read back. Nothing has to be undone, because
the mounts go with the last process that sees them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NEW_MOUNTS, _NEW_USER, _NEW_NETWORK = 0x00020000, 0x10000000, 0x40000000  # flags of unshare(2)
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 1 << 18  # flags of mount(2)
_DETACH = 2  # flag of umount2(2)
_SYSCALL_MOUNT_SETATTR = 442  # the same number on all architectures; Linux 5.12
_AT_NO_FOLDER, _AT_RECURSIVE, _ATTRIBUTE_READ_ONLY = -100, 0x8000, 1
_CAPABILITY_VERSION = 0x20080522
_SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
_COPIED_BYTES = 1 << 24
"""Longest file that is copied where there cannot be an overlay; longer ones can only be read."""


def why_no_view(scratch: Path, layers: Path) -> str:
    """Reason why this process cannot have a view; empty if it can.

    A child tries it, because a process cannot leave its namespaces.

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
            _try_view(scratch, layers)
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


def _try_view(scratch: Path, layers: Path) -> None:
    """Enters the view, and makes a folder in the working folder if the user could."""
    can_write = os.access(".", os.W_OK)
    enter_view(scratch, layers)
    if can_write:
        name = f".forerun-{os.getpid()}"
        Path(name).mkdir()
        Path(name).rmdir()


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
    _set_apart(scratch, root)
    os.chroot(root)
    os.chdir(folder)
    if in_user_namespace and os.geteuid():
        _drop_capabilities()


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
    _number: int = 0

    def layer(self, name: str) -> str:
        """A new folder for a layer."""
        self._number += 1
        path = Path(self.layers, f"{name}{self._number}")
        path.mkdir()
        return str(path)

    def show(self, source: str, target: str) -> None:
        """Mounts at a target what a place shows, and what is mounted in it."""
        inner = self._inner(source)
        if source in _SYSTEM_FOLDERS:
            _mount(source, target, flags=_BIND | _RECURSIVE)
            return
        if inner and self.is_locked and not self.mounts.get(source):
            self._rebuild(source, target)
            return
        if not Path(source).is_dir() or self.mounts.get(source):
            _bind_read_only(source, target)
        else:
            self._cover(source, target)
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

    def _cover(self, source: str, target: str) -> None:
        try:
            self.overlay(source, target)
        except OSError:  # a file system that cannot be a lower layer
            _bind_read_only(source, target)

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


def _set_apart(scratch: Path, root: str) -> None:
    """Empty shared memory, and the scratch folder as it is."""
    if Path(root, "dev/shm").is_dir():
        _mount("tmpfs", f"{root}/dev/shm", "tmpfs", options="mode=1777")
    target = Path(root, *scratch.parts[1:])
    target.mkdir(parents=True, exist_ok=True)
    _mount(str(scratch), str(target), flags=_BIND)


def _drop_capabilities() -> None:
    """Takes back what the user namespace gave, such as reading files without the permission to."""
    header, none = struct.pack("Ii", _CAPABILITY_VERSION, 0), struct.pack("6I", *[0] * 6)
    _check(_libc().capset(header, none), "capset")
