"""The one place where rows are split and errors are computed.

Splits separate families of models, devices or configurations, never single rows: the same network measured
twice, or its sibling, on both sides of a split would be an answer copied from the question.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from forerun.base.errors import RecordError
from forerun.base.extras import plugin, plugin_names
from forerun.evidence.records.model_names import canonical_network
from forerun.evidence.records.step_record import StepRecord
from forerun.graph.graph import Graph
from forerun.question.devices.device import Device
from forerun.question.setup import TrainingSetup

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Case = tuple[Graph, Device, TrainingSetup]

BASELINES = "forerun.baselines"
"""Entry points of the predictors that accuracy statements print beside ours: ``(cases) -> list[Baseline]``."""


RowsT = TypeVar("RowsT", bound="Rows")
RowsOf = TypeVar("RowsOf", bound="Rows", contravariant=True)


class Rows(Protocol):
    """Features of n measured things, in whatever columns a regressor reads."""

    def __len__(self) -> int:
        """Number of rows."""
        ...

    def take(self, rows: npt.NDArray[np.int64]) -> Self:
        """The rows with these indices, in their order."""
        ...


class Regressor(Protocol[RowsOf]):
    """Predicts times from features: of steps from whole-model figures, of layers from their sizes.

    A regressor starts unfitted; ``predict`` before ``fit`` is an error unless nothing is fitted. Fitting
    again forgets the first fit. The same input gives the same output.
    """

    def fit(self, features: RowsOf, step_time_s: Floats) -> None:
        """Learn from n rows; ``step_time_s`` is (n,) and positive."""
        ...

    def predict(self, features: RowsOf) -> Floats:
        """Positive times [s], (n,)."""
        ...


@runtime_checkable
class FitsAll(Protocol):
    """A regressor whose class fits several of its kind in less time than one after the other."""

    @classmethod
    def fit_all(cls, unfitted: Sequence[Any], tables: Sequence[tuple[Any, Floats]]) -> None:
        """Fit each to its own features and times."""
        ...


class Baseline(NamedTuple):
    """A simple predictor of steps.

    Attributes:
        name: Its name in tables.
        make: Makes an unfitted one.
        rows: Features of the steps in its own columns, n rows.
        is_fitted: False for a rule that has nothing to learn.
    """

    name: str
    make: Callable[[], Regressor[Any]]
    rows: Rows
    is_fitted: bool = True


def baselines_of(cases: Sequence[Case]) -> list[Baseline]:
    """The baselines of all installed packages for steps given as (graph, device, setup)."""
    return [one for source in plugin_names(BASELINES) for one in plugin(BASELINES, source)(cases)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows to fit on and rows to test on.

    Attributes:
        name: Name of the held-out part.
        fit: Indices of the rows to fit on.
        test: Indices of the rows to test on.
    """

    name: str
    fit: Ints
    test: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorMetrics:
    """Errors of n predictions; relative errors are fractions, the others in the unit of the values.

    Attributes:
        n: Number of rows.
        mape: Mean of |predicted - actual| / actual.
        median_ape: Median of |predicted - actual| / actual.
        p90_ape: 90th percentile of |predicted - actual| / actual.
        rmse: Root of the mean squared error.
        mae: Mean absolute error.
        r2: 1 - squared error / squared deviation from the mean; None if all actual values are equal.
        coverage_90: Share of rows inside their 90 % interval; None without intervals.
    """

    n: int
    mape: float
    median_ape: float
    p90_ape: float
    rmse: float
    mae: float
    r2: float | None
    coverage_90: float | None


def family_folds(records: Sequence[StepRecord], k: int = 5, seed: int = 0) -> tuple[Split, ...]:
    """Splits, k of them, that each hold out whole families, with about equally many rows.

    Families are shuffled by the seed and then go, largest first, to the fold with the fewest rows.
    """
    return group_folds([record.family for record in records], k, seed, what="families")


def group_folds(
    keys: Sequence[Hashable], k: int, seed: int = 0, *, what: str = "groups"
) -> tuple[Split, ...]:
    """Splits, k of them, that each hold out whole groups of rows with equal keys, about equally many rows each."""
    rows_of = _rows_by(keys)
    if not 2 <= k <= len(rows_of):
        raise RecordError(
            f"k must be between 2 and the number of {what} ({len(rows_of)}), got {k}; "
            f"measure more {what} or ask for fewer folds"
        )
    # One seed gives one division, however the rows lie in their file.
    names = sorted(rows_of, key=str)
    np.random.default_rng(seed).shuffle(names)
    folds: list[list[int]] = [[] for _ in range(k)]
    # Large groups first, each to the smallest fold: the folds then hold nearly as many rows as each other.
    for name in sorted(names, key=lambda group: -len(rows_of[group])):
        min(folds, key=len).extend(rows_of[name])
    return tuple(_split(f"fold {i + 1} of {k}", rows, len(keys)) for i, rows in enumerate(folds))


