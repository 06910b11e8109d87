"""Learning-rate schedules as relative rates per epoch: from words, from logged rates, or from a framework's own object.

    constant
    step:30,60,80x0.1                milestones in epochs and the factor at each
    cosine:epochs=90[,min=0.01]      half a cosine from 1 to min
    linear:epochs=90[,min=0]         a straight line
    poly:epochs=38,power=2[,min=0]   (1 - t / T)^power
    exponential:0.95                 the factor of each epoch
    onecycle:epochs=30[,peak=0.3]    up to the peak at this share, then down by a cosine
    trapezoid:epochs=90,decay_from=60[,decay_to=90,min=0]   level, then a straight line to min; also called wsd
    reduce-on-plateau                follows the metric: not known beforehand
    logged[:COLUMN]                  the rates in the file; those to come continue their shape
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

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.jobs.forecasting.curve import Floats

SCHEDULE_WORDS = (
    *("constant", "step", "cosine", "linear", "poly", "exponential", "onecycle", "trapezoid"),
    "reduce-on-plateau",
)
LOGGED = "logged"
"""The word for the rates in the file of the run."""

_UNKNOWN = "unknown"

_OTHER_WORDS = {
    "polynomial": "poly",
    "one-cycle": "onecycle",
    "wsd": "trapezoid",
    "reduceonplateau": "reduce-on-plateau",
    "reducelronplateau": "reduce-on-plateau",
    "reduce_on_plateau": "reduce-on-plateau",
}
_LIKE = 0.02  # of the peak: logged rates that far from a shape are of that shape
_LOWEST = (0.0, 0.01, 0.1)
_FEWEST_RATES, _ON_SHAPE = 4, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Relative learning rate as a function of the epoch.

    Attributes:
        text: How it was given.
        rate: Relative rate at a time in epochs, from arrays to arrays.
        num_epochs: Length of the run if the schedule fixes it.
        follows_metric: Whether the rate falls when the metric stalls, so that nobody knows it beforehand.
        notes: What a reader must know, sentences.
    """

    text: str
    rate: Callable[[Floats], Floats]
    num_epochs: float | None = None
    follows_metric: bool = False
    notes: tuple[str, ...] = ()

    def rates(self, epochs: npt.ArrayLike) -> Floats:
        """Rates in the middle of the stretches that end at ``epochs``, (n,)."""
        ends = np.asarray(epochs, dtype=float)
        begins = np.concatenate([[0.0], ends[:-1]])
        return np.maximum(self.rate((begins + ends) / 2), 0.0)


def parse_schedule(text: str, epochs: float | None = None) -> LearningRateSchedule:
    """A schedule from words, with the length of the run where they do not say it.

    >>> [float(r) for r in parse_schedule("step:2x0.1").rates([1, 2, 3])]
    [1.0, 1.0, 0.1]

    Raises:
        InvalidSetupError: An unknown word, or impossible numbers.
    """
    word, _, rest = text.strip().partition(":")
    word = _OTHER_WORDS.get(word.strip().lower(), word.strip().lower())
    if word not in SCHEDULE_WORDS:
        raise InvalidSetupError(
            f"unknown schedule '{text}'{near_matches(word, SCHEDULE_WORDS)}; expected {', '.join(SCHEDULE_WORDS)}, "
            "such as cosine:epochs=90 or step:30,60,80x0.1"
        )
    plain, options = _parts(text, rest)
    if epochs is not None:
        options.setdefault("epochs", epochs)
    warm_up = options.pop("warmup", 0.0)
    if warm_up < 0:
        raise InvalidSetupError(
            f"warmup of a schedule must be zero or more epochs, got {warm_up:g} in '{text}'"
        )
    rate, num_epochs = _shape(word, plain, options, text, warm_up)
    if options:
        raise InvalidSetupError(f"the schedule '{word}' has no option {', '.join(options)}, got '{text}'")
    follows = word == "reduce-on-plateau"
    return LearningRateSchedule(
        text=text.strip(), rate=_warmed(rate, warm_up), num_epochs=num_epochs, follows_metric=follows
    )


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
        raise InvalidSetupError(f"a schedule needs numbers, as in step:30,60x0.1, got '{text}' in '{whole}'")
    return value


