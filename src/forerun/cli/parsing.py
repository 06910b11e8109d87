"""Parsing of options that are more than a word or a number."""

from __future__ import annotations

import re

from forerun.errors import InvalidSetupError

__all__ = ["parse_input_shape", "parse_numbers", "parse_price_usd_per_hour", "plot_batch_sizes"]

_PRICE = re.compile(r"\$?\s*(\d+(?:\.\d*)?|\.\d+)\s*(?:\$|usd)?\s*(?:/\s*(?:h|hr|hour))?", re.IGNORECASE)
_SHAPE = re.compile(r"\d+(?:\s*[,x]\s*\d+)*,?", re.IGNORECASE)
_MOST_PLOT_BATCH = 1 << 16
_MOST_NUMBER = 100_000


def parse_price_usd_per_hour(text: str) -> float:
    """Price of a device per hour [USD/h].

    >>> parse_price_usd_per_hour("1.89/h")
    1.89

    Raises:
        InvalidSetupError: The text is not a price per hour.
    """
    found = _PRICE.fullmatch(text.strip())
    if found is None:
        raise InvalidSetupError(f"a price must be US dollars per hour, such as 1.89/h, got '{text}'")
    return float(found[1])


def parse_input_shape(text: str) -> tuple[int, ...]:
    """Shape of one sample, without the batch.

    >>> parse_input_shape("3,224,224")
    (3, 224, 224)

    Raises:
        InvalidSetupError: The text is not a list of whole numbers.
    """
    if _SHAPE.fullmatch(text.strip()) is None:
        raise InvalidSetupError(
            f"an input shape must be whole numbers without the batch, such as 3,224,224, got '{text}'"
        )
    return tuple(int(size) for size in re.findall(r"\d+", text))


def parse_numbers(name: str, text: str) -> list[int]:
    """Whole numbers from a list of numbers and ranges.

    >>> parse_numbers("workers", "1:4,8")
    [1, 2, 3, 4, 8]

    Raises:
        InvalidSetupError: A part is neither a whole number of at least 1 nor a range of such numbers.
    """
    found: list[int] = []
    for part in text.split(","):
        ends = re.fullmatch(r"\s*(-?\d+)\s*(?::\s*(-?\d+)\s*)?", part)
        first = int(ends[1]) if ends else 0
        last = int(ends[2] or ends[1]) if ends else 0
        if first < 1 or last < first or last > _MOST_NUMBER:
            raise InvalidSetupError(
                f"{name} must be whole numbers from 1 to {_MOST_NUMBER:,}, or ranges such as 1:32, got '{part.strip()}'"
            )
        found += range(first, last + 1)
    return found


def plot_batch_sizes(batch_size: int, largest_that_fits: float | None) -> tuple[int, ...]:
    """Batch sizes of a plot: the one asked about, and powers of two up to the first that no longer fits.

    Without a known limit, they go up to eight times the batch size.
    """
    end = min(_MOST_PLOT_BATCH, 8 * batch_size if largest_that_fits is None else 2 * largest_that_fits)
    powers = [1 << k for k in range(24) if 1 << k <= max(end, 2 * batch_size)]
    return tuple(sorted({*powers, batch_size}))
