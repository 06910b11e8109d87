"""A learning curve, and the scale on which all forecasters work.

Forecasters see errors: numbers that fall and cannot be negative. A metric that rises becomes

    error = 1 - value          values from 0 to 1
    error = 1 - value / 100    values in per cent
    error = 1 - value / top    any other, top = largest power of ten that holds the values

and one that falls is divided by its first finite value, so that curves of different jobs can be compared; rates of
errors (word errors and alike) are fractions already, or per cent.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from forerun.errors import RecordError

__all__ = [
    "FINAL_SHARE",
    "Curve",
    "ErrorScale",
    "Floats",
    "MetricKind",
    "error_scale",
    "final_error",
    "is_falling_metric",
    "is_rising_metric",
    "is_share_metric",
    "metric_kind",
]

Floats = npt.NDArray[np.float64]

FINAL_SHARE = 0.05
"""The value at the end is the mean over this last share of the points: one evaluation alone is noise."""

_LARGEST_FRACTION = 5.0
"""A rate of errors above this is in per cent: more words may be wrong than there are, but not that many more."""

_RISING_WORDS: tuple[str, ...] = (
    *("acc", "top1", "top5", "top-1", "top-5", "f1", "auc", "map", "bleu", "precision", "recall", "hit"),
    *("score", "iou", "dice", "r2", "ndcg", "exact_match", "correlation"),
)
_UNBOUNDED_WORDS: tuple[str, ...] = ("score", "bleu")
_FALLING_WORDS: tuple[str, ...] = ("loss", "error", "perplexity")
_RATE_OF_ERRORS = re.compile(r"(^|[^a-z])(wer|cer|error_?rate)([^a-z]|$)")
_OVERLAP_WORDS: tuple[str, ...] = ("map", "iou", "dice", "bleu")


class MetricKind(StrEnum):
    """Kinds of metric: each kind has its own scale, and its own way to end."""

    ACCURACY = "accuracy"
    OVERLAP = "overlap"
    """Mean average precision, intersection over union and alike: far from 1 at the end."""
    LOSS = "loss"
    ERROR_RATE = "error rate"
    """Word errors and alike, per word or in per cent; may begin above 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Values of one metric in the course of one run.

    Attributes:
        name: What the run is called.
        metric: Name of the metric.
        epochs: Ascending, above zero, (n,); steps where the file knows no epochs.
        values: The metric, (n,).
        is_rising: Whether larger is better.
        steps: Optimizer steps done at each point, (n,), or None.
        learning_rates: Learning rate at each point, (n,), or None.
        elapsed_s: Time since the start of training at each point [s], (n,), or None.
        unit: "epoch" or "step", what ``epochs`` counts.
        planned_end: Length that the log says the run was set up for, or None.
        notes: What was done to the rows of the file, sentences.
    """

    name: str
    metric: str
    epochs: Floats
    values: Floats
    is_rising: bool
    steps: Floats | None = None
    learning_rates: Floats | None = None
    elapsed_s: Floats | None = None
    unit: str = "epoch"
    planned_end: float | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.epochs) != len(self.values) or not len(self.epochs):
            raise RecordError(
                f"{self.name}: expected as many values as epochs and at least one, "
                f"got {len(self.values)} and {len(self.epochs)}"
            )
        if not np.all(np.isfinite(self.epochs)) or self.epochs[0] < 0 or np.any(np.diff(self.epochs) <= 0):
            where = int(np.argmax(np.diff(self.epochs, prepend=-np.inf) <= 0))
            raise RecordError(
                f"{self.name}: {self.unit}s must be above zero and rise from row to row, "
                f"got {self.epochs[where]:g} in row {where + 1}; keep the rows of one run, in order"
            )

    def __len__(self) -> int:
        return len(self.epochs)

    @property
    def kind(self) -> MetricKind:
        """Kind of the metric, by its name."""
        return metric_kind(self.metric, self.is_rising)

    def first(self, num_points: int) -> Curve:
        """The curve as it was after so many points."""

        def cut(column: Floats | None) -> Floats | None:
            return None if column is None else column[:num_points]

        return replace(
            self,
            epochs=self.epochs[:num_points],
            values=self.values[:num_points],
            steps=cut(self.steps),
            learning_rates=cut(self.learning_rates),
            elapsed_s=cut(self.elapsed_s),
        )

    def steps_per_epoch(self) -> float | None:
        """Optimizer steps of one unit of ``epochs``; None where the file does not say."""
        if self.unit == "step":
            return 1.0
        if self.steps is None or self.epochs[-1] <= 0:
            return None
        return float(self.steps[-1] / self.epochs[-1])

    def epoch_time_s(self) -> float | None:
        """Median time between points per unit of ``epochs`` [s]; None without times."""
        if self.elapsed_s is None or len(self) < 2:
            return None
        rates = np.diff(self.elapsed_s) / np.diff(self.epochs)
        return float(np.median(rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorScale:
    """From values of a metric to errors and back: error = (offset - value) / span, or value / span."""

    is_rising: bool
    span: float

    def errors(self, values: npt.ArrayLike) -> Floats:
        """Errors of values, same shape."""
        found = np.asarray(values, dtype=float) / self.span
        return 1.0 - found if self.is_rising else found

    def values(self, errors: npt.ArrayLike) -> Floats:
        """Values of errors, same shape."""
        found = np.asarray(errors, dtype=float)
        return (1.0 - found if self.is_rising else found) * self.span


def metric_kind(name: str, is_rising: bool) -> MetricKind:
    """The kind of a metric, by its name.

    >>> str(metric_kind("metrics/mAP50-95(B)", True)), str(metric_kind("eval_wer", False))
    ('overlap', 'error rate')
    """
    lowered = name.lower()
    if is_rising:
        is_overlap = any(word in lowered for word in _OVERLAP_WORDS)
        return MetricKind.OVERLAP if is_overlap else MetricKind.ACCURACY
    return MetricKind.ERROR_RATE if _RATE_OF_ERRORS.search(lowered) else MetricKind.LOSS


def error_scale(values: npt.ArrayLike, is_rising: bool, kind: MetricKind = MetricKind.LOSS) -> ErrorScale:
    """The scale of a curve, from the values seen so far.

    Raises:
        RecordError: No finite value, or a falling metric that is not above zero at first.
    """
    found = np.asarray(values, dtype=float)
    found = found[np.isfinite(found)]
    if not len(found):
        raise RecordError("expected at least one number among the values, got none; is the run all NaN?")
    if is_rising:
        top = float(np.max(np.abs(found)))
        return ErrorScale(
            is_rising=True, span=1.0 if top <= 1 else 10.0 ** max(2, math.ceil(math.log10(top)))
        )
    if found[0] <= 0:
        raise RecordError(
            f"a metric that falls must begin above zero, got {found[0]:g}; if larger is better, write the "
            "target with >="
        )
    if kind is MetricKind.ERROR_RATE:
        return ErrorScale(is_rising=False, span=1.0 if float(np.max(found)) <= _LARGEST_FRACTION else 100.0)
    return ErrorScale(is_rising=False, span=float(found[0]))


def is_rising_metric(name: str) -> bool:
    """True if a metric of this name is better when larger; losses, errors and unknown words are not."""
    lowered = name.lower()
    return not is_falling_metric(name) and any(word in lowered for word in _RISING_WORDS)


def is_falling_metric(name: str) -> bool:
    """True if a metric of this name is better when smaller, beyond doubt."""
    return any(word in name.lower() for word in _FALLING_WORDS)


def is_share_metric(name: str) -> bool:
    """True if a metric of this name is a share of something, at most 1 or 100 per cent."""
    return is_rising_metric(name) and not any(word in name.lower() for word in _UNBOUNDED_WORDS)


def final_error(errors: Floats) -> float:
    """Mean of the last ``FINAL_SHARE`` of a whole run, at least one point."""
    return float(np.mean(errors[-max(1, round(FINAL_SHARE * len(errors))) :]))
