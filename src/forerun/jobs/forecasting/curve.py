"""A learning curve, a target on it, its cleaning, and the scale on which all forecasters work.

Forecasters see errors: numbers that fall and cannot be negative. A metric that rises becomes

    error = 1 - value          values from 0 to 1
    error = 1 - value / 100    values in per cent
    error = 1 - value / top    any other, top = largest power of ten that holds the values

and one that falls is divided by its first finite value, so that curves of different jobs can be compared; rates of
errors (word errors and alike) are fractions already, or per cent.

Outliers: as Optimus does, a point outside [min of the next points, max of the points before] is replaced by the mean of
its neighbours, but only if it also stands out from the running median by more than ``OUTLIER_SPREADS`` times the
spread of the others: a plain drop of the learning rate is no outlier.

Source of the rule: Peng et al. 2018, EuroSys, section 3.1; of the spread: median absolute deviation, Hampel 1974.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError, RecordError

Floats = npt.NDArray[np.float64]

FINAL_SHARE = 0.05
"""The value at the end is the mean over this last share of the points: one evaluation alone is noise."""

_LARGEST_FRACTION = 5.0
"""A rate of errors above this is in per cent: more words may be wrong than there are, but not that many more."""

_RISING_WORDS: tuple[str, ...] = (
    *("acc", "top1", "top5", "top-1", "top-5", "f1", "auc", "map", "bleu", "precision", "recall", "hit"),
    *("score", "iou", "meaniu", "dice", "r2", "ndcg", "mrr", "rouge", "exact_match", "correlation"),
    *("ep_rew", "reward", "return"),
)
_UNBOUNDED_WORDS: tuple[str, ...] = ("score", "bleu", "ep_rew", "reward", "return")
_FALLING_WORDS: tuple[str, ...] = ("loss", "error", "perplexity")
_RATE_OF_ERRORS = re.compile(r"(^|[^a-z])(wer|cer|error_?rate)([^a-z]|$)")
_AVERAGE_PRECISION = re.compile(r"(^|[^a-z])ap(\d*|[sml])$")
_OVERLAP_WORDS: tuple[str, ...] = ("map", "iou", "dice", "bleu")


class MetricKind(StrEnum):
    """Kinds of metric: each kind has its own scale, and its own way to end."""

    ACCURACY = "accuracy"
    OVERLAP = "overlap"
    """Mean average precision, intersection over union and alike: far from 1 at the end."""
    LOSS = "loss"
    ERROR_RATE = "error rate"
    """Word errors and alike, per word or in per cent; may begin above 1."""


_COLUMNS = ("epochs", "values", "steps", "learning_rates", "elapsed_s", "training_losses")
"""Fields of a curve that have a value at each point."""


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
        training_losses: Median training loss since the point before, (n,), beside a metric of validation; or None.
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
    training_losses: Floats | None = None
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
        return self.rows(slice(num_points))

    def num_seen(self, share: float) -> int:
        """Points up to a share of the run."""
        return max(1, int(np.searchsorted(self.epochs, share * self.epochs[-1] * (1 + 1e-9), "right")))

    def rows(self, which: slice | npt.NDArray[np.bool_]) -> Curve:
        """The curve of some of its points."""
        columns = {name: getattr(self, name) for name in _COLUMNS}
        cut: dict[str, Any] = {name: None if c is None else c[which] for name, c in columns.items()}
        return replace(self, **cut)

    def reached(self, target: Target | None) -> float | None:
        """First epoch at which a target is reached; None if it never is."""
        found = zip(self.epochs.tolist(), self.values.tolist(), strict=True)
        return next((e for e, value in found if target is not None and target.is_reached_by(value)), None)

    @property
    def best(self) -> float:
        """Best value so far."""
        return float(np.max(self.values) if self.is_rising else np.min(self.values))

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
    """The scale between values of a metric and errors: error = (offset - value) / span, or value / span."""

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
        is_overlap = any(word in lowered for word in _OVERLAP_WORDS) or _AVERAGE_PRECISION.search(lowered)
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
            f"a metric that falls must begin above zero, which is its scale, got {found[0]:g}; name another metric, "
            "or, if larger is better as of a reward, write the target with >="
        )
    if kind is MetricKind.ERROR_RATE:
        return ErrorScale(is_rising=False, span=1.0 if float(np.max(found)) <= _LARGEST_FRACTION else 100.0)
    return ErrorScale(is_rising=False, span=float(found[0]))


def is_rising_metric(name: str) -> bool:
    """True if a metric of this name is better when larger; losses, errors and unknown words are not."""
    lowered = name.lower()
    is_named = any(word in lowered for word in _RISING_WORDS) or _AVERAGE_PRECISION.search(lowered)
    return not is_falling_metric(name) and bool(is_named)


def is_falling_metric(name: str) -> bool:
    """True if a metric of this name is better when smaller, beyond doubt."""
    return any(word in name.lower() for word in _FALLING_WORDS)


def is_share_metric(name: str) -> bool:
    """True if a metric of this name is a share of something, at most 1 or 100 per cent."""
    return is_rising_metric(name) and not any(word in name.lower() for word in _UNBOUNDED_WORDS)


def final_error(errors: Floats) -> float:
    """Mean of the last ``FINAL_SHARE`` of a whole run, at least one point."""
    return float(np.mean(errors[-max(1, round(FINAL_SHARE * len(errors))) :]))


_TARGET = re.compile(r"\s*([^<>=]+?)\s*(>=|<=|>|<|=)\s*([-+]?[\d.]+(?:[eE][-+]?\d+)?)\s*(%?)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A value that a metric is to reach.

    Attributes:
        metric: Name of the metric.
        value: The value.
        is_rising: Whether it is reached from below.
        is_percent: Whether the value was given in per cent, and holds for a metric that is logged so, too.
    """

    metric: str
    value: float
    is_rising: bool
    is_percent: bool = False

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
    # A NaN is the number that is not equal to itself.
    if found is None or value != value or is_rising is None:
        raise InvalidSetupError(
            f"a target must compare a metric with a number, such as 'accuracy>=0.92' or 'loss<=1.5', got '{text}'"
        )
    is_percent = bool(found[4])
    value = value / 100 if is_percent else value
    return Target(metric=found[1], value=value, is_rising=is_rising, is_percent=is_percent)


