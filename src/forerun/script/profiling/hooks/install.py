"""Installs the hooks in a process of the user's command."""

from __future__ import annotations

import atexit
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from forerun.base.process_control import die_with_parent
from forerun.script.patching import after_import, follow_arguments, surround, trainer_patches
from forerun.script.profiling.hooks.knob_hooks import knob_patches
from forerun.script.profiling.hooks.messages import HookSettings, Recording, read_settings
from forerun.script.profiling.hooks.watch import Watch

__all__ = ["install", "name_unreadable_images"]


def install(settings_file: Path) -> None:
    """Watches this process from now on; imports only modules that the script imports itself."""
    settings = read_settings(settings_file, HookSettings)
    die_with_parent(settings.parent_pid)
    recording = Recording(Path(settings.folder))
    recording.write(
        "process",
        pid=os.getpid(),
        time_s=time.monotonic(),
        rank=os.environ.get("RANK"),
        executable=sys.executable,
    )
    watch = Watch(settings, recording)
    patches = knob_patches(settings.knobs, recording)

    def loaders(module: object) -> None:
        patches.loaders(module)
        watch.hooks.loaders(module)

    def optimizers(module: object) -> None:
        patches.optimizers(module)
        watch.hooks.optimizers(module)

    after_import(
        {
            "argparse": partial(
                follow_arguments,
                known=lambda options: recording.write("options", options=options),
                parsed=lambda options: recording.write("arguments", options=options),
            ),
            "PIL.ImageFile": name_unreadable_images,
            **watch.hooks.patches(),
            **trainer_patches(watch.job_seen),
            "torch.utils.data.dataloader": loaders,
            "torch.optim.optimizer": optimizers,
            "torch.nn.modules.module": patches.modules,
            "PIL.Image": patches.images,
        }
    )
    atexit.register(watch.finish)


def name_unreadable_images(module: Any) -> None:
    """Wraps ``PIL.ImageFile.ImageFile.load``: an error of decoding gets a note with the file.

    Notes are printed below the error (PEP 678), also below an error that a worker of a loader passes on.
    """

    @surround(module.ImageFile, "load")
    def named_load(load: Any, image: Any) -> Any:
        # An image opened through a file object knows its name only while the file is open.
        name = getattr(image, "filename", "") or getattr(getattr(image, "fp", None), "name", "")
        try:
            return load(image)
        except (OSError, SyntaxError, ValueError) as error:
            if name and not any(name in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"in the image '{name}'")
            raise
