"""MirroredStrategy on two GPUs from the runs of one, whose host and device times are told apart by batch sizes.

Rows: ``iit_e2e``, MNIST and PatchCamelyon networks on P100s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import refuse_times
from forerun.cost.communication.collectives import all_reduce_of
from forerun.cost.communication.data_parallel import SHARPNESS, HostAndDevice, mirrored_step_s
from forerun.evidence.fitting.evaluation import ErrorMetrics, errors
from forerun.question.devices.catalogue import find_device
from forerun.question.devices.cluster import cluster_of
from studies.tables.public import public_table

if TYPE_CHECKING:
    import pandas as pd


Floats = npt.NDArray[np.float64]

_PARAMETERS: Mapping[str, float] = {
    # 3x3 convolutions 1-32-32 without padding, dense 800-128-10, added up.
    "mnist_cnn": 9 * 32 + 32 + 9 * 32 * 32 + 32 + 800 * 128 + 128 + 1290,
    # As the source states.
    "patch_camelyon_cnn": 19.9e6,
}
_BYTES_PER_GRADIENT = 4
_SUBSET = "patch_camelyon_subset"
_WITH_START = "total/epochs (includes start-up)"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredRow:
    """One run on two GPUs.

    Attributes:
        model: The network.
        optimizer: Its optimizer.
        batch_size_per_device: Samples of a replica.
        measured_s: Its step [s].
        predicted_s: From the runs of one GPU [s].
        one_step_s: Fitted step of one GPU with the same batch: linear scaling [s].
        published_s: Prediction of the source without its factor, not a number where it gives none [s].
        published_with_factor_s: With the factor of 1.5 that was tuned on the same network [s].
    """

    model: str
    optimizer: str
    batch_size_per_device: int
    measured_s: float
    predicted_s: float
    one_step_s: float
    published_s: float
    published_with_factor_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredStudy:
    """The runs on two GPUs, with figures from the runs on one.

    Attributes:
        rows: The runs on two GPUs.
        split: Host and device of each network and optimizer.
        startup_s: Start of a run, from those of one GPU that tell their first epoch apart [s].
    """

    rows: tuple[MirroredRow, ...]
    split: Mapping[tuple[str, str], HostAndDevice]
    startup_s: float

    def metrics(self, which: str, model: str | None = None) -> ErrorMetrics:
        """Errors of one field of the rows that have it, of one network or of all."""
        rows = [row for row in self.rows if model in (None, row.model) and np.isfinite(getattr(row, which))]
        return errors(
            np.asarray([getattr(row, which) for row in rows]), np.asarray([row.measured_s for row in rows])
        )


def mirrored_study(folder: Path) -> MirroredStudy:
    """Predicts every run on two GPUs; no run on two GPUs is used, and no factor is set.

    A row whose step is the whole run over its epochs contains the start of the run. How long that takes is known from
    runs on one GPU that tell their first epoch apart; it is taken off such rows of one GPU, and added to the prediction
    of such rows of two.
    """
    table = public_table(folder, "iit_e2e")
    table = table[table["model"].isin(list(_PARAMETERS)) & (table["dataset"] != _SUBSET)].copy()
    startup_s = start_of_runs_s(table)
    cluster = cluster_of(find_device("p100-pcie-16gb"), 1, 2)
    reduce = all_reduce_of(cluster)
    rows: list[MirroredRow] = []
    split: dict[tuple[str, str], HostAndDevice] = {}
    for (model, optimizer), group in table.groupby(["model", "optimizer"]):
        one, two = group[group["n_gpus"] == 1], group[group["n_gpus"] == 2]
        if not len(two) or one["batch_size_per_gpu"].nunique() < 3:
            continue
        key = str(model), str(optimizer)
        steps_s = one["time_ms_step"].to_numpy(dtype=float) / 1e3 - start_share_s(one, startup_s)
        split[key] = split_host_and_device(one["batch_size_per_gpu"].tolist(), steps_s.tolist())
        reduce_s = reduce.time_s(_BYTES_PER_GRADIENT * _PARAMETERS[key[0]])
        rows += _rows(two, key, split[key], reduce_s, startup_s)
    return MirroredStudy(rows=tuple(rows), split=split, startup_s=startup_s)


def start_of_runs_s(table: pd.DataFrame) -> float:
    """Extra time of the first epoch of a run, median over the MNIST runs of one GPU that show it [s]."""
    one = table[(table["n_gpus"] == 1) & (table["model"] == "mnist_cnn")]
    extra = (one["time_s_first_epoch"] - one["time_s_epoch"]).dropna()
    return float(extra.median())


def start_share_s(rows: pd.DataFrame, startup_s: float) -> Floats:
    """Time that the start of the run adds to each step of these rows, (rows,) [s]."""
    steps = (rows["steps_per_epoch"] * rows["epochs"].fillna(1)).to_numpy(dtype=float)
    contains = (rows["epoch_statistic"] == _WITH_START).to_numpy()
    share: Floats = np.where(contains, startup_s / steps, 0.0)
    return share


def _rows(
    two: pd.DataFrame, key: tuple[str, str], split: HostAndDevice, reduce_s: float, startup_s: float
) -> list[MirroredRow]:
    start = start_share_s(two, startup_s)
    found = []
    for row, start_s in zip(two.to_dict("records"), start, strict=True):
        batch = int(row["batch_size_per_gpu"])
        plain, factored = row["pred_ms_step_iit_method2"], row["pred_ms_step_iit_method3"]
        plain = plain if np.isfinite(plain) else row["pred_ms_step_iit_method1"]
        found.append(
            MirroredRow(
                model=key[0],
                optimizer=key[1],
                batch_size_per_device=batch,
                measured_s=float(row["time_ms_step"]) / 1e3,
                predicted_s=mirrored_step_s(split, batch, 2, reduce_s) + float(start_s),
                one_step_s=split.step_s(batch) + float(start_s),
                published_s=float(plain) / 1e3,
                published_with_factor_s=float(factored) / 1e3,
            )
        )
    return found


_USUAL_SCATTER = 0.05
"""Logarithmic errors beyond this pull linearly: a run that was disturbed says little."""


def split_host_and_device(batch_sizes: Sequence[float], steps_s: Sequence[float]) -> HostAndDevice:
    """Host, fixed and per-sample time of a network from its steps on one device.

    Minimises the logarithmic error, squared where it is small, of max(H, D_0 + s b) with all three at least zero. At
    least three batch sizes are needed. Where the step grows with the batch from the smallest on, H is only bounded
    above, and the fit takes the smallest that explains the steps as well as any: what is not seen to be the host's is
    the device's.

    Args:
        batch_sizes: Samples of one device.
        steps_s: Measured steps of one device [s].

    Raises:
        InvalidSetupError: There are fewer than three batch sizes, or a time is not above zero.
    """
    batch, steps = np.asarray(batch_sizes, dtype=float), np.asarray(steps_s, dtype=float)
    if len(set(batch.tolist())) < 3:
        raise InvalidSetupError(
            "host and device cannot be told apart: expected steps at three batch sizes or more, "
            f"got {len(set(batch.tolist()))}; measure more"
        )
    refuse_times(steps)
    smallest = float(steps.min())
    slope = max(1e-12, float((steps.max() - smallest) / (batch.max() - batch.min())))

    def residual(at: np.ndarray) -> np.ndarray:
        host, fixed, per_sample = np.exp(at)
        found = (host**SHARPNESS + (fixed + per_sample * batch) ** SHARPNESS) ** (1 / SHARPNESS)
        # The last row prefers the smaller host where both explain the steps.
        return np.append(np.log(found / steps), 1e-3 * at[0])

    starts = [(h * smallest, f * smallest, slope) for h in (0.1, 0.9) for f in (0.05, 0.9)]
    fits = [
        least_squares(residual, np.log(start), loss="soft_l1", f_scale=_USUAL_SCATTER) for start in starts
    ]
    best = min(fits, key=lambda fit: fit.cost)
    host_s, fixed_s, per_sample_s = (float(value) for value in np.exp(best.x))
    return HostAndDevice(host_s=host_s, device_fixed_s=fixed_s, device_per_sample_s=per_sample_s)
