"""The axes of a search in words: lists and ranges of numbers, members of a family, and settings that people forget.

A range ``LOW..HIGH`` (batch sizes also ``LOW:HIGH``) counts by ones below 8 and doubles from 8 on, as depths and
widths of networks are usually varied: ``2..4`` is 2, 3, 4 and ``32..256`` is 32, 64, 128, 256. A third number is the
step: ``32..64..8``, ``32:1024:32``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.question.model import is_keras, own_settings
from forerun.question.recipes import captured_facts, is_captured, own_precision, with_captured_settings
from forerun.question.setup import Layout, Precision, TrainingSetup, choice
from forerun.tracing.trace import full_name

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
    # 32:1024 means the sizes that people use, 1..4 each number: which one is told by the first.
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

    A bare name becomes the full one, under which every verb answers.

    >>> expand_models("cnn:depth=2..3,base_filters=32")
    ('cnn:depth=2,base_filters=32', 'cnn:depth=3,base_filters=32')
    """
    words = [word.strip() for word in text.split(";") if word.strip()]
    if not words:
        raise InvalidSetupError("expected at least one model, got none")
    return tuple(dict.fromkeys(full_name(model) for word in words for model in _members(word)))


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
    check_count(math.prod(map(len, choices)), f"members of {spec}")
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


SEARCHED: Mapping[str, Sequence[Any]] = {
    "precision": ("fp32", "tf32", "amp", "amp-bf16"),
    "layout": ("nchw", "nhwc"),
    "compile": (False, True),
    "recompute": ("none", "selective", "full"),
    "strategy": ("ddp", "zero1", "fsdp"),
}
"""Usual values of each setting. None of them changes the network; the precisions keep the weights in fp32."""

_OWN_AXES = ("precision", "layout")
"""Settings that are axes of every plan."""

_ALL = "all"
_OF_CAPTURES = ("compile", "strategy")
_NOT_OF_KERAS = ("recompute", "strategy", "layout")


def searched_values(
    words: str | Sequence[str], given: Mapping[str, Any], models: Sequence[str]
) -> dict[str, Sequence[Any]]:
    """Values by setting of a search: ``compile,recompute``, or ``all`` for those that no other option names.

    Args:
        words: The settings, or ``all``.
        given: Options of the plan.
        models: Models of the plan; captured scripts and Keras models have fewer settings to search.

    Raises:
        InvalidSetupError: A setting cannot be searched, or is given as well.
    """
    parts = words.split(",") if isinstance(words, str) else words
    names = tuple(dict.fromkeys(word.strip().lower() for word in parts if word.strip()))
    named = {name for name in SEARCHED if given.get(f"{name}s" if name in _OWN_AXES else name) is not None}
    if _ALL in names:
        names = tuple(name for name in SEARCHED if name not in named and _is_open(name, models))
    for name in names:
        if name not in SEARCHED:
            raise InvalidSetupError(
                f"a plan searches {', '.join(SEARCHED)}, or all, got '{name}'{near_matches(name, SEARCHED)}"
            )
        if name in named:
            raise InvalidSetupError(
                f"{name} is given and searched; leave --{name} out, or {name} out of --search"
            )
        if not _is_open(name, models):
            raise InvalidSetupError(
                f"{name} cannot be searched for Keras models and captured scripts; leave it out of --search"
            )
    return {name: SEARCHED[name] for name in names}


def _is_open(name: str, models: Sequence[str]) -> bool:
    if any(is_captured(model) for model in models) and name not in _OF_CAPTURES:
        return False
    return not (any(is_keras(model) for model in models) and name in _NOT_OF_KERAS)


def searched_settings(values: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    """Every combination of the searched values but those of precision and layout.

    >>> searched_settings({"compile": (False, True), "layout": ("nchw", "nhwc")})
    ({'compile': False}, {'compile': True})
    """
    rest = {name: found for name, found in values.items() if name not in _OWN_AXES}
    return tuple(dict(zip(rest, chosen, strict=True)) for chosen in itertools.product(*rest.values()))


def words_of(given: str | Sequence[str]) -> tuple[str, ...]:
    """The words of a list or of one text with commas."""
    words = given.split(",") if isinstance(given, str) else given
    return tuple(word.strip() for word in words if word.strip())


def batch_sizes_of(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Batch sizes of one device, ascending, from a user's words or a list.

    Raises:
        InvalidSetupError: There is none, or one is impossible.
    """
    if isinstance(given, int):
        given = (given,)
    sizes = parse_batch_sizes(given) if isinstance(given, str) else tuple(sorted(set(given)))
    if not sizes:
        raise InvalidSetupError("a plan needs at least one batch size, got none")
    for size in (sizes[0], sizes[-1]):
        TrainingSetup(batch_size_per_device=size)  # refuses a value that is not a batch size
    return sizes


def _image_sizes(given: str | int | Sequence[int]) -> list[dict[str, int]]:
    """The changes of an axis of image sizes; one that changes nothing without sizes."""
    if isinstance(given, int):
        given = (given,)
    sizes = parse_batch_sizes(given, "image size") if isinstance(given, str) else tuple(given)
    for size in sizes:
        if size < 1:
            raise InvalidSetupError(f"an image size must be at least 1 pixel, got {size}")
    return [{"image_size": size} for size in sizes] or [{}]


def _precisions(specs: Sequence[str], given: str | Sequence[str] | None) -> tuple[str, ...]:
    """The precisions asked for; without any, those of captured scripts and language models, or fp32 and amp."""
    if given is not None:
        return words_of(given)
    held = {facts.precision for spec in specs if (facts := captured_facts(spec)) is not None}
    own: list[str] = [own_settings(spec).get("precision", "") for spec in specs]
    if not held and all(own):
        return tuple(dict.fromkeys(own))
    if len(held) > 1:
        raise InvalidSetupError(
            f"captured scripts of different precisions, {', '.join(sorted(held))}: plan them one by one"
        )
    return tuple(held) or ("fp32", "amp")


def own_order(spec: str) -> str:
    """The memory order of images that a model has by itself, or by its captured script."""
    facts = captured_facts(spec)
    return str(own_settings(spec)["layout"]) if facts is None else facts.layout


def changes_of(specs: Sequence[str], given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Everything that a plan varies but devices and batch sizes, as changes of a run by flat names.

    Args:
        specs: Models.
        given: Options of the plan.

    Raises:
        InvalidSetupError: An axis has no values, or a captured script decides it.
    """
    searched = searched_values(given.get("search") or (), given, specs)
    named_precisions = given.get("precisions", own_precision(given))
    precisions = _precisions(specs, searched.get("precision", named_precisions))
    layouts = searched.get("layout", given.get("layouts"))
    named = None if layouts is None else words_of(layouts)
    if not precisions or (named is not None and not named):
        raise InvalidSetupError("a plan needs at least one precision and one layout")
    for spec in specs:
        for precision in precisions:  # refuses what a capture does not hold
            with_captured_settings(spec, {"precision": precision}, one_device=True)
    return tuple(
        {
            "model": spec,
            **size,
            "layout": str(choice(Layout, layout, "layout")),
            "precision": str(choice(Precision, precision, "precision")),
            **settings,
        }
        for spec in specs
        for size in _image_sizes(given.get("image_sizes") or ())
        for layout in ((own_order(spec),) if named is None else named)
        for precision in precisions
        for settings in searched_settings(searched)
    )
