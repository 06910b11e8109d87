"""Files that may come from anybody: sizes are looked at before anything is unpacked, values before they are used.

Nothing here imports NumPy, which a question about a kept answer does without.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from forerun.base.answers import plain

LARGEST_FILE_BYTES = 128 * 1024**2
"""Most bytes that the arrays of a graph may take: some 300,000 operations; 70B models have 20,000."""
_LARGEST_TENSORS_BYTES = 32 * 1024**2
"""Most bytes of a fitted model; the largest kind, a refined calibration, has 140 kB."""
_LARGEST_JSON_BYTES = 4 * 1024**2
"""Most bytes of a table in JSON or YAML, which takes up to twenty times as many once it is read."""
_CHECKSUM = "sha256"
_LONGEST_WORDS = 300
_LONGEST_NAME = 200
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


def in_a_line(what: object) -> str:
    """The words of an error about a file, or of a value in it, in one line of bounded length.

    >>> in_a_line(ValueError("two", "words"))
    "('two', 'words')"
    """
    words = " ".join(str(what).split()) or type(what).__name__
    return words if len(words) <= _LONGEST_WORDS else words[: _LONGEST_WORDS - 3] + "..."


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


def parsed_json(text: str | bytes) -> Any:
    """The value of a text in JSON, which has neither NaN nor infinity.

    Raises:
        ValueError: It is no JSON.

    >>> parsed_json('{"a": NaN}')
    Traceback (most recent call last):
    ValueError: expected a finite number, got NaN
    """
    if len(text) > _LARGEST_JSON_BYTES:
        raise ValueError(f"its text has more than {_LARGEST_JSON_BYTES:,} bytes")
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"expected a finite number, got {word}")


def read_json(path: Path) -> Any:
    """The value of a file in JSON, without the checksum that a file of ``json_file`` has.

    Raises:
        ValueError, OSError: It cannot be read, is too large, or is no JSON, or its checksum is another.
    """
    size = path.stat().st_size
    if size > _LARGEST_JSON_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {_LARGEST_JSON_BYTES:,}")
    with path.open("rb") as file:
        text = file.read(_LARGEST_JSON_BYTES + 1)  # a device such as /dev/zero has no size
    return _without_checksum(parsed_json(text), {})


def parsed_yaml(text: str) -> Any:
    """The value of a text in YAML, none of which is code, and whose references stand for no more than it could hold.

    Raises:
        ValueError: It is no YAML, too large, or refers to itself.

    >>> parsed_yaml("a: &a [*a]")
    Traceback (most recent call last):
    ValueError: a part of it contains itself
    """
    import yaml

    if len(text) > _LARGEST_JSON_BYTES:
        raise ValueError(f"its text has more than {_LARGEST_JSON_BYTES:,} characters")
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(in_a_line(error)) from error
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    _num_values(found, {})
    return found


def _num_values(part: Any, known: dict[int, int]) -> int:
    """Number of values that a part stands for, each reference counted as what it refers to."""
    if not isinstance(part, dict | list):
        return 1
    if id(part) not in known:
        # Until its parts are counted: to meet it again before is a circle.
        known[id(part)] = -1
        inner = part.values() if isinstance(part, dict) else part
        known[id(part)] = 1 + sum(_num_values(each, known) for each in inner)
    number = known[id(part)]
    if number < 0:
        raise ValueError("a part of it contains itself")
    if number > _LARGEST_JSON_BYTES:
        raise ValueError(f"its references stand for more than {_LARGEST_JSON_BYTES:,} values")
    return number


def json_file(document: Mapping[str, Any]) -> str:
    """The text of a file in JSON with a checksum of its values, whatever their order and the spaces between them."""
    own = json.loads(json.dumps(plain(document)))
    return (
        json.dumps({**own, _CHECKSUM: _checksum(own, {})}, indent=1, sort_keys=True, allow_nan=False) + "\n"
    )


def _without_checksum(document: Any, arrays: Mapping[str, Any]) -> Any:
    named = document.pop(_CHECKSUM, None) if isinstance(document, dict) else None
    if named is not None and named != _checksum(document, arrays):
        raise ValueError("its contents do not have the checksum that it names")
    return document


def read_tensors(path: Path, entry: str) -> tuple[Any, dict[str, Any]]:
    """Header and arrays of a file of ``tensors_file``; the header is None if the file has none of that name.

    Raises:
        ValueError: It is too large or damaged, as its checksum tells if it has one.
    """
    from safetensors import SafetensorError, safe_open

    size = path.stat().st_size
    if size > _LARGEST_TENSORS_BYTES:
        raise ValueError(f"it has {size:,} bytes, more than {_LARGEST_TENSORS_BYTES:,}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (SafetensorError, *DAMAGE) as error:
        raise ValueError(in_a_line(error)) from error
    if entry not in metadata:
        return None, arrays
    return _without_checksum(parsed_json(metadata[entry]), arrays), arrays


def tensors_file(header: Mapping[str, Any], arrays: Mapping[str, Any], entry: str) -> bytes:
    """The bytes of a file of arrays with a header and a checksum of both, in the format of safetensors."""
    from safetensors.numpy import save

    own = plain(header)
    text = json.dumps({**own, _CHECKSUM: _checksum(own, arrays)}, allow_nan=False)
    # One entry alone: the library writes several in any order.
    content: bytes = save(dict(arrays), metadata={entry: text})
    return content


def _checksum(header: Mapping[str, Any], arrays: Mapping[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()


def check_name(name: str, value: str) -> None:
    """Looks at a name that messages repeat.

    Raises:
        ValueError: It is too long, or not one line.
    """
    if len(value) > _LONGEST_NAME or not value.isprintable():
        raise ValueError(f"{name}: expected a name in one line, got {value[:60]!r}")


def check_array(name: str, values: Any, dtype: str, shape: tuple[int, ...], low: float, high: float) -> None:
    """Looks at a column: its type, its shape and its range.

    Raises:
        ValueError: A value is none that it may have; the message names the column and the row.
    """
    if values.dtype != dtype or values.shape != shape:
        raise ValueError(
            f"{name}: expected {dtype} in the shape {shape}, got {values.dtype} in {values.shape}"
        )
    # What is no number is within nothing.
    if values.size and not (values.min() >= low and values.max() <= high):
        refuse_row(name, values, ~((values >= low) & (values <= high)), f"{low:g} to {high:g}")


def refuse_row(name: str, values: Any, is_wrong: Any, wanted: str) -> None:
    """Refuses the first row of a column that has a wrong value, if there is one.

    Raises:
        ValueError: There is one.
    """
    rows = is_wrong.nonzero()[0]
    if len(rows):
        found = values[rows[0]]
        if found.ndim and is_wrong.ndim > 1:
            found = found[is_wrong[rows[0]]][0]
        raise ValueError(f"{name}, row {rows[0]}: expected {wanted}, got {found.tolist()}")
