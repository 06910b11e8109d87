"""Settings from the parent for the hooks of a capture, as a file of JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["HOOKS", "CaptureSettings", "FileAccess"]

HOOKS = "forerun.script.capturing.hooks.start"
"""Module whose ``install`` the start-up of Python calls in the script's process."""

FileAccess = Literal["view", "guard", "unsafe"]
"""Way in which a script sees files: a copy-on-write view where the system has it, else a guard that redirects or
refuses what would change them; that guard in any case; or the files themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """Settings of one capture.

    Attributes:
        folder: Scratch folder, which also receives the result.
        arguments: Arguments of the script instead of its own; None keeps them.
        pretends: Whether a CUDA device is pretended; else the script runs on the processor and finds none.
        batch_from, batch_to: Batch size of loaders to replace, and its replacement; None leaves them alone.
        world_size: Processes that the script believes to be one of.
        devices_per_node: Processes on this machine, as the script believes.
        files: Way in which the script sees files.
    """

    folder: str
    arguments: list[str] | None = None
    pretends: bool = True
    batch_from: int | None = None
    batch_to: int | None = None
    world_size: int = 1
    devices_per_node: int = 1
    files: FileAccess = "view"