def hold_out_groups(keys: Sequence[Hashable], share: float) -> Split:
    """One split that holds out a random share of the groups of rows with equal keys."""
    rows_of = _rows_by(keys)
    num_held_out = round(share * len(rows_of))
    if not 1 <= num_held_out < len(rows_of):
        raise RecordError(
            f"cannot hold out {share:.0%} of {len(rows_of)} configurations: that is all or none of them; measure more"
        )
    names = sorted(rows_of, key=str)
    chosen = np.random.default_rng(0).permutation(len(names))[:num_held_out]
    return _split(
        f"{share:.0%} of configurations", [row for i in chosen for row in rows_of[names[i]]], len(keys)
    )


def configuration_splits(keys: Sequence[Hashable]) -> tuple[Split, ...]:
    """Leave one configuration out if there are at most 30, else ten folds of configurations."""
    return leave_one_group_out(keys) if len(set(keys)) <= 30 else group_folds(keys, 10)


def configuration_of(record: StepRecord) -> str:
    """All fields that distinguish two steps, except the measuring person, the repetition and the time."""
    return " ".join(
        str(part)
        for part in (
            canonical_network(record.model), record.device, f"batch {record.batch_size_per_device}",
            record.image_size, record.input_shape, record.sequence_length, record.precision, record.layout,
            record.phase, record.compile, record.optimizer, record.framework, record.framework_version,
            f"devices {record.num_devices}",
        )
    )  # fmt: skip


def leave_one_group_out(keys: Sequence[Hashable], what: str = "configuration") -> tuple[Split, ...]:
    """One split per group of rows with equal keys."""
    rows_of = _rows_by(keys)
    if len(rows_of) < 2:
        raise RecordError(f"expected rows of at least two {what}s to leave one out, got {len(rows_of)}")
    return tuple(_split(str(key), rows_of[key], len(keys)) for key in sorted(rows_of, key=str))


