"""A target such as ``accuracy>=0.92``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from forerun.convergence.curve import is_falling_metric, is_rising_metric
from forerun.errors import InvalidSetupError

__all__ = ["Target", "parse_target"]

_TARGET = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|>|<|=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A value that a metric is to reach.

    Attributes:
        metric: Name of the metric.
        value: The value.
        is_rising: Whether it is reached from below.
    """

    metric: str
    value: float
    is_rising: bool

    def is_reached_by(self, value: float) -> bool:
        """True if a value is as good as the target."""
        return value >= self.value if self.is_rising else value <= self.value

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.is_rising else '<='} {self.value:g}"


def parse_target(text: str) -> Target:
    """A target from text.

    An equals sign is read in the sense of the metric, where its name says it.

    >>> str(parse_target("accuracy>=0.92")), str(parse_target("val_loss=1.5"))
    ('accuracy >= 0.92', 'val_loss <= 1.5')

    Raises:
        InvalidSetupError: The text is no comparison of a metric with a number.
    """
    found = _TARGET.fullmatch(text)
    try:
        value = float(found[3]) if found else float("nan")
    except ValueError:
        value = float("nan")
    is_rising = None if found is None else _sense(found[1], found[2])
    if found is None or value != value or is_rising is None:
        raise InvalidSetupError(
            f"a target must compare a metric with a number, such as 'accuracy>=0.92' or 'loss<=1.5', got '{text}'"
        )
    return Target(
        metric=found[1],
        value=value / 100 if found[4] else value,
        is_rising=is_rising,
    )


def _sense(metric: str, sign: str) -> bool | None:
    """True if the metric is to rise; None where neither sign nor name says it."""
    if sign != "=":
        return sign.startswith(">")
    if is_rising_metric(metric):
        return True
    return False if is_falling_metric(metric) else None
