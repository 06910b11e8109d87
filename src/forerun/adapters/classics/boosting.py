"""Gradient-boosted trees on whole-model sums; scikit-learn grows them, plain arrays keep them without pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.model_file import SHORTEST_STEP_S, RegressorState, check_fit_input, not_fitted
from forerun.adapters.classics.step_features import FLAG_NAMES, WholeModelFeatures
from forerun.base.errors import CostModelError
from forerun.base.extras import needing
from forerun.evidence.fitting.evaluation import Floats
from forerun.graph.graph import OpClass

Ints = npt.NDArray[np.int64]

_LEAF = -1
_SAME = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArrays:
    """A sum of trees, y = baseline + sum of leaf values; m nodes of all trees in one list.

    At a node that is no leaf, rows with ``x[feature] <= threshold`` go to ``left``, others to ``right``.

    Attributes:
        baseline: Value before the first tree.
        roots: Node at which each tree begins, (trees,).
        feature: Column that is compared, (m,).
        threshold: Value that it is compared with, (m,).
        left, right: Next nodes; ``left`` is -1 at a leaf, (m,).
        value: Value of a leaf, (m,).
    """

    baseline: float
    roots: Ints
    feature: Ints
    threshold: Floats
    left: Ints
    right: Ints
    value: Floats

    def __call__(self, inputs: Floats) -> Floats:
        """Values, (n,), of inputs without NaN, (n, columns)."""
        rows = np.arange(len(inputs))[:, None]
        node = np.broadcast_to(self.roots, (len(inputs), len(self.roots))).copy()
        while np.any(is_open := self.left[node] != _LEAF):
            goes_left = inputs[rows, self.feature[node]] <= self.threshold[node]
            node = np.where(is_open, np.where(goes_left, self.left[node], self.right[node]), node)
        # One tree after the other, as they were grown: the sum must not depend on the number of rows.
        total = np.full(len(inputs), self.baseline)
        for tree in range(len(self.roots)):
            total += self.value[node[:, tree]]
        return total

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All fields as named arrays."""
        return {f.name: np.atleast_1d(np.asarray(getattr(self, f.name))) for f in fields(self)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, npt.NDArray[Any]], num_columns: int) -> Self:
        """The trees from such arrays.

        Raises:
            KeyError: An array is missing.
            ValueError: Arrays differ in length, or a node or a column is named that does not exist.
        """
        values: dict[str, Any] = {f.name: arrays[f.name] for f in fields(cls)}
        for name, array in values.items():
            kind = "i" if name in ("roots", "feature", "left", "right") else "f"
            if array.ndim != 1 or array.dtype.kind != kind or not len(array):
                raise ValueError(f"{name}: expected a row of numbers, got {array.dtype} in {array.shape}")
        found = cls(**{**values, "baseline": float(values["baseline"][0])})
        num_nodes = len(found.value)
        if any(
            len(column) != num_nodes for column in (found.feature, found.threshold, found.left, found.right)
        ):
            raise ValueError("the arrays of the trees differ in length")
        inner = found.left != _LEAF
        # A child lies behind its parent, so every walk ends.
        parents = np.flatnonzero(inner)
        for children in (found.left[inner], found.right[inner]):
            if np.any((children <= parents) | (children >= num_nodes)):
                raise ValueError("a branch of a tree leads nowhere")
        if np.any((found.feature < 0) | (found.feature >= num_columns)) or np.any(
            (found.roots < 0) | (found.roots >= num_nodes)
        ):
            raise ValueError("a tree names a column or a node that does not exist")
        return found


