"""``forerun.capture``: the training step of a script that nobody edited."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from forerun.base.kept import cache_folder
from forerun.graph.captured import Capture
from forerun.question.model import CAPTURE_PREFIX
from forerun.script.capturing.capture import DEFAULT_TIMEOUT_S, capture_command

__all__ = ["capture", "captured_model"]


def capture(
    command: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, unsafe_files: bool = False
) -> Capture:
    """Captures the training step of a command, without a GPU and without an edit.

    The script's own code runs, in a process of its own, until its third step: without network, and over a
    copy-on-write view of all files, so that it changes none. Where the system has no such view, what would change a
    file is redirected or refused, and a note says so. See docs/methods/script-capture.md.

    Args:
        command: Words of the command, such as ``["python", "train.py", "--batch-size", "64"]``.
        timeout_s: Longest time of one process [s].
        unsafe_files: Whether the script sees, and may change, the files themselves.

    Raises:
        UsageError: There is no command, or no such script.
        FailureError: It is no command of Python, or the script failed, ended too early, or cannot be captured.

    Example:
        >>> import forerun
        >>> found = forerun.capture(["python", "train.py"])  # doctest: +SKIP
        >>> found.save("graph.forerun")  # doctest: +SKIP
        >>> forerun.predict("capture:graph.forerun", device="a100-sxm4-80gb")  # doctest: +SKIP
    """
    return capture_command(command, timeout_s=timeout_s, files="unsafe" if unsafe_files else "view")


def captured_model(
    command: Sequence[str], *, timeout_s: float = DEFAULT_TIMEOUT_S, unsafe_files: bool = False
) -> str:
    """Captures a command into the cache folder, and names the captured model as ``capture:FILE``.

    Raises:
        UsageError, FailureError: As in ``capture``.
    """
    found = capture(command, timeout_s=timeout_s, unsafe_files=unsafe_files)
    digest = hashlib.sha256(json.dumps([str(Path.cwd()), *command]).encode()).hexdigest()[:16]
    return f"{CAPTURE_PREFIX}{found.save(cache_folder() / 'captures' / f'{digest}.forerun')}"