def _length(options: dict[str, float], text: str) -> float:
    length = options.pop("epochs", math.nan)
    if not length > 0:
        raise InvalidSetupError(
            f"this schedule needs its length, such as cosine:epochs=90, got '{text}'; give --epochs"
        )
    return length


def _share_left(length: float, begin: float) -> Callable[[Floats], Floats]:
    return lambda t: np.clip(1 - (t - begin) / max(length - begin, 1e-9), 0.0, 1.0)


def _shape(
    word: str, plain: list[str], options: dict[str, float], text: str, warm_up: float
) -> tuple[Callable[[Floats], Floats], float | None]:
    if word in ("constant", "reduce-on-plateau"):
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
    if word == "trapezoid":
        return _trapezoid(length, options, low, text), length
    left = _share_left(length, warm_up)
    if word == "cosine":
        return _between(low, _cosine(left)), length
    power = options.pop("power", 1.0) if word == "poly" else 1.0
    return _between(low, lambda t: left(t) ** power), length


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


def _trapezoid(length: float, options: dict[str, float], low: float, text: str) -> Callable[[Floats], Floats]:
    begin, end = options.pop("decay_from", math.nan), options.pop("decay_to", length)
    if not 0 <= begin < end:
        raise InvalidSetupError(
            f"a trapezoid needs decay_from, where its rate begins to fall, before decay_to, got '{text}'"
        )
    return lambda t: low + (1 - low) * np.clip((end - t) / (end - begin), 0.0, 1.0)


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


def is_logged(schedule: Any) -> bool:
    """True if a schedule is the word for the rates in the file of the run."""
    return isinstance(schedule, str) and schedule.strip().partition(":")[0].strip().lower() == LOGGED


def rate_column(schedule: Any) -> str | None:
    """The column that "logged:COLUMN" names; None for the usual ones."""
    return schedule.partition(":")[2].strip() or None if is_logged(schedule) else None


def schedule_from(schedule: Any, epochs: float | None) -> LearningRateSchedule | None:
    """A schedule from words or an object; None for none and for "unknown"."""
    if schedule is None or (isinstance(schedule, str) and schedule.strip() == _UNKNOWN):
        return None
    if not isinstance(schedule, (str, LearningRateSchedule)) and epochs is None:
        raise InvalidSetupError(
            "a schedule that is an object needs epochs as well, to know how far to follow it"
        )
    return (
        parse_schedule(schedule, epochs)
        if isinstance(schedule, str)
        else schedule_of(schedule, epochs or 1.0)
    )


def logged_schedule(epochs: Floats, rates: Floats, end: float) -> LearningRateSchedule:
    """The schedule of a run from the rates that it logged; those to come continue the shape of those behind its peak.

    Shapes: constant, a straight line or a cosine that ends with the run, at 0, 1 or 10 % of the peak, or a power of the
    epoch. Rates that follow none of them within 2 % of the peak stay where they are.

    Args:
        epochs: Points of the log, (n,).
        rates: Learning rate at each, (n,).
        end: Epoch at which the run ends.

    Raises:
        InvalidSetupError: A rate that is no number, or none above zero.
    """
    peak = float(np.max(rates)) if len(rates) and np.all(np.isfinite(rates)) else 0.0
    if peak <= 0:
        raise InvalidSetupError("a logged learning rate needs numbers above zero; give the schedule in words")
    relative = np.maximum(rates / peak, 0.0)
    begin = int(np.flatnonzero(relative >= 1 - 1e-9)[0])
    shape, words, _ = _shape_of(epochs[begin:], relative[begin:], end, begin == 0)
    return _continued(epochs, relative, shape, end, f"logged rates: {words}")