def arrays_of_histogram_trees(model: Any, inputs: Floats) -> TreeArrays:
    """The trees of a fitted ``HistGradientBoostingRegressor`` without categories.

    Args:
        model: The fitted model.
        inputs: Rows on which both must agree, (n, columns).

    Raises:
        CostModelError: The arrays predict something else: this version of scikit-learn keeps its trees differently.
    """
    try:
        trees = [iteration[0].nodes for iteration in model._predictors]
        baseline = float(np.ravel(model._baseline_prediction)[0])
        found = _joined(trees, baseline)
        # The nodes are no public part of scikit-learn: what they predict is the only promise.
        is_same = bool(np.allclose(found(inputs), model.predict(inputs), rtol=_SAME, atol=_SAME))
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise _cannot_export(str(error)) from error
    if not is_same:
        raise _cannot_export("the exported trees predict something else")
    return found


def _cannot_export(reason: str) -> CostModelError:
    from sklearn import __version__

    return CostModelError(
        f"the boosted trees of scikit-learn {__version__} cannot be turned into arrays: {reason}; "
        "install scikit-learn 1.5 to 1.9, or fit another kind of model"
    )


def _joined(trees: list[npt.NDArray[Any]], baseline: float) -> TreeArrays:
    starts = np.concatenate([[0], np.cumsum([len(nodes) for nodes in trees])]).astype(np.int64)
    nodes = np.concatenate(trees)
    offset = np.repeat(starts[:-1], np.diff(starts))
    is_leaf = nodes["is_leaf"].astype(bool)
    # Nodes name their children within a tree; in one list of all trees each name moves by the start of its tree.
    return TreeArrays(
        baseline=baseline,
        roots=starts[:-1],
        feature=np.where(is_leaf, 0, nodes["feature_idx"]).astype(np.int64),
        threshold=np.where(is_leaf, 0.0, nodes["num_threshold"]),
        left=np.where(is_leaf, _LEAF, nodes["left"].astype(np.int64) + offset),
        right=np.where(is_leaf, _LEAF, nodes["right"].astype(np.int64) + offset),
        value=nodes["value"].astype(float),
    )


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

    Trees return means of what they saw: a step outside the range of the fit gets the time of its border.
    """

    kind: ClassVar[str] = "boosting"
    version: ClassVar[int] = 1

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._trees: TreeArrays | None = None

    @staticmethod
    def _columns(features: WholeModelFeatures) -> Floats:
        seconds = np.column_stack(
            [
                features.flops / features.peak_flops_per_s,
                features.traffic_bytes / features.bandwidth_bytes_per_s,
                features.class_flops / features.peak_flops_per_s[:, None],
                features.class_bytes / features.bandwidth_bytes_per_s[:, None],
            ]
        )
        sizes = np.column_stack(
            [features.num_parameters, features.batch_size, features.image_size, features.num_kernels]
        )
        # A class that does not occur gets the time of one launch, less than every class that does.
        logs = [np.log(np.maximum(seconds, SHORTEST_STEP_S)), np.log(np.maximum(sizes, 1.0))]
        return np.column_stack([*logs, features.flags])

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Grow the trees on log times."""
        times = check_fit_input(features, step_time_s)
        with needing("gradient boosting"):
            from sklearn.ensemble import HistGradientBoostingRegressor

        columns = self._columns(features)
        model = HistGradientBoostingRegressor(
            max_iter=_NUM_TREES,
            learning_rate=_LEARNING_RATE,
            max_leaf_nodes=_MAX_LEAVES,
            min_samples_leaf=min(_MIN_ROWS_PER_LEAF, max(1, len(times) // 4)),
            early_stopping=False,
            random_state=self._seed,
        ).fit(columns, np.log(times))
        self._trees = arrays_of_histogram_trees(model, columns)

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times of the trees [s]."""
        if self._trees is None:
            raise not_fitted("gradient boosting")
        return np.asarray(np.exp(self._trees(self._columns(features))), dtype=float)

    def state(self) -> RegressorState:
        """The trees."""
        if self._trees is None:
            raise not_fitted("gradient boosting")
        return RegressorState(features=_COLUMNS, settings={"seed": self._seed}, arrays=self._trees.arrays())

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The trees with this state."""
        found = cls(seed=int(state.settings["seed"]))
        found._trees = TreeArrays.from_arrays(state.arrays, len(_COLUMNS))
        return found
