"""Interface of regressors, their stored state, and the checks that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from forerun.base.errors import CostModelError, RecordError
from forerun.evidence.fitting.evaluation import Floats, Regressor, RowsOf

__all__ = [
    "SHORTEST_STEP_S",
    "Floats",
    "RegressorState",
    "StorableRegressor",
    "check_fit_input",
    "not_fitted",
]


SHORTEST_STEP_S = 1e-6
"""Smallest prediction: one microsecond, about the launch of a single kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressorState:
    """Everything a fitted regressor needs to predict again, as plain values and arrays.

    Attributes:
        features: Columns that the regressor reads, in their order; a file with other columns than the code
            is refused.
        settings: JSON values: sizes, seeds, categories.
        arrays: Fitted numbers and normalisation by name.
    """

    features: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class StorableRegressor(Regressor[RowsOf], Protocol[RowsOf]):
    """A regressor that a model file can hold.

    ``kind`` is its name in files and commands; ``version`` is raised whenever the meaning of its state changes.
    """

    kind: ClassVar[str]
    version: ClassVar[int]

    def state(self) -> RegressorState:
        """The fitted state; an error before a fit."""
        ...

    @classmethod
    def from_state(cls, state: RegressorState) -> Self:
        """The regressor with this state; predictions are the same to the last bit.

        Raises:
            KeyError, TypeError, ValueError: The state is incomplete or contradicts itself.
        """
        ...


def check_fit_input(features: Sized, step_time_s: Floats) -> Floats:
    """The times as a float array, after checking that they can be learned from."""
    times = np.asarray(step_time_s, dtype=float)
    if times.shape != (len(features),):
        raise RecordError(
            f"expected one step time per row of features ({len(features)}), got shape {times.shape}"
        )
    if len(times) == 0:
        raise RecordError("expected at least one measured step to fit on, got none")
    bad = np.flatnonzero(~(np.isfinite(times) & (times > 0)))
    if bad.size:
        raise RecordError(
            f"expected step times above zero, got {times[bad[0]]} in row {bad[0] + 1}; drop the row"
        )
    return times


def not_fitted(name: str) -> CostModelError:
    """The error of a prediction before a fit."""
    return CostModelError(f"{name} was asked for a prediction before it was fitted; call fit first")
