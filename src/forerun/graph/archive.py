"""Archives that may come from anybody: sizes are looked at before anything is unpacked. Nothing here needs NumPy."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

LARGEST_FILE_BYTES = 128 * 1024**2
"""Most bytes that the arrays of a graph may take: some 300,000 operations; 70B models have 20,000."""
DAMAGE = (
    OSError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    RuntimeError,  # zipfile: flags that claim encryption or patches, NotImplementedError of other compressions
    MemoryError,  # NumPy: an array header that claims a huge shape
    OverflowError,
    RecursionError,  # JSON: a thousand brackets
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
)
"""Exceptions raised by reading a damaged archive or a file that is not a graph."""


def read_member(path: Path, name: str, most_bytes: int) -> bytes:
    """A member of an archive, which is no larger than it says.

    Args:
        path: The archive.
        name: The member.
        most_bytes: Largest size that is unpacked [bytes].

    Raises:
        ValueError: It is larger; a damaged archive raises any of ``DAMAGE``.
    """
    with zipfile.ZipFile(path) as archive:
        size = archive.getinfo(name).file_size
        if size > most_bytes:
            raise ValueError(f"{name} takes {size:,} bytes, more than {most_bytes:,}")
        return archive.read(name)
