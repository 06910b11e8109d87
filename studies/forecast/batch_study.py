"""Epochs against the batch size: MLPerf's ResNet-50, Zeus' jobs, Pollux' jobs; and system C's six networks.

MLPerf's ResNet-50 is trained by each submitter with a recipe tuned for its batch; rounds from v0.7 share a target
(75.9 %) and an optimizer (LARS). Zeus and Pollux measured the same job at many batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from forerun.jobs.forecasting.convergence import (
    NetworkPrediction,
    NetworkRuns,
    fit_batch_scaling,
    predict_network,
)
from studies.tables.public import public_table

IMAGENET_IMAGES = 1_281_167

MLPERF_EPOCHS = {16384: 47.0, 32768: 72.0, 65536: 88.0}
"""Epochs at large global batches over all rounds, as quoted beside 35 and 42 for up to 3.3k and 8k."""

_LARGEST_FITTED = 8192
_FIRST_ROUND = "v0.7"
_TARGET_ACCURACY = 0.759
_FEWEST_FITTED = 2
_FEWEST_EPOCHS = 8

SYSTEM_C_EPOCHS = {
    "ResNet-18": (27, 29, 31),
    "ResNet-20": (58, 65, 52),
    "ResNet-32": (63, 40, 49),
    "ResNet-44": (43, 43, 45),
    "ResNet-56": (40, 28, 43),
    "ResNet-50": (32, 28, 35),
}
"""Epochs to 92 % on CIFAR-10 as system C reported them, on A100, V100 and RTX 8000, see docs/lineage.md."""

# Depth, parameters and multiply-adds of one 32x32 image, counted from the families of this package.
_FEATURES = {
    "ResNet-18": (18, 11.17e6, 555e6),
    "ResNet-20": (20, 0.270e6, 40.6e6),
    "ResNet-32": (32, 0.464e6, 68.9e6),
    "ResNet-44": (44, 0.659e6, 97.2e6),
    "ResNet-56": (56, 0.853e6, 125.5e6),
    "ResNet-50": (50, 23.52e6, 1298e6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """Epochs at a batch size, measured and predicted.

    Attributes:
        job: The job.
        batch_size: Global batch.
        actual, predicted: Epochs.
        constant: Epochs if they did not depend on the batch: those of the batches fitted.
    """

    job: str
    batch_size: int
    actual: float
    predicted: float
    constant: float

    @property
    def error(self) -> float:
        """|predicted / actual - 1|."""
        return abs(self.predicted / self.actual - 1)

    @property
    def constant_error(self) -> float:
        """|predicted / actual - 1| for epochs that do not depend on the batch."""
        return abs(self.constant / self.actual - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStudy:
    """Epochs against the batch.

    Attributes:
        mlperf: ResNet-50, batches up to 8k fitted.
        others: Jobs of Zeus and Pollux, the smaller half of the batches fitted.
    """

    mlperf: tuple[BatchRow, ...]
    others: tuple[BatchRow, ...]


def batch_study(folder: Path) -> BatchStudy:
    """All rows."""
    return BatchStudy(mlperf=mlperf_rows(folder), others=(*_zeus_rows(folder), *_pollux_rows(folder)))


def mlperf_rows(folder: Path) -> tuple[BatchRow, ...]:
    """Batches of 16k, 32k and 64k from all runs at up to 8k: the median of each batch size is a point of the fit."""
    table = public_table(folder, "mlperf_training")
    runs = table[
        table["benchmark"].eq("resnet")
        & table["division"].eq("closed")
        & (table["mlperf_round"] >= _FIRST_ROUND)
        & (table["final_accuracy"] >= _TARGET_ACCURACY)
        & table["global_batch_size"].le(_LARGEST_FITTED)
        & table["final_epoch"].notna()
    ]
    points = runs.groupby("global_batch_size")["final_epoch"].median()
    sizes, epochs = points.index.to_numpy(float), points.to_numpy(float)
    law = fit_batch_scaling(sizes, epochs * IMAGENET_IMAGES / sizes)
    predicted = law.epochs(list(MLPERF_EPOCHS), IMAGENET_IMAGES)
    return _rows("ResNet-50, MLPerf", MLPERF_EPOCHS.items(), predicted, float(np.median(epochs)))


def _rows(
    job: str, actual: Iterable[tuple[int, float]], predicted: Iterable[float], constant: float
) -> tuple[BatchRow, ...]:
    return tuple(
        BatchRow(job=job, batch_size=size, actual=epochs, predicted=float(guess), constant=constant)
        for (size, epochs), guess in zip(actual, predicted, strict=True)
    )


def _extrapolated(job: str, sizes: Sequence[int], epochs: Sequence[float]) -> tuple[BatchRow, ...]:
    """The larger half of the batch sizes from the smaller; epochs are whole, so a job of a few of them says nothing."""
    num_fitted = max(_FEWEST_FITTED, len(sizes) // 2)
    if len(sizes) <= num_fitted or max(epochs) < _FEWEST_EPOCHS:
        return ()
    law = fit_batch_scaling(sizes[:num_fitted], np.divide(epochs, sizes)[:num_fitted])
    actual = list(zip(sizes, epochs, strict=True))[num_fitted:]
    predicted = law.epochs(sizes[num_fitted:], 1.0)
    return _rows(job, actual, predicted, float(np.mean(epochs[:num_fitted])))


def _zeus_rows(folder: Path) -> tuple[BatchRow, ...]:
    """Each job at its default optimizer and the rate that is fastest at each batch, mean over seeds."""
    table = public_table(folder, "zeus_epochs_to_target")
    rows: list[BatchRow] = []
    for (dataset, network), job in table.groupby(["dataset", "network"]):
        target = _common_target(job)
        at_target = job[np.isclose(job["target_metric"], target) & job["epochs_to_target"].notna()]
        means = at_target.groupby(["batch_size", "optimizer", "learning_rate"])["epochs_to_target"].mean()
        best = means.groupby("batch_size").min().sort_index()
        sizes, epochs = [int(size) for size in best.index], [float(e) for e in best]
        rows += _extrapolated(f"{network} on {dataset}, Zeus", sizes, epochs)
    return tuple(rows)


def _common_target(job: pd.DataFrame) -> float:
    """The hardest target that most batch sizes reached: the one with most batches, then most epochs."""
    grouped = (
        job[job["epochs_to_target"].notna()]
        .groupby("target_metric")
        .agg(sizes=("batch_size", "nunique"), epochs=("epochs_to_target", "mean"))
    )
    return float(grouped.sort_values(["sizes", "epochs"]).index[-1])


def _pollux_rows(folder: Path) -> tuple[BatchRow, ...]:
    """Epochs to 95 % of the whole fall of each job."""
    from studies.forecast.curve_tables import read_adaptdl_curves

    rows: list[BatchRow] = []
    by_job: dict[str, list[tuple[int, float]]] = {}
    for run in read_adaptdl_curves(folder):
        wanted = run.errors[0] - 0.95 * (run.errors[0] - run.errors[-1])
        hits = np.flatnonzero(run.errors <= wanted)
        size = int(run.name.rpartition(" ")[2])
        by_job.setdefault(run.job.rpartition(" ")[2], []).append((size, float(run.epochs[hits[0]])))
    for job, points in by_job.items():
        points.sort()
        rows += _extrapolated(f"{job}, Pollux", [s for s, _ in points], [e for _, e in points])
    return tuple(rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemCStudy:
    """Each of the six networks from the other five, the device not known.

    Attributes:
        predictions: By network.
        actual: Mean of its three runs.
        spread: Standard deviation of single runs over all networks, relative.
    """

    predictions: dict[str, NetworkPrediction]
    actual: dict[str, float]
    spread: float


def system_c_study() -> SystemCStudy:
    """System C's table with every network held out in turn."""
    networks = {name: _network(name) for name in SYSTEM_C_EPOCHS}
    predictions = {
        name: predict_network([n for other, n in networks.items() if other != name], network.features)
        for name, network in networks.items()
    }
    return SystemCStudy(
        predictions=predictions,
        actual={name: network.mean for name, network in networks.items()},
        spread=_spread(),
    )


def _network(name: str) -> NetworkRuns:
    depth, parameters, macs = _FEATURES[name]
    features = {"depth": float(depth), "parameters": parameters, "operations": macs}
    return NetworkRuns(name=name, features=features, values=tuple(float(e) for e in SYSTEM_C_EPOCHS[name]))


def _spread() -> float:
    """Relative standard deviation of a single run around the mean of its network."""
    table = np.asarray(np.log(list(SYSTEM_C_EPOCHS.values())), dtype=float)
    residuals = table - table.mean(axis=1, keepdims=True)
    return float(np.sqrt((residuals**2).sum() / (table.size - len(table))))