def _rows_by(keys: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    rows: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        rows.setdefault(key, []).append(index)
    return rows


def _split(name: str, test_rows: Sequence[int], num_rows: int) -> Split:
    test = np.array(sorted(test_rows), dtype=np.int64)
    return Split(name=name, fit=np.setdiff1d(np.arange(num_rows), test), test=test)


def cross_validated_predictions(
    regressor_factory: Callable[[], Regressor[RowsT]],
    features: RowsT,
    step_time_s: Floats,
    splits: Sequence[Split],
) -> Floats:
    """Predictions [s] of every row by a regressor that was fitted without it, (n,).

    The splits must test each row exactly once.
    """
    tested = np.sort(np.concatenate([split.test for split in splits])) if splits else np.array([])
    # A row that no split tests would keep an uninitialised prediction.
    if not np.array_equal(tested, np.arange(len(features))):
        raise RecordError(
            f"the splits must test each of the {len(features)} rows exactly once, got {len(tested)} test rows"
        )
    times = np.asarray(step_time_s, dtype=float)
    predictions = np.empty(len(features))
    regressors = [regressor_factory() for _ in splits]
    tables = [(features.take(split.fit), times[split.fit]) for split in splits]
    # Networks of equal shape train as one stack, which takes far less time than one after the other.
    if isinstance(regressors[0], FitsAll):
        regressors[0].fit_all(regressors, tables)
    else:
        for regressor, table in zip(regressors, tables, strict=True):
            regressor.fit(*table)
    for regressor, split in zip(regressors, splits, strict=True):
        predictions[split.test] = regressor.predict(features.take(split.test))
    return predictions


def errors(
    predicted: npt.ArrayLike,
    actual: npt.ArrayLike,
    intervals: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
) -> ErrorMetrics:
    """Errors of predictions against measurements.

    Args:
        predicted: Predictions, (n,).
        actual: Measurements, positive, (n,).
        intervals: Low and high of the 90 % intervals, (n,) each.
    """
    guess, truth = _checked(predicted, actual)
    difference = np.abs(guess - truth)
    relative = difference / truth
    deviation = float(np.sum((truth - truth.mean()) ** 2))
    return ErrorMetrics(
        n=len(truth),
        mape=float(relative.mean()),
        median_ape=float(np.median(relative)),
        p90_ape=float(np.quantile(relative, 0.9)),
        rmse=float(np.sqrt(np.mean(difference**2))),
        mae=float(difference.mean()),
        r2=1 - float(np.sum(difference**2)) / deviation if deviation > 0 else None,
        coverage_90=None if intervals is None else coverage(truth, *intervals),
    )


def grouped_errors(
    predicted: npt.ArrayLike,
    actual: npt.ArrayLike,
    groups: Sequence[Hashable],
    intervals: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
) -> Mapping[str, ErrorMetrics]:
    """Errors per group (device, family, layout ...), sorted by the group's name."""
    guess, truth = _checked(predicted, actual)
    names = np.array([str(group) for group in groups])
    if len(names) != len(truth):
        raise RecordError(f"expected one group per row ({len(truth)}), got {len(names)}")
    bounds = None if intervals is None else tuple(np.asarray(bound, dtype=float) for bound in intervals)
    result = {}
    for name in np.unique(names):
        rows = names == name
        within = None if bounds is None else (bounds[0][rows], bounds[1][rows])
        result[str(name)] = errors(guess[rows], truth[rows], within)
    return result


def _checked(predicted: npt.ArrayLike, actual: npt.ArrayLike) -> tuple[Floats, Floats]:
    guess, truth = np.asarray(predicted, dtype=float), np.asarray(actual, dtype=float)
    if guess.ndim != 1 or guess.shape != truth.shape or not guess.size:
        raise RecordError(
            "expected as many predictions as measurements and at least one, "
            f"got {guess.shape} and {truth.shape}"
        )
    bad = np.flatnonzero(~(np.isfinite(truth) & (truth > 0)))
    if bad.size:
        raise RecordError(f"measured values must be above zero, got {truth[bad[0]]} in row {bad[0] + 1}")
    if not np.all(np.isfinite(guess)):
        row = int(np.flatnonzero(~np.isfinite(guess))[0])
        raise RecordError(f"predictions must be finite, got {guess[row]} in row {row + 1}")
    return guess, truth


def _positive(values: npt.ArrayLike, what: str) -> Floats:
    array = np.asarray(values, dtype=float)
    if array.size == 0 or not np.all(np.isfinite(array) & (array > 0)):
        raise RecordError(f"{what} must be numbers above zero and at least one, got {array}")
    return array


def group_weights(groups: Sequence[object]) -> Floats:
    """Weights that let each group (device) count alike, whatever its number of rows; they add up to n."""
    _, index, sizes = np.unique(
        np.array([str(group) for group in groups]), return_inverse=True, return_counts=True
    )
    return np.asarray(len(groups) / len(sizes) / sizes[index], dtype=float)


def conformal_quantile(
    scores: npt.ArrayLike, target: float = 0.9, weights: npt.ArrayLike | None = None
) -> float:
    """Smallest score that, with the correction for a finite sample, covers the target share.

    The score of a row is |log(actual / predicted)| / scale. A quantile q of the scores of rows that took no part in the
    fit gives the interval predicted * exp(-q scale) ... predicted * exp(q scale), which covers a new row with the
    wanted probability if it is exchangeable with those rows. Rows of one device are not exchangeable with rows of
    another, hence the weights.

    The new row counts as one more row with an infinite score: the quantile is the smallest s with
    sum of weights of scores <= s at least target * (n + 1). With equal weights this is the
    ceil((n + 1) target)-th smallest score. Infinite if there are too few rows (fewer than 9 at 0.9).

    Args:
        scores: Scores of rows outside the fit, (n,).
        target: Wanted coverage, between 0 and 1.
        weights: Weight of each row, scaled to add up to n; equal if not given.

    Source: Lei et al. 2018, Journal of the American Statistical Association 113(523); weights after Tibshirani et al.
    2019, NeurIPS.
    """
    if not 0 < target < 1:
        raise RecordError(f"coverage must lie between 0 and 1, got {target}")
    values = np.asarray(scores, dtype=float)
    if values.size == 0 or np.any(np.isnan(values)):
        raise RecordError("expected at least one score and no NaN among them")
    mass = np.ones(len(values)) if weights is None else _positive(weights, "weights")
    if len(mass) != len(values):
        raise RecordError(f"expected one weight per score ({len(values)}), got {len(mass)}")
    mass = mass * len(values) / mass.sum()
    order = np.argsort(values)
    # The small allowance keeps sums of equal weights from missing their target by rounding.
    reached = np.cumsum(mass[order]) >= target * (len(values) + 1) - 1e-9
    return float(values[order][reached.argmax()]) if reached.any() else float("inf")


def coverage(actual: npt.ArrayLike, low: npt.ArrayLike, high: npt.ArrayLike) -> float:
    """Share of measurements inside their interval, borders included."""
    values, lows, highs = (np.asarray(part, dtype=float) for part in (actual, low, high))
    if values.size == 0 or values.shape != lows.shape or values.shape != highs.shape:
        raise RecordError(
            f"expected one interval per measurement, got {values.shape}, {lows.shape} and {highs.shape}"
        )
    if np.any(lows > highs):
        raise RecordError("low <= high must hold for every interval")
    return float(np.mean((values >= lows) & (values <= highs)))


_BASE = 0.05
_SLOPES = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLaw:
    """Half-width = quantile * (base + slope * spread), in the log of the step time."""

    quantile: float
    base: float
    slope: float

    def half_widths(self, spread: Floats) -> Floats:
        """Half-widths of the log step time, (n,)."""
        widths: Floats = self.quantile * (self.base + self.slope * spread)
        return widths


def fit_law(residuals: Floats, spread: Floats, groups: Sequence[object]) -> IntervalLaw:
    """The law with the narrowest mean interval that covers 90 % of the rows.

    Args:
        residuals: log(measured / predicted) of held-out rows, (n,).
        spread: Standard deviation over the ensemble, (n,).
        groups: Group of each row.
    """
    weights = group_weights(groups)
    laws = []
    for slope in _SLOPES:
        scores = np.abs(residuals) / (_BASE + slope * spread)
        laws.append(
            IntervalLaw(quantile=float(conformal_quantile(scores, 0.9, weights)), base=_BASE, slope=slope)
        )
    return min(laws, key=lambda law: float(np.average(law.half_widths(spread), weights=weights)))
