"""Names the file of an image that cannot be read; Pillow's own message for a truncated image does not."""

from __future__ import annotations

import functools
from typing import Any

__all__ = ["name_unreadable_images"]


def name_unreadable_images(module: Any) -> None:
    """Wraps ``PIL.ImageFile.ImageFile.load``: an error of decoding gets a note with the file.

    Notes are printed below the error (PEP 678), also below an error that a worker of a loader passes on.
    """
    load = module.ImageFile.load

    @functools.wraps(load)
    def named_load(image: Any) -> Any:
        # An image opened through a file object knows its name only while the file is open.
        name = getattr(image, "filename", "") or getattr(getattr(image, "fp", None), "name", "")
        try:
            return load(image)
        except (OSError, SyntaxError, ValueError) as error:
            if name and not any(name in note for note in getattr(error, "__notes__", ())):
                error.add_note(f"in the image '{name}'")
            raise

    module.ImageFile.load = named_load