def _continued(
    epochs: Floats, relative: Floats, shape: Callable[[Floats], Floats], end: float, *notes: str
) -> LearningRateSchedule:
    """Logged rates, and behind them those of a shape."""
    last = float(epochs[-1])
    return LearningRateSchedule(
        text=LOGGED,
        rate=lambda t: np.where(t <= last, np.interp(t, epochs, relative), shape(t)),
        num_epochs=end,
        notes=notes,
    )


def followed_schedule(epochs: Floats, rates: Floats, end: float | None) -> LearningRateSchedule | None:
    """The schedule that rates which fall already follow, and its end where that is not known; None if they follow none.

    A straight line or a cosine is drawn from the peak through the last rate; the others must lie on it within 0.1 % of
    the peak, and no shape with another end may fit nearly as well.

    Args:
        epochs: Points of the log, (n,).
        rates: Learning rate at each, (n,).
        end: Epoch at which the run ends; None if not known.
    """
    peak = float(np.max(rates)) if len(rates) and np.all(np.isfinite(rates)) else 0.0
    begin = int(np.argmax(rates))
    behind, relative = epochs[begin:], rates[begin:] / (peak or 1.0)
    if peak <= 0 or len(behind) < _FEWEST_RATES or relative[-1] > 1 - _LIKE:
        return None
    like = None
    if end is not None:
        end = max(end, float(epochs[-1]))
        _, words, miss = _shape_of(behind, relative, end, begin == 0)
        # Lines and powers look alike at first: a power counts where it is exact, or where no line fits.
        near, exact = (_ON_SHAPE, 1e-5) if "times" in words else (_LIKE, _ON_SHAPE)
        if miss <= near and "constant" not in words:
            like = logged_schedule(epochs, rates, end)
            if miss <= exact:
                return like
    # The points next to the peak may be the last of a warm-up.
    skips = range(min(3, len(behind) - _FEWEST_RATES + 1))
    found = (_on_shape(epochs, rates, end, begin, skip) for skip in skips)
    return next((one for one in found if one is not None), like)


def _on_shape(
    epochs: Floats, rates: Floats, end: float | None, begin: int, skip: int
) -> LearningRateSchedule | None:
    """The line or cosine that rates lie on from some points behind their peak on; None for none, or for several."""
    peak, begin = float(np.max(rates)), begin + skip
    behind, relative = epochs[begin:], rates[begin:] / float(rates[begin])
    # The rate of an epoch may be that of its beginning, and the peak one point before the first of a log.
    starts = [float(behind[0]), 2 * float(behind[0]) - float(behind[1])][: 1 + (begin == 0)]
    # Any end would do for a line to an unknown height: 10 % is left to cosines, which bend.
    shapes = [(low, bends) for low in _LOWEST for bends in (False, True) if bends or low <= _LOWEST[1]]
    fits = [_end_of(behind, relative, start, *shape) for start in starts for shape in shapes]
    best, found_end, shape, words = min(fits, key=lambda fit: fit[0])
    near = [end for miss, end, *_ in fits if miss <= max(3 * best, 1e-5)]
    if best > _ON_SHAPE or max(near) > 1.03 * min(near):
        return None
    whole = round(found_end)
    found_end = float(whole) if abs(found_end - whole) < 0.002 * found_end else found_end
    # A run may be stopped before its rate is at its end, not go on behind it.
    if end is not None and end > found_end + 1.5 * (epochs[-1] - epochs[-2]):
        return None
    note = f"the length of the run was not given: taken as {found_end:.4g}, where its learning rate ends"
    notes = (f"logged rates: {words}", *([note] if end is None else []))
    height = float(rates[begin]) / peak
    end_epoch = max(found_end, float(epochs[-1]))
    return _continued(epochs, rates / peak, lambda t: height * shape(t), end_epoch, *notes)


_Fit = tuple[float, float, Callable[[Floats], Floats], str]


