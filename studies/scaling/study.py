"""From one measured device to several, with whole networks held out; and the constants that are shipped."""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.cost.communication.constants import ScalingConstants, ScalingTable
from forerun.evidence.fitting.evaluation import ErrorMetrics, errors
from studies.scaling.fit import fit_scaling_constants, key_of_row, predicted_step_s
from studies.scaling.rows import ScalingRow, read_scaling_rows

Floats = npt.NDArray[np.float64]

_NUM_FOLDS = 5
_MOST_EFFICIENCY = 1.1
"""More than n-fold speed is no scaling: one of the two rows is not what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStudy:
    """Steps of several devices predicted from that of one.

    Attributes:
        rows: The pairs that were tested.
        predicted_s: Our steps, with the row's network held out of the fit, (rows,) [s].
        bare_s: Steps by the bare collectives and bucket schedule, nothing fitted, (rows,) [s].
        left_out: Networks whose size is not published.
        num_impossible: Rows beyond 1.1 times n-fold speed, not tested.
    """

    rows: tuple[ScalingRow, ...]
    predicted_s: Floats
    bare_s: Floats
    left_out: tuple[str, ...]
    num_impossible: int

    def metrics(self, which: str, keep: Callable[[ScalingRow], bool] = lambda row: True) -> ErrorMetrics:
        """Errors of "forerun", "bare" or "linear" on some of the rows."""
        chosen = [i for i, row in enumerate(self.rows) if keep(row)]
        measured = np.asarray([self.rows[i].step_s for i in chosen])
        linear = np.asarray([row.one_step_s for row in self.rows])
        predicted = {"forerun": self.predicted_s, "bare": self.bare_s, "linear": linear}[which]
        return errors(predicted[chosen], measured)


def fold_of(model: str) -> int:
    """The fold of a network, by its name alone."""
    return int(hashlib.sha256(model.encode()).hexdigest(), 16) % _NUM_FOLDS


def _possible(rows: Sequence[ScalingRow]) -> list[ScalingRow]:
    return [row for row in rows if row.efficiency <= _MOST_EFFICIENCY]


def scaling_study(folder: Path) -> ScalingStudy:
    """Five folds by network over the pairs of ``dle_training`` and ``gpu_benchmarks``."""
    every, left_out = read_scaling_rows(folder)
    rows = _possible(every)
    predicted = np.empty(len(rows))
    for fold in sorted({fold_of(row.model) for row in rows}):
        fitted = fit_scaling_constants([row for row in rows if fold_of(row.model) != fold])
        for i, row in enumerate(rows):
            if fold_of(row.model) == fold:
                predicted[i] = predicted_step_s(row, constants_of(fitted, row))
    bare = np.asarray([predicted_step_s(row, ScalingConstants()) for row in rows])
    return ScalingStudy(
        rows=tuple(rows),
        predicted_s=predicted,
        bare_s=bare,
        left_out=tuple(left_out),
        num_impossible=len(every) - len(rows),
    )


def constants_of(fitted: dict[str, ScalingConstants], row: ScalingRow) -> ScalingConstants:
    """Constants of a row's stack and link, or the nearest there are."""
    return next(fitted[key] for key in (key_of_row(row), f"/{row.link_class}", "") if key in fitted)


def fit_scaling_table(folder: Path) -> ScalingTable:
    """The constants fitted to all pairs, with the scatter of the held-out study."""
    study = scaling_study(folder)
    residual = np.log(study.predicted_s / np.asarray([row.step_s for row in study.rows]))
    classes = sorted({row.link_class for row in study.rows})
    spread = {
        name: _spread(residual[[i for i, row in enumerate(study.rows) if row.link_class == name]])
        for name in classes
    }
    return ScalingTable(
        constants=fit_scaling_constants(study.rows),
        log_spread=spread,
        provenance={
            "tables": "dle_training (NVIDIA/DeepLearningExamples, commit 729963dd47e7), "
            "gpu_benchmarks (sources in its README)",
            "rows": len(study.rows),
            "date": datetime.date.today().isoformat(),
            "log_spread": "90th percentile of the held-out absolute log error over 1.645",
        },
    )


def _spread(residual: Floats) -> float:
    return float(np.quantile(np.abs(residual), 0.9) / 1.645)
