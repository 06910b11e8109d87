"""Devices of this process, ``cpu``, ``cuda`` or ``cuda:N``, and a lock on each between all processes of a machine."""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from forerun.base.errors import DeviceBusyError, InvalidSetupError, MeasurementError, UsageError


def gpu_index(device_index: str) -> int | None:
    """Number of a GPU among those this process sees; None for the processor; ``cuda`` is ``cuda:0``."""
    if device_index == "cpu":
        return None
    match = re.fullmatch(r"cuda(?::(\d+))?", device_index)
    if match is None:
        raise InvalidSetupError(f"expected device cpu or cuda:N, got '{device_index}'; give one of them")
    return int(match[1] or 0)


def first_device() -> str:
    """The first visible GPU of this machine, or its processor."""
    from forerun.question.devices.here import visible_gpus

    return "cuda:0" if visible_gpus() else "cpu"


def check_device(device_index: str) -> str:
    """The device as ``cpu`` or ``cuda:N``, checked to exist on this machine.

    Raises:
        UsageError: The text is not a device, or this machine has no such GPU.
    """
    from forerun.question.devices.here import visible_gpus

    index = gpu_index(device_index)
    if index is None:
        return "cpu"
    num_gpus = len(visible_gpus())
    if index >= num_gpus:
        raise UsageError(
            f"expected cpu or one of this machine's {num_gpus} GPUs, got '{device_index}'; 'forerun hardware here' "
            "lists them"
        )
    return f"cuda:{index}"


def only_device(device_index: str) -> dict[str, str]:
    """Environment in which a script that takes the first GPU, or without a GPU the processor, takes this device.

    A script finds the first GPU anyhow; for that GPU nothing is hidden, so a script may use several.
    """
    index = gpu_index(device_index)
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    if index is None:
        return {"CUDA_VISIBLE_DEVICES": ""} if first_device() != "cpu" else {}
    if index == 0:
        return {}
    # Numbers count among those that this process sees.
    entries = known.split(",") if known else []
    return {"CUDA_VISIBLE_DEVICES": entries[index].strip() if index < len(entries) else str(index)}


_POLL_S = 0.2
# Other users of the machine lock the same file.
_EVERYONE = 0o666


def device_identity(device_index: str) -> str:
    """Name of a device for all processes of a machine: ``cpu``, or the identity the driver gives a GPU.

    ``cuda:0`` is another board under another ``CUDA_VISIBLE_DEVICES``; the driver's identity is not. Without a driver
    the name is the index itself.
    """
    index = gpu_index(device_index)
    if index is None:
        return "cpu"
    from forerun.question.devices.here import visible_gpus

    gpus = visible_gpus()
    return gpus[index].uuid if index < len(gpus) else f"cuda:{index}"


def lock_path(device_index: str, folder: Path | None = None) -> Path:
    """File of the lock: in the machine's folder for temporary files, named by host and device.

    The host is part of the name because that folder may be shared by machines.
    """
    name = f"{platform.node()}-{device_identity(device_index)}"
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", name)[:60]
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return (folder or Path(tempfile.gettempdir())) / f"forerun-{readable}-{digest}.lock"


_held: ContextVar[frozenset[Path]] = ContextVar("forerun_held_devices", default=frozenset())
"""Locks of this thread: a calibration of many sessions holds its device between them."""


@contextlib.contextmanager
def lock_device(
    device_index: str,
    *,
    wait_s: float = 0.0,
    folder: Path | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> Iterator[Path]:
    """Holds the device for as long as the context lasts; inside, the same thread may ask for it again.

    Args:
        device_index: Device to lock, such as ``cpu`` or ``cuda:0``.
        wait_s: Longest wait for another holder [s].
        folder: Folder of the lock's file; None for the machine's folder for temporary files.
        on_wait: Called once with the name of the holder, if there is one to wait for.

    Raises:
        DeviceBusyError: Another process holds the device; the message names the process.
    """
    path = lock_path(device_index, folder)
    held = _held.get()
    if path in held:
        yield path
        return
    # Every user may take the lock, whatever the mask of the first. The file stays: removing it would let two
    # processes hold "the same" lock.
    lock = FileLock(
        path, mode=_EVERYONE, poll_interval=_POLL_S, preserve_lock_file=True, on_acquired=_write_holder
    )
    _acquire(lock, path, device_index, wait_s, on_wait)
    token = _held.set(held | {path})
    try:
        yield path
    finally:
        _held.reset(token)
        lock.release()


def _acquire(
    lock: FileLock, path: Path, device_index: str, wait_s: float, on_wait: Callable[[str], None] | None
) -> None:
    try:
        try:
            lock.acquire(timeout=0.0)
        except Timeout:
            if on_wait is not None and wait_s > 0:
                on_wait(f"waiting for device {device_index}: {_holder(path)} is measuring on it")
            lock.acquire(timeout=max(0.0, wait_s))
    except Timeout:
        raise DeviceBusyError(
            f"expected device {device_index} to be free, but {_holder(path)} is measuring on it; "
            f"wait until it ends, or end it (lock: {path})"
        ) from None
    except OSError as error:
        raise MeasurementError(
            f"expected to open and lock the file of the device at {path}, got: {error.strerror or error}; "
            "remove the file, or set TMPDIR to a folder on a local disk that you may write to"
        ) from error


def _write_holder(descriptor: int) -> None:
    holder = {"pid": os.getpid(), "user": _user(), "since": datetime.now(UTC).isoformat(timespec="seconds")}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(holder).encode())


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user number without a name
        return str(os.getuid())


def _holder(path: Path) -> str:
    """Holder of the lock, for a message; the file may be empty while its holder writes it."""
    try:
        holder = json.loads(path.read_text(encoding="utf-8"))
        return f"process {holder['pid']} (user {holder['user']}, since {holder['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
