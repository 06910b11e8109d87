"""The space of candidates: lists and ranges of batch sizes, precisions and members of a family.

A range ``LOW..HIGH`` (batch sizes also ``LOW:HIGH``) counts by ones below 8 and doubles from 8 on, as depths and
widths of networks are usually varied: ``2..4`` is 2, 3, 4 and ``32..256`` is 32, 64, 128, 256. A third number is the
step: ``32..64..8``, ``32:1024:32``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from forerun.errors import InvalidSetupError

__all__ = [
    "MAX_CANDIDATES",
    "check_count",
    "expand_models",
    "expand_range",
    "parse_batch_sizes",
    "split_list",
]

MAX_CANDIDATES = 200_000
"""Largest number of candidates; more take minutes and gigabytes."""

_DOUBLES_FROM = 8
_RANGE = re.compile(r"(?P<low>\d+)\s*(?:\.\.|:)\s*(?P<high>\d+)(?:\s*(?:\.\.|:)\s*(?P<step>\d+))?")


def split_list(text: str, what: str) -> tuple[str, ...]:
    """The words of a list separated by commas.

    Raises:
        InvalidSetupError: The list is empty.
    """
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise InvalidSetupError(f"expected at least one {what}, got '{text}'")
    return words


def expand_range(text: str, what: str) -> tuple[int, ...]:
    """The whole numbers of one number or range.

    >>> expand_range("2..4", "depth"), expand_range("32:256", "batch size"), expand_range("10..30..10", "width")
    ((2, 3, 4), (32, 64, 128, 256), (10, 20, 30))

    Raises:
        InvalidSetupError: The text is neither, or the range falls, has a step of zero, or has too many members.
    """
    if text.strip().isdigit():
        return (int(text),)
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise InvalidSetupError(
            f"{what} must be a whole number or a range such as 32:1024 or 2..4, got '{text.strip()}'"
        )
    low, high = int(found["low"]), int(found["high"])
    if low > high or low < 1:
        raise InvalidSetupError(f"a range of {what} must rise from at least 1, got '{text.strip()}'")
    if found["step"] is None and low >= _DOUBLES_FROM:
        return tuple(low << doubling for doubling in range((high // low).bit_length()))
    if found["step"] is None:
        check_count(high - low + 1, f"{what} {text.strip()}")
        return tuple(range(low, high + 1))
    step = int(found["step"])
    if step < 1:
        raise InvalidSetupError(f"the step of a range of {what} must be at least 1, got '{text.strip()}'")
    check_count((high - low) // step + 1, f"{what} {text.strip()}")
    return tuple(range(low, high + 1, step))


def parse_batch_sizes(text: str, what: str = "batch size") -> tuple[int, ...]:
    """Batch sizes of a list of numbers and ranges, ascending and each once.

    >>> parse_batch_sizes("32:128,48")
    (32, 48, 64, 128)
    """
    words = split_list(text, what)
    return tuple(sorted({size for word in words for size in expand_range(word, what)}))


def expand_models(text: str) -> tuple[str, ...]:
    """Models of a specification whose keys may be ranges or values separated by bars; several separated by semicolons.

    >>> expand_models("cnn:depth=2..3,base_filters=32")
    ('cnn:depth=2,base_filters=32', 'cnn:depth=3,base_filters=32')
    """
    words = [word.strip() for word in text.split(";") if word.strip()]
    if not words:
        raise InvalidSetupError("expected at least one model, got none")
    return tuple(dict.fromkeys(model for word in words for model in _members(word)))


def _members(spec: str) -> Sequence[str]:
    family, colon, keys = spec.partition(":")
    if not colon or not re.search(r"\d\.\.\d|\|", keys) or "/" in keys or keys.endswith((".onnx", ".json")):
        return (spec,)
    choices = []
    for part in keys.split(","):
        key, equals, value = part.partition("=")
        prefix, values = (f"{key}=", value) if equals else ("", part)
        options = [option for word in values.split("|") for option in _values(word.strip(), key)]
        choices.append([f"{prefix}{option}" for option in options])
    total = 1
    for choice in choices:
        total *= len(choice)
    check_count(total, f"members of {spec}")
    return [f"{family}:{','.join(chosen)}" for chosen in itertools.product(*choices)]


def _values(word: str, key: str) -> Sequence[str]:
    if ".." not in word:
        return (word,)
    return [str(value) for value in expand_range(word, key.strip() or "a key")]


def check_count(count: int, what: str = "candidates") -> None:
    """Refuses more than ``MAX_CANDIDATES``, with the count.

    Raises:
        InvalidSetupError: There are too many.
    """
    if count > MAX_CANDIDATES:
        raise InvalidSetupError(
            f"{what}: {count:,} are too many, at most {MAX_CANDIDATES:,} are compared; take fewer values or a "
            "larger step"
        )
