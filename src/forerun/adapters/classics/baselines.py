"""Regressors that are printed beside every accuracy statement: rules, sums with few constants, and boosted trees."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Any, ClassVar, Self

import numpy as np

from forerun.adapters.classics.layer_table import LayerFeatures
from forerun.adapters.classics.model_file import (
    SHORTEST_STEP_S,
    RegressorState,
    StorableRegressor,
    check_fit_input,
    not_fitted,
)
from forerun.adapters.classics.network_regressors import LayerNetwork, NeuralNetwork
from forerun.adapters.classics.step_features import (
    FLAG_NAMES,
    Case,
    WholeModelFeatures,
    whole_model_features,
)
from forerun.base.errors import StoreWarning
from forerun.base.extras import needing
from forerun.base.numerics import nonnegative_coefficients, relative_coefficients
from forerun.cost.time.weights import shipped_weights_path
from forerun.evidence.fitting.evaluation import Baseline, Floats, Regressor
from forerun.graph.graph import OpClass


def _rooflines_s(features: WholeModelFeatures) -> Floats:
    return np.maximum(np.maximum(features.compute_s, features.transfer_s), SHORTEST_STEP_S)


class Roofline:
    """t = max(F / P, D / B) of the whole step, the longer of computing and moving; nothing is fitted.

    Source: Williams, Waterman and Patterson 2009, Communications of the ACM 52(4).
    """

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Only check the input."""
        check_fit_input(features, step_time_s)

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Roofline times [s]."""
        return _rooflines_s(features)


class PytorchRule(Roofline):
    """PyTorch's own runtime estimation, see ``pytorch_rule_time_s``; nothing is fitted."""

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times by the rule [s]."""
        return np.maximum(features.pytorch_rule_time_s, SHORTEST_STEP_S)


class _Sum:
    """t = x . theta with all of theta >= 0, by default by least squares on the relative error.

    A subclass names the columns x of a row, and may choose theta in another way.
    """

    _title: ClassVar[str]

    def __init__(self) -> None:
        self._coefficients: Floats | None = None

    @staticmethod
    def _columns(features: Any) -> Floats:
        """Factor of each coefficient, (n, k)."""
        raise NotImplementedError

    @staticmethod
    def _solved(columns: Floats, times_s: Floats) -> Floats:
        return relative_coefficients(columns, times_s)

    def _fitted(self) -> Floats:
        if self._coefficients is None:
            raise not_fitted(self._title)
        return self._coefficients

    def fit(self, features: Any, step_time_s: Floats) -> None:
        """Fit all constants at once."""
        times = check_fit_input(features, step_time_s)
        self._coefficients = self._solved(self._columns(features), times)

    def predict(self, features: Any) -> Floats:
        """Summed times [s]."""
        return np.maximum(self._columns(features) @ self._fitted(), SHORTEST_STEP_S)


class ScaledRoofline(_Sum):
    """t = c * max(F / P, D / B); c is the median of measured / roofline."""

    _title = "roofline x constant"

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        return _rooflines_s(features)[:, None]

    @staticmethod
    def _solved(columns: Floats, times_s: Floats) -> Floats:
        # The median: a few steps that wait for their host say nothing of the device's share.
        return np.array([np.median(times_s / columns[:, 0])])


class Paleo(_Sum):
    """t = F / (c P) + D / B: reading, computing and writing one after the other, at a share c of the peak rate.

    The share, PALEO's platform percent of peak, is fitted by least squares on the relative error.

    Source: Qi, Sparks and Talwalkar 2017, ICLR, section 2.
    """

    _title = "paleo"

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        return np.column_stack([features.compute_s, features.transfer_s])

    @staticmethod
    def _solved(columns: Floats, times_s: Floats) -> Floats:
        # 1 = compute / c + moving on relative errors has one unknown, and its least squares a closed form.
        compute, moving = (columns / times_s[:, None]).T
        inverse_share = compute @ (1 - moving) / (compute @ compute)
        return np.array([max(0.0, inverse_share), 1.0])


class _StoredSum(_Sum):
    """A sum that a model file can hold."""

    kind: ClassVar[str]
    version: ClassVar[int] = 1
    _names: ClassVar[tuple[str, ...]]

    def state(self) -> RegressorState:
        """The constants."""
        return RegressorState(features=self._names, arrays={"coefficients": self._fitted()})

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The sum with this state."""
        found, stored = cls(), np.asarray(state.arrays["coefficients"], dtype=float)
        if stored.shape != (len(cls._names),):
            raise ValueError(f"expected {len(cls._names)} coefficients, got shape {stored.shape}")
        found._coefficients = stored
        return found