def _end_of(epochs: Floats, relative: Floats, start: float, low: float, bends: bool) -> _Fit:
    """Largest distance of rates from a shape through the last of them, the run's last epoch by it, itself, its name."""
    words = f"a {'cosine' if bends else 'straight line'} to {low:.0%} of the peak"
    first, last, scale = float(epochs[0]), float(epochs[-1]), 1.0
    for _ in range(5):
        share = (float(relative[-1]) * scale - low) / (1 - low)
        if not 0 < share < 1:
            return math.inf, last, np.ones_like, words
        left = math.acos(1 - 2 * share) / math.pi if bends else share
        zero = start + (last - start) / (1 - left)
        line = _share_left(zero, start)
        shape = _between(low, _cosine(line) if bends else line)
        scale = float(shape(epochs[:1])[0])
    miss = float(np.max(np.abs(shape(epochs) / scale - relative)))
    is_by_epoch = start == first == 1 and bool(np.all(epochs == np.round(epochs)))
    # Rates of the beginning of each epoch: the last epoch is the one before the rate is at its end.
    return miss, zero - is_by_epoch, lambda t: shape(t) / scale, words


def _shape_of(
    epochs: Floats, relative: Floats, end: float, is_whole: bool
) -> tuple[Callable[[Floats], Floats], str, float]:
    """The shape that the rates behind their peak follow best, its name, and the largest distance from it.

    Where the peak is the first point of a log (``is_whole``), the shape may have begun before it.
    """
    begin = float(epochs[0])
    shapes: dict[str, Callable[[Floats], Floats]] = {"constant so far, and taken as such": np.ones_like}
    for start in (begin, *(begin * np.linspace(0.0, 0.9, 10) if is_whole else ())):
        left = _share_left(end, float(start))
        of_start = {f"a straight line to {low:.0%} of the peak": _between(low, left) for low in _LOWEST}
        of_start |= {f"a cosine to {low:.0%} of the peak": _between(low, _cosine(left)) for low in _LOWEST}
        for name, shape in of_start.items():
            scaled = _scaled(shape, begin)
            if name not in shapes or _miss(scaled, epochs, relative) < _miss(shapes[name], epochs, relative):
                shapes[name] = scaled
    if len(epochs) > 1 and relative[-1] > 0:
        factor = float(relative[-1]) ** (1 / max(float(epochs[-1]) - begin, 1e-9))
        shapes[f"{factor:.4g} times the rate each epoch"] = lambda t: factor ** (t - begin)
    misses = {name: _miss(shape, epochs, relative) for name, shape in shapes.items()}
    best = min(misses, key=lambda name: misses[name])
    # A wrong shape is worse than none: what the rate does next is then not known.
    if misses[best] > _LIKE:
        held = float(relative[-1])
        kept = "they follow no known shape; the last one is kept"
        return lambda t: np.full(np.shape(t), held), kept, misses[best]
    return shapes[best], best, misses[best]


def _miss(shape: Callable[[Floats], Floats], epochs: Floats, relative: Floats) -> float:
    return float(np.max(np.abs(shape(epochs) - relative)))


def _scaled(shape: Callable[[Floats], Floats], begin: float) -> Callable[[Floats], Floats]:
    height = float(shape(np.asarray([begin]))[0]) or 1.0
    return lambda t: shape(t) / height


def _cosine(left: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda t: 0.5 * (1 - np.cos(np.pi * left(t)))


def _between(low: float, share: Callable[[Floats], Floats]) -> Callable[[Floats], Floats]:
    return lambda t: low + (1 - low) * share(t)


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
    # A schedule of zeros has no peak to divide by.
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
            # The twin's optimizer never runs; PyTorch would warn of the order.
            twin.optimizer._opt_called = True
        twin.step()
        rates.append(float(twin.get_last_lr()[0]))
    return np.asarray([rates[0]] * already + rates)[:num_calls]
