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
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.base.units import parse_amount
from forerun.question.devices.prices import amount_in_usd
from forerun.question.run import Run

SETTINGS = "settings"
"""The axis of changes of several settings at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """A quantity of a candidate that can be limited.

    Attributes:
        name: Word for the quantity in a limit.
        field: The attribute of a candidate that holds it.
        kind: Kind of unit, a key of ``units.UNITS``.
        smaller_is_better: Whether less of it is wanted.
        meaning: Meaning of the quantity, for help texts.
    """

    name: str
    field: str
    kind: str
    smaller_is_better: bool
    meaning: str


def _quantity(name: str, field: str, kind: str, meaning: str, *, smaller_is_better: bool = True) -> Quantity:
    return Quantity(name=name, field=field, kind=kind, smaller_is_better=smaller_is_better, meaning=meaning)


QUANTITIES: Mapping[str, Quantity] = {
    quantity.name: quantity
    for quantity in (
        _quantity("time", "job_time_s", "time", "time of the whole job"),
        _quantity("epoch", "epoch_time_s", "time", "time of an epoch"),
        _quantity("step", "step_time_s", "time", "time of a step"),
        _quantity("cost", "cost_usd", "money", "price of the job"),
        _quantity("memory", "peak_memory_bytes", "memory", "peak memory of a device"),
        _quantity("energy", "energy_j", "energy", "energy of the job"),
        _quantity("co2", "co2_g", "mass", "carbon dioxide of the job"),
        _quantity(
            "throughput", "throughput_samples_per_s", "rate", "samples a second", smaller_is_better=False
        ),
        _quantity("accuracy", "accuracy", "share", "accuracy of the model", smaller_is_better=False),
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
                    f"the limits contradict each other: nothing has both '{lower.text}' and '{upper.text}'"
                )
