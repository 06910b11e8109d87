"""Figures in the output of a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.errors import near_matches
from forerun.profiling.launch import OutputLine
from forerun.tuning.space import Metric

__all__ = ["USUAL_METRICS", "Reading", "find_metric", "missing_metric", "read_metric"]

USUAL_METRICS = (
    "val_acc",
    "val_accuracy",
    "test_acc",
    "test_accuracy",
    "eval_accuracy",
    "accuracy",
    "acc",
    "val_loss",
    "test_loss",
    "eval_loss",
)
"""Names of metrics to look for if the user names none, best first."""

_MOST_NAMES = 8
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)"
_NAMED = re.compile(rf"([A-Za-z_][\w/.-]*)[\"']?\s*[:=]\s*{_NUMBER}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A printed value.

    Attributes:
        time_s: Time of printing, monotonic clock [s].
        value: The value; a share if it was printed in per cent.
    """

    time_s: float
    value: float


def read_metric(name: str, lines: Sequence[OutputLine]) -> tuple[Reading, ...]:
    """All values of a metric in the order of printing, from ``name=0.8``, ``name: 80 %``, ``'name': 0.8`` or JSON."""
    pattern = re.compile(rf"(?<![\w-])[\"']?{re.escape(name)}[\"']?\s*[:=]?\s*{_NUMBER}", re.IGNORECASE)
    found = []
    for line in lines:
        for match in pattern.finditer(line.text):
            value = float(match[1]) / (100.0 if match[2] else 1.0)
            found.append(Reading(time_s=line.time_s, value=value))
    return tuple(found)


def missing_metric(name: str, lines: Sequence[OutputLine]) -> str:
    """A sentence about a metric that a whole run did not print, with the figures that the run did print."""
    names = dict.fromkeys(match[1] for line in lines for match in _NAMED.finditer(line.text))
    printed = (
        f"it printed {', '.join(list(names)[:_MOST_NAMES])}" if names else "it printed no figure by name"
    )
    return f"the script printed no '{name}=VALUE'; {printed}{near_matches(name, list(names))}"


def find_metric(lines: Sequence[OutputLine]) -> Metric | None:
    """The first of the usual metrics that the lines have."""
    for name in USUAL_METRICS:
        if read_metric(name, lines):
            return Metric.named(name)
    return None
