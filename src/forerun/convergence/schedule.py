"""Learning-rate schedules as relative rates per epoch, from words or from a framework's own object.

    constant
    step:30,60,80x0.1                milestones in epochs and the factor at each
    cosine:epochs=90[,min=0.01]      half a cosine from 1 to min
    linear:epochs=90[,min=0]         a straight line
    poly:epochs=38,power=2[,min=0]   (1 - t / T)^power
    exponential:0.95                 the factor of each epoch
    onecycle:epochs=30[,peak=0.3]    up to the peak at this share, then down by a cosine
    ... ,warmup=5                    a straight line from zero over so many epochs, in front of any of them

The rate of epoch e is that in its middle, e - 0.5; the schedule's clock runs from the start of training, warm-up
included. Sources: Goyal et al. 2017 (warm-up, steps), Loshchilov and Hutter 2017 (cosine), Smith and Topin 2018.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.convergence.curve import Floats
from forerun.errors import InvalidSetupError, near_matches

__all__ = ["SCHEDULE_WORDS", "LearningRateSchedule", "parse_schedule", "schedule_of"]

SCHEDULE_WORDS = ("constant", "step", "cosine", "linear", "poly", "exponential", "onecycle")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Relative learning rate as a function of the epoch.

    Attributes:
        text: How it was given.
        rate: Relative rate at a time in epochs, from arrays to arrays.
        num_epochs: Length of the run if the schedule fixes it.
    """

    text: str
    rate: Callable[[Floats], Floats]
    num_epochs: float | None = None

    def rates(self, epochs: npt.ArrayLike) -> Floats:
        """Rates in the middle of the stretches that end at ``epochs``, (n,)."""
        ends = np.asarray(epochs, dtype=float)
        begins = np.concatenate([[0.0], ends[:-1]])
        return np.maximum(self.rate((begins + ends) / 2), 0.0)


def parse_schedule(text: str) -> LearningRateSchedule:
    """A schedule from words.

    >>> [float(r) for r in parse_schedule("step:2x0.1").rates([1, 2, 3])]
    [1.0, 1.0, 0.1]

    Raises:
        InvalidSetupError: An unknown word, or impossible numbers.
    """
    word, _, rest = text.strip().partition(":")
    word = word.strip().lower()
    if word not in SCHEDULE_WORDS:
        raise InvalidSetupError(
            f"unknown schedule '{text}'{near_matches(word, SCHEDULE_WORDS)}; expected {', '.join(SCHEDULE_WORDS)}, "
            "such as cosine:epochs=90 or step:30,60,80x0.1"
        )
    plain, options = _parts(text, rest)
    warm_up = options.pop("warmup", 0.0)
    if warm_up < 0:
        raise InvalidSetupError(
            f"warmup of a schedule must be zero or more epochs, got {warm_up:g} in '{text}'"
        )
    rate, num_epochs = _shape(word, plain, options, text, warm_up)
    if options:
        raise InvalidSetupError(f"the schedule '{word}' has no option {', '.join(options)}, got '{text}'")
    return LearningRateSchedule(text=text.strip(), rate=_warmed(rate, warm_up), num_epochs=num_epochs)


