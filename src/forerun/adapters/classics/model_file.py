"""Interface of regressors, and their files: one safetensors file with its provenance, no pickle.

The header names the format, the kind of regressor and its version, the columns it reads in their order, its settings,
and its provenance. A file that is missing, damaged, of another kind, newer or older than the code is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from forerun.base.answers import from_plain
from forerun.base.errors import CostModelError, ForerunError, RecordError
from forerun.base.kept import write_whole, writes
from forerun.base.received import DAMAGE, in_a_line, read_tensors, tensors_file
from forerun.cost.time.weights import check_facts
from forerun.evidence.fitting.evaluation import Floats, Regressor, RowsOf

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


MODEL_FILE_VERSION = 1
"""Version of the header; the rest has a separate version per kind."""

_ENTRY = "forerun_regressor"
_LARGEST = 1e18

Kinds = Mapping[str, type[StorableRegressor[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """A fitted regressor and its provenance.

    Attributes:
        regressor: The fitted regressor.
        provenance: Records, rows, date, devices, shared settings, software, errors on held-out rows.
    """

    regressor: StorableRegressor[Any]
    provenance: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Name of the kind of regressor."""
        return self.regressor.kind

    def save(self, path: str | Path) -> None:
        """Writes a fitted model; an existing file is replaced at once or not at all.

        Raises:
            CostModelError: The model is not fitted, or the file cannot be written.
        """
        state = self.regressor.state()
        header = {
            "format_version": MODEL_FILE_VERSION,
            "kind": self.kind,
            "kind_version": self.regressor.version,
            "features": state.features,
            "settings": dict(state.settings),
            "provenance": dict(self.provenance),
        }
        arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays.items()}
        content = tensors_file(header, arrays, _ENTRY)
        with writes(path, CostModelError):
            write_whole(Path(path), content)


def load_model_file(path: Path, kinds: Kinds) -> TrainedModel:
    """Reads a fitted model.

    Args:
        path: The file.
        kinds: Regressors by kind.

    Raises:
        CostModelError: The file is missing, damaged, of a kind that is not known, or newer or older than this version.
    """
    raw, arrays = _read(path)
    try:
        header: _Header = from_plain(_Header, raw, "header", ignores_unknown=True)
        check_facts(header.provenance)
    except DAMAGE as error:
        raise _damaged(path, in_a_line(error)) from error
    if header.kind not in kinds:
        raise CostModelError(
            f"the model file {path.name} holds a model of kind {header.kind[:60]!r}, which this version does "
            f"not know; expected one of {', '.join(kinds)}"
        )
    refit = f"fit it again with: forerun fit RECORDS --model {header.kind} --out {path.name}"
    _check_version("format", header.format_version, MODEL_FILE_VERSION, refit, path)
    _check_version(header.kind, header.kind_version, kinds[header.kind].version, refit, path)
    state = RegressorState(features=header.features, settings=header.settings, arrays=arrays)
    try:
        regressor = kinds[header.kind].from_state(state)
        has_same_columns = regressor.state().features == state.features
    except CostModelError:
        raise
    except (*DAMAGE, ForerunError) as error:
        raise _damaged(path, f"{type(error).__name__}: {in_a_line(error)}") from error
    if not has_same_columns:
        raise CostModelError(
            f"the model file {path.name} is older than this program: it reads other columns; {refit}"
        )
    return TrainedModel(regressor=regressor, provenance=header.provenance)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The header of a file; what each part is, the head of this module says."""

    format_version: int
    kind: str
    kind_version: int
    features: tuple[str, ...]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    if not path.is_file():
        raise CostModelError(
            f"expected a fitted model at {path}, but there is no such file; "
            "make one with: forerun fit RECORDS --model ann --out FILE"
        )
    try:
        header, arrays = read_tensors(path, _ENTRY)
    except DAMAGE as error:
        raise _damaged(path, in_a_line(error)) from error
    if header is None:
        raise CostModelError(
            f"{path.name} is no model file of 'forerun fit RECORDS'; give one that this command wrote"
        )
    for name, array in arrays.items():
        if array.dtype.kind not in "fi":
            raise _damaged(path, f"array '{name}' holds {array.dtype}, not numbers")
        if not np.all(np.abs(array) <= _LARGEST):
            raise _damaged(path, f"array '{name}' holds NaN, infinity or a number above {_LARGEST:g}")
    return header, arrays


def _check_version(what: str, found: int, expected: int, refit: str, path: Path) -> None:
    if found != expected:
        is_newer = found > expected
        age, reads = ("newer", "this program reads") if is_newer else ("older", "expected")
        raise CostModelError(
            f"the model file {path.name} is {age} than this program ({what} version {found}, {reads} {expected}); "
            f"{'update forerun, or ' if is_newer else ''}{refit}"
        )


def _damaged(path: Path, reason: str) -> CostModelError:
    return CostModelError(
        f"the model file {path.name} is damaged ({reason}); restore it, or fit it again with: forerun fit"
    )
