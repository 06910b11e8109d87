"""One search: a run, settings of it that vary, limits and a goal. Every verb that changes a run and asks again is one.

    run, axes -> runs -> estimates -> limits, goal -> front -> words

============  ======================================================  ==================================
verb          axes                                                    estimates
============  ======================================================  ==================================
plan          models, precisions and others; devices; batch sizes     on a grid, the listed ones exactly
sweep         precisions; devices; batch sizes                        on a grid
tune          precisions, memory orders, image sizes; batch sizes     on a grid
scale         numbers of devices                                      each as ``predict`` makes it
advise, ways  one change or several together                          each as ``predict`` makes it
layouts       layouts with their micro-batches, recomputation         of the divided model
============  ======================================================  ==================================

In words an axis is a list of numbers and ranges, of members of a family, or of settings that people forget. A range
``LOW..HIGH`` (batch sizes also ``LOW:HIGH``) counts by ones below 8 and doubles from 8 on, as depths and widths of
networks are usually varied: ``2..4`` is 2, 3, 4 and ``32..256`` is 32, 64, 128, 256. A third number is the step:
``32..64..8``, ``32:1024:32``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.base.units import parse_amount
from forerun.question.devices.prices import amount_in_usd
from forerun.question.job import size_of_images
from forerun.question.model import captured_facts, is_captured, is_keras, own_settings
from forerun.question.recipes import own_precision, with_captured_settings
from forerun.question.run import Run
from forerun.question.setup import Layout, Precision, TrainingSetup, choice
from forerun.tracing.trace import full_name

SETTINGS = "settings"
"""The axis of changes of several settings at once."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A quantity of a candidate that can be limited.

    Attributes:
        name: Word for the quantity in a limit.
        field: The attribute of a candidate that holds it.
        kind: Kind of unit, a key of ``units.UNITS``.
    """

    name: str
    field: str
    kind: str


QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        Quantity("time", "job_time_s", "time"),
        Quantity("epoch", "epoch_time_s", "time"),
        Quantity("step", "step_time_s", "time"),
        Quantity("cost", "cost_usd", "money"),
        Quantity("memory", "peak_memory_bytes", "memory"),
        Quantity("energy", "energy_j", "energy"),
        Quantity("co2", "co2_g", "mass"),
        Quantity("throughput", "throughput_samples_per_s", "rate"),
        Quantity("accuracy", "accuracy", "share"),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One limit.

    Attributes:
        quantity: The limited quantity.
        is_upper: Whether it is an upper limit (``<=``) or a lower one (``>=``).
        bound: The limit in the unit used inside.
        text: The limit as it was written.
    """

    quantity: Quantity
    is_upper: bool
    bound: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A run, what varies, and what is wanted.

    Attributes:
        run: The run with the settings that all candidates share.
        axes: Values of each setting that varies, by its flat name; every combination is a candidate. The axis
            ``settings`` holds changes of several settings at once, for values that depend on each other.
        limits: Limits that a candidate must keep, beside the memory of its device.
        goal: What is minimised.
    """

    run: Run
    axes: Mapping[str, Sequence[Any]]
    limits: tuple[Limit, ...] = ()
    goal: str = "time"

    def changes(self) -> Iterator[dict[str, Any]]:
        """Every combination of the axes as one change, the last axis changing fastest."""
        for values in product(*self.axes.values()):
            change: dict[str, Any] = {}
            for name, value in zip(self.axes, values, strict=True):
                change |= value if name == SETTINGS else {name: value}
            yield change

    def runs(self) -> Iterator[Run]:
        """The candidates, in the order of their changes."""
        return (self.run.with_(**change) for change in self.changes())


_LIMIT = re.compile(r"(?P<name>[a-z_0-9]+)\s*(?P<relation><=|>=|≤|≥|==|=|<|>)\s*(?P<amount>.+)", re.I)


def find_quantity(name: str) -> Quantity:
    """A quantity by its word.

    Raises:
        InvalidSetupError: There is no quantity of this name.
    """
    found = QUANTITIES.get(name.strip().lower())
    if found is None:
        raise InvalidSetupError(
            f"unknown quantity '{name}'{near_matches(name, QUANTITIES)}; a limit is on one of "
            f"{', '.join(QUANTITIES)}"
        )
    return found


def parse_limits(text: str | Iterable[str]) -> tuple[Limit, ...]:
    """The limits of a text, separated by commas.

    >>> [(limit.quantity.name, limit.bound) for limit in parse_limits("time<=2h, cost<=20")]
    [('time', 7200.0), ('cost', 20.0)]

    Raises:
        InvalidSetupError: A limit cannot be read, has an unknown quantity or unit, is given twice, or contradicts
            another.
    """
    parts = text.split(",") if isinstance(text, str) else [part for one in text for part in one.split(",")]
    limits = tuple(_parse(part.strip()) for part in parts if part.strip())
    _refuse_contradictions(limits)
    return limits


def _parse(text: str) -> Limit:
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise InvalidSetupError(
            f"a limit is a quantity, <= or >=, and an amount, such as time<=2h or memory<=24GB; got '{text}'"
        )
    quantity = find_quantity(found["name"])
    if found["relation"] not in ("<=", ">=", "≤", "≥"):
        raise InvalidSetupError(f"a limit needs <= or >=, got '{found['relation']}' in '{text}'")
    try:
        amount = amount_in_usd(found["amount"]) if quantity.kind == "money" else found["amount"]
        bound = parse_amount(amount, quantity.kind)
    except InvalidSetupError as error:
        raise InvalidSetupError(f"limit '{text}': {error}") from None
    is_upper = found["relation"] in ("<=", "≤")
    if bound <= 0 and (is_upper or bound < 0):
        raise InvalidSetupError(f"limit '{text}': an upper limit must be above zero, nothing would be left")
    if quantity.kind == "share" and bound > 1:
        raise InvalidSetupError(f"limit '{text}': a share is at most 1 (or 100%), got {bound:g}")
    return Limit(quantity=quantity, is_upper=is_upper, bound=bound, text="".join(text.split()))


def _refuse_contradictions(limits: Sequence[Limit]) -> None:
    for index, limit in enumerate(limits):
        for other in limits[:index]:
            if other.quantity is not limit.quantity:
                continue
            if other.is_upper == limit.is_upper:
                raise InvalidSetupError(
                    f"{limit.quantity.name} is limited twice: '{other.text}' and '{limit.text}'; keep one"
                )
            upper, lower = (limit, other) if limit.is_upper else (other, limit)
            if lower.bound > upper.bound:
                raise InvalidSetupError(
                    f"the limits contradict each other: nothing has both '{lower.text}' and '{upper.text}'; "
                    "change one of them"
                )


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
    # Names of files may hold dots and bars of their own.
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
    names = tuple(dict.fromkeys(word.lower() for word in words_of(words)))
    named = {name for name in SEARCHED if given.get(f"{name}s" if name in _OWN_AXES else name) is not None}
    if _ALL in names:
        names = tuple(name for name in SEARCHED if name not in named and is_open(name, models))
    for name in names:
        if name not in SEARCHED:
            raise InvalidSetupError(
                f"a plan searches {', '.join(SEARCHED)}, or all, got '{name}'{near_matches(name, SEARCHED)}"
            )
        if name in named:
            raise InvalidSetupError(
                f"{name} is given and searched; leave --{name} out, or {name} out of --search"
            )
        if not is_open(name, models):
            raise InvalidSetupError(
                f"{name} cannot be searched for Keras models and captured scripts; leave it out of --search"
            )
    return {name: SEARCHED[name] for name in names}


def is_open(name: str, models: Sequence[str]) -> bool:
    """True for a setting of ``SEARCHED`` that these models let vary: captured scripts and Keras have fewer."""
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


def _sizes(given: str | int | Sequence[int], what: str) -> tuple[int, ...]:
    if isinstance(given, int):
        return (given,)
    return parse_batch_sizes(given, what) if isinstance(given, str) else tuple(given)


def batch_sizes_of(given: str | int | Sequence[int]) -> tuple[int, ...]:
    """Batch sizes of one device, ascending, from a user's words or a list.

    Raises:
        InvalidSetupError: There is none, or one is impossible.
    """
    sizes = tuple(sorted({*_sizes(given, "batch size")}))
    if not sizes:
        raise InvalidSetupError("a plan needs at least one batch size, got none")
    for size in (sizes[0], sizes[-1]):
        TrainingSetup(batch_size_per_device=size)  # refuses a value that is not a batch size
    return sizes


def _image_sizes(given: str | int | Sequence[int]) -> list[dict[str, int]]:
    """The changes of an axis of image sizes."""
    sizes = _sizes(given, "image size")
    for size in sizes:
        if size < 1:
            raise InvalidSetupError(f"an image size must be at least 1 pixel, got {size}")
    return [{"image_size": size} for size in sizes]


USUAL_PRECISIONS = ("fp32", "amp")
"""Precisions of a plan where neither its user nor its models say any."""


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
    return tuple(held) or USUAL_PRECISIONS


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
    sizes = _image_sizes(given.get("image_sizes") or ())
    found = {spec: size_of_images(spec, given) for spec in specs}
    own_sizes: dict[Any, dict[str, Any]] = {
        spec: {"image_size": size} if any(found.values()) else {} for spec, size in found.items()
    }
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
        for size in sizes or [own_sizes[spec]]
        for layout in ((own_order(spec),) if named is None else named)
        for precision in precisions
        for settings in searched_settings(searched)
    )