class LinearOnFlops(_StoredSum):
    """t = a + b * F / P with a, b >= 0.

    FLOPs are divided by the peak of the device so that devices and precisions share the two constants; on
    one device in one precision this is a line in FLOPs. Whole models and layers alike.
    """

    kind = "linear"
    _title = "linear on FLOPs"
    _names = ("one", "compute_s")

    @staticmethod
    def _columns(features: WholeModelFeatures | LayerFeatures) -> Floats:
        return np.column_stack([np.ones(len(features)), features.compute_s])


class GreyBox(_StoredSum):
    """t = a + b * t_op + c * F / P + d * D / B with all constants >= 0, least squares on the relative error.

    t_op is the step by the cost model of operations, which knows the device without a measurement; the other terms are
    what a handful of rows can say beyond it. A ridge of a hundredth of a row on each constant, in shares of the mean
    step, keeps columns that move together from trading places.

    Source of the idea: Bohlin 2006, Practical Grey-box Process Identification, chapter 1.
    """

    kind = "grey-box"
    _title = "the grey box"
    _names = ("one", "op_time_s", "compute_s", "transfer_s")
    _RIDGE_ROWS: ClassVar[float] = 0.01

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        assert features.op_time_s is not None, "whole_model_features(..., with_op_times=True)"
        one = np.ones(len(features))
        return np.column_stack([one, features.op_time_s, features.compute_s, features.transfer_s])

    @staticmethod
    def _solved(columns: Floats, times_s: Floats) -> Floats:
        mean_s = np.exp(np.mean(np.log(times_s)))
        # Each row of the ridge says: alone, a column at its mean makes none of the step.
        ridge = np.diag(np.sqrt(GreyBox._RIDGE_ROWS) * columns.mean(axis=0)) / mean_s
        rows = np.concatenate([columns / times_s[:, None], ridge])
        wanted = np.concatenate([np.ones(len(times_s)), np.zeros(len(ridge))])
        return nonnegative_coefficients(rows, wanted)

    def state(self) -> RegressorState:
        """The four constants, and the weights whose times they multiply."""
        return replace(super().state(), settings={"weights": _weights_digest()})

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The grey box with this state.

        Raises:
            ValueError: The constants belong to weights of another release.
        """
        found = super().from_state(state)
        if state.settings["weights"] != _weights_digest():
            raise ValueError("it was fitted beside the cost model of another release; fit it again")
        return found


@cache
def _weights_digest() -> str:
    return hashlib.sha256(shipped_weights_path().read_bytes()).hexdigest()[:16]


class NonNegativeSums(_Sum):
    """t = a + l * kernels + sum over op classes of (p_c * F_c / P + q_c * D_c / B), all constants >= 0.

    Each constant can be read: p_c and q_c are inverse efficiencies of a class, l is the cost of a launch [s].
    """

    _title = "non-negative sums"

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        return np.column_stack([np.ones(len(features)), features.num_kernels, features.class_times_s])


_NUM_TREES = 400
_LEARNING_RATE = 0.06
_MAX_LEAVES = 15
_MIN_ROWS_PER_LEAF = 5

_CLASSES = tuple(kind.name.lower() for kind in OpClass)
_COLUMNS = (
    "compute_s", "transfer_s", *(f"compute_s.{c}" for c in _CLASSES), *(f"transfer_s.{c}" for c in _CLASSES),
    "num_parameters", "batch_size", "image_size", "num_kernels", *FLAG_NAMES,
)  # fmt: skip


class BoostedTrees:
    """log t from trees over log sums per op class, totals, sizes and flags.

    Trees return means of what they saw: a step outside the range of the fit gets the time of its border. A file keeps
    the rows, from which the same trees grow again: scikit-learn has no public form of its trees but pickle, which runs
    what it holds. Another release of it may grow others, of which ``from_state`` warns.
    """

    kind: ClassVar[str] = "boosting"
    version: ClassVar[int] = 2

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._rows: tuple[Floats, Floats] | None = None
        self._trees: Any = None

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        seconds = np.column_stack([features.compute_s, features.transfer_s, features.class_times_s])
        sizes = np.column_stack(
            [features.num_parameters, features.batch_size, features.image_size, features.num_kernels]
        )
        # A class that does not occur gets the time of one launch, less than every class that does.
        logs = [np.log(np.maximum(seconds, SHORTEST_STEP_S)), np.log(np.maximum(sizes, 1.0))]
        return np.column_stack([*logs, features.flags])

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Grow the trees on log times."""
        times = check_fit_input(features, step_time_s)
        self._grow(self._columns(features), np.log(times))

    def _grow(self, columns: Floats, log_times: Floats) -> None:
        with needing("gradient boosting"):
            from sklearn.ensemble import HistGradientBoostingRegressor

        self._rows = columns, log_times
        self._trees = HistGradientBoostingRegressor(
            max_iter=_NUM_TREES,
            learning_rate=_LEARNING_RATE,
            max_leaf_nodes=_MAX_LEAVES,
            min_samples_leaf=min(_MIN_ROWS_PER_LEAF, max(1, len(log_times) // 4)),
            early_stopping=False,
            random_state=self._seed,
        ).fit(columns, log_times)

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times of the trees [s]."""
        if self._trees is None:
            raise not_fitted("gradient boosting")
        return np.asarray(np.exp(self._trees.predict(self._columns(features))), dtype=float)

    def state(self) -> RegressorState:
        """The rows that the trees grow from."""
        if self._rows is None:
            raise not_fitted("gradient boosting")
        columns, log_times = self._rows
        return RegressorState(
            features=_COLUMNS,
            settings={"seed": self._seed, "scikit_learn": version("scikit-learn")},
            arrays={"columns": columns, "log_times": log_times},
        )

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The trees that grow from the rows of this state."""
        found = cls(seed=int(state.settings["seed"]))
        columns, log_times = (
            np.asarray(state.arrays[name], dtype=float) for name in ("columns", "log_times")
        )
        if columns.shape != (log_times.size, len(_COLUMNS)) or log_times.shape != (len(columns),):
            raise ValueError(
                f"expected rows of {len(_COLUMNS)} columns with a time each, got {columns.shape}"
            )
        if not len(columns):
            raise ValueError("expected a row or more, got none")
        grown_by, here = state.settings["scikit_learn"], version("scikit-learn")
        if grown_by != here:
            words = (
                f"the trees of this file grew in scikit-learn {grown_by} and grow again in {here}, where they may give "
                f"other times; install scikit-learn=={grown_by}, or fit it again with: forerun fit"
            )
            warnings.warn(words, StoreWarning, stacklevel=4)
        found._grow(columns, log_times)
        return found


BASELINES: Mapping[str, Callable[[], Regressor[WholeModelFeatures]]] = {
    "roofline": Roofline,
    "roofline x constant": ScaledRoofline,
    "paleo": Paleo,
    "linear on FLOPs": LinearOnFlops,
    "non-negative sums": NonNegativeSums,
    "ann": NeuralNetwork,
    "gradient boosting": BoostedTrees,
    "pytorch rule": PytorchRule,
}
"""Makers of unfitted baselines, in the order they are printed."""

_RULES = ("roofline", "pytorch rule")
"""Baselines that have nothing to learn."""

STORABLE_KINDS: Mapping[str, type[StorableRegressor[Any]]] = {
    kind.kind: kind for kind in (NeuralNetwork, GreyBox, LinearOnFlops, BoostedTrees, LayerNetwork)
}
"""Regressors of this folder by the kind that model files name."""


def step_baselines(cases: Sequence[Case]) -> list[Baseline]:
    """The baselines for steps given as (graph, device, setup): the entry point of ``forerun.baselines``."""
    rows = whole_model_features(cases)
    return [Baseline(name, make, rows, name not in _RULES) for name, make in BASELINES.items()]