def _sense(metric: str, sign: str) -> bool | None:
    """True if the metric is to rise; None where neither sign nor name says it."""
    if sign != "=":
        return sign.startswith(">")
    is_rising = is_rising_metric(metric)
    return is_rising if is_rising or is_falling_metric(metric) else None


OUTLIER_SPREADS = 5.0
"""Distance from the running median, in robust standard deviations, from which a lonely point is replaced."""

_WINDOW = 5
_RUNAWAY_FACTOR = 2.0
"""A loss above so many times both its best and its beginning, and staying there, has run away."""

_COLLAPSE_SHARE = 0.75
_COLLAPSE = 0.2
_FEWEST_COLLAPSED = 4
_COLLAPSED_SHARE = 0.2
"""A metric that rises has collapsed if it lost three quarters of what it had gained, no less than a fifth of its
scale, and stays there for a fifth of the points seen, four or more: detectors and fine-tunings fall for a few epochs,
and come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanCurve:
    """A curve whose values are all numbers.

    Attributes:
        curve: The rows that hold numbers, outliers replaced.
        num_missing: Rows without a number that were dropped.
        has_diverged: Whether the run ran away: it ends in NaN or far above where it was.
        notes: What a reader should know, sentences.
    """

    curve: Curve
    num_missing: int
    has_diverged: bool
    notes: tuple[str, ...]


def clean(curve: Curve) -> CleanCurve | None:
    """Drops rows without numbers, replaces outliers and looks for divergence; None if no number is left."""
    finite = np.isfinite(curve.values)
    num_missing = int((~finite).sum())
    if not finite.any():
        return None
    kept = curve.rows(finite)
    ends_missing = not finite[-1] and len(curve) - 1 - int(np.flatnonzero(finite)[-1]) >= 2
    values, num_outliers = without_outliers(kept.values)
    errors = -values if curve.is_rising else values
    notes = []
    if num_missing:
        notes.append(f"{num_missing} rows without a number were left out")
    if num_outliers:
        notes.append(f"{num_outliers} lonely outliers were replaced by the mean of their neighbours")
    return CleanCurve(
        curve=replace(kept, values=values),
        num_missing=num_missing,
        has_diverged=bool(ends_missing or ran_away(errors, curve.is_rising)),
        notes=tuple(notes),
    )


def running_median(values: Floats) -> Floats:
    """Median over a centred window that shrinks at the ends, (n,)."""
    half = _WINDOW // 2
    return np.asarray(
        [np.median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))], dtype=float
    )


def without_outliers(values: Floats) -> tuple[Floats, int]:
    """Values with lonely outliers replaced by the mean of their neighbours, and how many there were."""
    if len(values) < 2 * _WINDOW - 1:
        return values, 0
    distance = np.abs(values - running_median(values))
    spread = 1.4826 * float(np.median(np.abs(np.diff(values)))) / np.sqrt(2)
    if spread <= 0:
        return values, 0
    found = values.copy()
    num = 0
    for i in range(1, len(values) - 1):
        near = values[[i - 1, i + 1]]
        # Neighbours that differ as much as the point from them are a fall of the curve, not an outlier.
        alone = abs(values[i] - near.mean()) > 2 * abs(near[1] - near[0])
        if distance[i] > OUTLIER_SPREADS * spread and alone:
            found[i] = near.mean()
            num += 1
    return found, num


def evaluation_noise(errors: Floats) -> float:
    """Standard deviation of single evaluations around the trend, from the second half of what was seen.

    Differences of neighbours have 1.41 times the spread; their median is not moved by the trend or by a drop.
    """
    steps = np.diff(errors[len(errors) // 2 :])
    if len(steps) < 2:
        return 0.0
    return 1.4826 * float(np.median(np.abs(steps - np.median(steps)))) / float(np.sqrt(2))


def relative_noise(errors: Floats) -> float:
    """Spread of single evaluations over their level, both in the second half of what was seen; 0 to 1.

    Noise falls with the level: an accuracy near 1 from n images varies by less than one near one half.
    """
    level = float(np.median(errors[len(errors) // 2 :]))
    return min(1.0, evaluation_noise(errors) / level) if level > 0 else 0.0


_STILL = 1e-9


def does_not_move(errors: Floats) -> bool:
    """True if all errors are the same."""
    return float(np.ptp(errors)) <= _STILL * max(1.0, float(np.max(np.abs(errors))))


def is_not_learning(errors: Floats) -> bool:
    """True if the better half of the run is no better than its first point."""
    return float(np.median(np.sort(errors[1:])[: max(1, len(errors) // 2)])) >= float(errors[0])


def ran_away(errors: Floats, is_rising: bool) -> bool:
    """True if the last points are, and stay, far worse than the best stretch before them."""
    num_late = max(_FEWEST_COLLAPSED if is_rising else 2, round(_COLLAPSED_SHARE * len(errors)))
    if len(errors) < _FEWEST_COLLAPSED + num_late:
        return False
    smooth = running_median(errors)
    best, first, late = float(smooth.min()), float(smooth[0]), float(errors[-num_late:].min())
    if is_rising:  # errors are minus the metric
        gained, top = first - best, float(np.max(np.abs(errors)))
        scale = 1.0 if top <= 1 else top
        return late - best >= max(_COLLAPSE_SHARE * gained, _COLLAPSE * scale) and gained > 0
    return late > _RUNAWAY_FACTOR * max(best, first, 1e-12)
