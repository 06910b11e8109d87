"""The largest batch that fits, searched by real runs: the batch to try next, from those tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil, floor

_GROWTH = 1.05
_MOST_TRIES = 12


def next_batch_to_try(tried: Mapping[int, bool], first: int, *, tolerance: float = 0.06) -> int | None:
    """The batch size to run next, None when the answer is known well enough.

    From the first guess the search goes up while batches fit, and down while they do not, by 5 %, 10 %, 22 % ... (the
    growth is squared each time); between the largest that fits and the smallest that does not it halves, until they are
    less than ``tolerance`` of the former apart, or neighbours.

    Args:
        tried: Whether each batch size that was run did fit.
        first: First batch size to try, such as the predicted one.
        tolerance: Relative width of the bracket that is good enough.
    """
    fitting = [size for size, fits in tried.items() if fits]
    failing = [size for size, fits in tried.items() if not fits]
    if not tried:
        return max(1, first)
    if len(tried) >= _MOST_TRIES:
        return None
    if not failing:
        growth = _growth(len(fitting))
        return max(max(fitting) + 1, ceil(max(fitting) * growth))
    if not fitting:
        growth = _growth(len(failing))
        smaller = min(min(failing) - 1, floor(min(failing) / growth))
        return smaller if smaller >= 1 else None
    low, high = max(fitting), min(failing)
    if high - low <= max(1.0, tolerance * low):  # also where a smaller one failed than one that fitted
        return None
    return (low + high) // 2


def _growth(num_tried: int) -> float:
    return float(_GROWTH ** (2 ** (num_tried - 1)))


def largest_batch(
    try_batch: Callable[[int], bool | None], first: int, known: Mapping[int, bool] | None = None
) -> dict[int, bool]:
    """Runs the search; returns the outcome of each batch size.

    Args:
        try_batch: Runs a step at a batch size; whether it fitted, None to give up.
        first: First batch size to try.
        known: Earlier outcomes by batch size, which are not repeated.
    """
    tried = dict(known or {})
    while (size := next_batch_to_try(tried, first)) is not None:
        fits = try_batch(size)
        if fits is None:
            break
        tried[size] = fits
    return tried