def _parts(text: str, rest: str) -> tuple[list[str], dict[str, float]]:
    plain, options = [], {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            plain.append(part)
            continue
        options[key.strip().lower()] = _number(value, text)
    return plain, options


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidSetupError(f"a schedule needs numbers, got '{text}' in '{whole}'")
    return value


def _length(options: dict[str, float], text: str) -> float:
    length = options.pop("epochs", math.nan)
    if not length > 0:
        raise InvalidSetupError(f"this schedule needs its length, such as cosine:epochs=90, got '{text}'")
    return length


def _share_left(length: float, begin: float) -> Callable[[Floats], Floats]:
    return lambda t: np.clip(1 - (t - begin) / max(length - begin, 1e-9), 0.0, 1.0)


def _shape(
    word: str, plain: list[str], options: dict[str, float], text: str, warm_up: float
) -> tuple[Callable[[Floats], Floats], float | None]:
    if word == "constant":
        return np.ones_like, options.pop("epochs", None)
    if word == "step":
        return _steps(plain, text), options.pop("epochs", None)
    if word == "exponential":
        factor = _number(plain[0] if plain else "", text)
        if not 0 < factor <= 1:
            raise InvalidSetupError(f"the factor of an exponential schedule must be in (0, 1], got '{text}'")
        return lambda t: factor ** (t - 0.5), options.pop("epochs", None)
    length, low = _length(options, text), options.pop("min", 0.0)
    if word == "onecycle":
        return _one_cycle(length, options.pop("peak", 0.3)), length
    left = _share_left(length, warm_up)
    if word == "cosine":
        return lambda t: low + (1 - low) * 0.5 * (1 - np.cos(np.pi * left(t))), length
    power = options.pop("power", 1.0) if word == "poly" else 1.0
    return lambda t: low + (1 - low) * left(t) ** power, length


def _steps(plain: list[str], text: str) -> Callable[[Floats], Floats]:
    words = list(plain)
    factor = 0.1
    if words and "x" in words[-1]:
        words[-1], _, last = words[-1].partition("x")
        factor = _number(last, text)
    milestones = np.asarray([_number(word, text) for word in words])
    if not len(milestones) or np.any(np.diff(milestones) <= 0) or not 0 < factor < 1:
        raise InvalidSetupError(
            f"a step schedule needs rising milestones and a factor between 0 and 1, such as step:30,60,80x0.1, "
            f"got '{text}'"
        )
    return lambda t: factor ** np.searchsorted(milestones, t, side="right").astype(float)


def _one_cycle(length: float, peak: float) -> Callable[[Floats], Floats]:
    if not 0 < peak < 1:
        raise InvalidSetupError(
            f"the peak of a one-cycle schedule must be a share between 0 and 1, got {peak:g}"
        )

    def rate(t: Floats) -> Floats:
        share = np.clip(t / length, 0, 1)
        up = share / peak
        down = 0.5 * (1 + np.cos(np.pi * (share - peak) / (1 - peak)))
        return np.where(share < peak, up, down)

    return rate


def _warmed(rate: Callable[[Floats], Floats], warm_up: float) -> Callable[[Floats], Floats]:
    if not warm_up:
        return rate
    return lambda t: np.where(t < warm_up, np.clip(t / warm_up, 0, 1) * rate(np.maximum(t, warm_up)), rate(t))


def schedule_of(scheduler: Any, num_epochs: float, steps_per_epoch: float = 1.0) -> LearningRateSchedule:
    """The schedule of an object: words, a PyTorch scheduler, a Keras schedule or a function of the epoch.

    A PyTorch scheduler (anything with ``get_last_lr`` and ``step``) is copied and stepped; the original is left
    alone. Of the epochs it has behind it only their number is known: they get its present rate. A Keras schedule, and
    any other function, is called with the step.

    Args:
        scheduler: The object.
        num_epochs: Epochs of the run.
        steps_per_epoch: Calls of the scheduler in an epoch: 1 if it is stepped once an epoch.

    Raises:
        InvalidSetupError: The object is none of these.
    """
    if isinstance(scheduler, LearningRateSchedule):
        return scheduler
    if isinstance(scheduler, str):
        return parse_schedule(scheduler)
    num_calls = max(1, math.ceil(num_epochs * steps_per_epoch))
    if hasattr(scheduler, "get_last_lr") and hasattr(scheduler, "step"):
        found = _stepped(scheduler, num_calls)
    elif callable(scheduler):
        found = np.asarray([float(scheduler(index)) for index in range(num_calls)])
    else:
        raise InvalidSetupError(
            "a schedule must be words such as 'cosine:epochs=90', a PyTorch scheduler, a Keras schedule or a function, "
            f"got {type(scheduler).__name__}"
        )
    top = float(found.max()) or 1.0

    def rate(t: Floats) -> Floats:
        index = np.clip(np.floor(t * steps_per_epoch), 0, num_calls - 1).astype(int)
        return np.asarray(found[index] / top, dtype=float)

    return LearningRateSchedule(text=type(scheduler).__name__, rate=rate, num_epochs=float(num_epochs))


def _stepped(scheduler: Any, num_calls: int) -> Floats:
    optimizer = getattr(scheduler, "optimizer", None)
    groups = getattr(optimizer, "param_groups", [])
    # The twin shares the weights and the optimizer's state: only the rates are its own.
    shared = {id(p): p for group in groups for p in group["params"]}
    shared |= {id(state): state for state in [getattr(optimizer, "state", None)] if state is not None}
    twin = copy.deepcopy(scheduler, shared)
    already = int(getattr(twin, "last_epoch", 0) or 0)
    rates = [float(twin.get_last_lr()[0])]
    for _ in range(num_calls - already - 1):
        if optimizer is not None:
            twin.optimizer._opt_called = (
                True  # the twin's optimizer never runs; PyTorch would warn of the order
            )
        twin.step()
        rates.append(float(twin.get_last_lr()[0]))
    return np.asarray([rates[0]] * already + rates)[:num_calls]
