"""The section of the accuracy page about scaling: every study with its baselines.

Throughput per accelerator from one machine to thousands: ResNet-50 of MLPerf Training, NVIDIA's closed results.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.cost.communication.constants import (
    ScalingConstants,
    ScalingTable,
    load_scaling_table,
    shipped_table_path,
)
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.evidence.fitting.evaluation import ErrorMetrics, errors
from forerun.prediction.replica_step import one_steps, scaled_step
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.devices.catalogue import find_device
from forerun.question.devices.cluster import Cluster, cluster_of
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Layout, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.keras.mirrored_study import MirroredStudy, mirrored_study
from studies.markdown import error_cells, markdown_table
from studies.scaling.fit import fit_scaling_constants, key_of_row, predicted_step_s
from studies.scaling.rows import ScalingRow, read_scaling_rows
from studies.scaling.speed_studies import FewPoints, placement_study, server_study
from studies.tables.public import public_table

_SERVER_POINTS = 10
_PLACEMENT_POINTS = (8, 16)


def scaling_section(folder: Path, quick: bool = False) -> str:
    """Runs the studies of scaling and prints them.

    Args:
        folder: Folder of the public tables.
        quick: Three random splits instead of forty.
    """
    num_splits = 3 if quick else 40
    return "\n".join(
        (
            "## Several devices\n",
            _one_to_many(scaling_study(folder)),
            _placements(placement_study(folder, _PLACEMENT_POINTS, num_splits)),
            _servers(server_study(folder, _SERVER_POINTS, num_splits)),
            _mirrored(mirrored_study(folder)),
            _mlperf(mlperf_study(folder)),
        )
    )


def scaling_digest() -> str:
    """Changes with the shipped constants, which some of the studies ask."""
    return hashlib.sha256(shipped_table_path().read_bytes()).hexdigest()[:12]


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _one_to_many(study: ScalingStudy) -> str:
    names = {"**forerun**": "forerun", "linear scaling": "linear"}
    rows = []
    for link in (None, "nvlink", "pcie", "network"):

        def keep(row: ScalingRow, link: str | None = link) -> bool:
            return link in (None, row.link_class)

        for title, which in names.items():
            rows.append((link or "all", title, *error_cells(study.metrics(which, keep))))
    sizes = ", ".join(
        f"{number} GPUs {_percent(study.metrics('forerun', lambda row, n=number: row.num_devices == n).mape)}"  # type: ignore[misc]
        for number in (2, 4, 8)
    )
    return (
        "### From one measured GPU to several\n\n"
        "`dle_training` and `gpu_benchmarks`, five folds by network.\n\n"
        + markdown_table(("link", "predictor", "rows", "MAPE", "median", "p90"), rows)
        + f"\nMAPE by number: {sizes}.\n"
    )


def _placements(study: FewPoints) -> str:
    names = {
        "**forerun**: mean of both, residuals carried on": "forerun",
        "mean of both": "average",
        "ring with stragglers (ours)": "ring",
        "Pollux' form": "pollux",
    }
    rows = [
        (title, *(_percent(study.mean(which, number)) for number in _PLACEMENT_POINTS))
        for title, which in names.items()
    ]
    covered = ", ".join(
        f"{100 * study.coverage['forerun', number]:.0f} % at {number}" for number in _PLACEMENT_POINTS
    )
    return (
        "### Data parallel placements, a few points measured\n\n"
        f"`adaptdl_step_times`: {study.num_jobs} jobs, {study.num_splits} splits.\n\n"
        + markdown_table(("speed model", *(f"{number} points" for number in _PLACEMENT_POINTS)), rows)
        + f"\n90 % intervals cover {covered} points.\n"
    )


def _servers(study: FewPoints) -> str:
    names = {
        "**forerun**: mean of Optimus' form and a smooth surface, residuals carried on": "forerun",
        "Optimus' form, relative least squares, residuals carried on": "form",
        "the same at ten *designed* points": "designed",
        "Optimus' form, relative least squares": "relative",
        "Optimus' form, plain least squares": "plain",
        "linear scaling": "linear",
    }
    rows = [(title, _percent(study.mean(which, _SERVER_POINTS))) for title, which in names.items()]
    covered = 100 * study.coverage["forerun", _SERVER_POINTS]
    return (
        "### Parameter servers, ten points measured\n\n"
        f"`optimus_dl2_speed`: {study.num_jobs} jobs, {study.num_splits} splits.\n\n"
        + markdown_table(("speed model", "10 points"), rows)
        + f"\n90 % intervals cover {covered:.0f} %.\n"
    )


def _mirrored(study: MirroredStudy) -> str:
    rows = []
    titles = {
        "**forerun**": "predicted_s",
        "linear scaling": "one_step_s",
        "the source, without its factor": "published_s",
        "the source, factor 1.5 tuned on the network": "published_with_factor_s",
    }
    for model in ("mnist_cnn", "patch_camelyon_cnn", None):
        for title, which in titles.items():
            if which.startswith("published") and model != "patch_camelyon_cnn":
                continue
            rows.append((model or "both", title, *error_cells(study.metrics(which, model))))
    return "### MirroredStrategy, two P100 from one\n\n`iit_e2e`.\n\n" + markdown_table(
        ("network", "predictor", "rows", "MAPE", "median", "p90"), rows
    )


def _mlperf(study: MlperfStudy) -> str:
    return (
        "### ResNet-50 of MLPerf Training, to thousands of accelerators\n\n"
        f"{len(study.rows)} closed results on up to {max(row.num_devices for row in study.rows):,} "
        "accelerators, error of "
        f"the logarithm of their rate: forerun **{study.log_error('predicted'):.2f}**, batch of each device alone "
        f"{study.log_error('batch_only'):.2f}, linear scaling {study.log_error('linear'):.2f}.\n"
    )


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
    """

    rows: tuple[ScalingRow, ...]
    predicted_s: Floats
    bare_s: Floats
    left_out: tuple[str, ...]

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


def scaling_study(folder: Path) -> ScalingStudy:
    """Five folds by network over the pairs of ``dle_training`` and ``gpu_benchmarks``."""
    every, left_out = read_scaling_rows(folder)
    rows = [row for row in every if row.efficiency <= _MOST_EFFICIENCY]
    predicted = np.empty(len(rows))
    for fold in sorted({fold_of(row.model) for row in rows}):
        fitted = fit_scaling_constants([row for row in rows if fold_of(row.model) != fold])
        for i, row in enumerate(rows):
            if fold_of(row.model) == fold:
                # Constants of the row's stack and link, or the nearest there are.
                nearest = (key_of_row(row), f"/{row.link_class}", "")
                predicted[i] = predicted_step_s(row, next(fitted[key] for key in nearest if key in fitted))
    bare = np.asarray([predicted_step_s(row, ScalingConstants()) for row in rows])
    return ScalingStudy(rows=tuple(rows), predicted_s=predicted, bare_s=bare, left_out=tuple(left_out))


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


# Accelerator of the table -> device of the catalogue, link between nodes with its rails, as NVIDIA's descriptions of
# its systems say: one adapter a GPU of a DGX A100 and H100, eight a DGX-2.
_SYSTEMS: Mapping[str, tuple[str, str]] = {
    "V100 SXM 32GB": ("v100-sxm3-32gb", "8xinfiniband-edr"),
    "A100 SXM 40GB": ("a100-sxm4-40gb", "8xinfiniband-hdr"),
    "A100 SXM 80GB": ("a100-sxm4-80gb", "8xinfiniband-hdr"),
    "H100 SXM": ("h100-sxm", "8xinfiniband-ndr"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MlperfRow:
    """One size of a system in one round, median of its runs.

    Attributes:
        mlperf_round: Round of submissions.
        accelerator: Name in the table.
        num_devices: Accelerators.
        batch_size_per_device: Batch size of one accelerator.
        rate: Measured samples per second and accelerator, from the time of the run, evaluation included.
        relative: Measured rate over that of the smallest size of the same round.
        predicted: Relative rate from the model.
        batch_only: Relative rate from the model without communication, that is the cost of smaller batches alone.
    """

    mlperf_round: str
    accelerator: str
    num_devices: int
    batch_size_per_device: int
    rate: float
    relative: float
    predicted: float
    batch_only: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MlperfStudy:
    """Sizes beyond the smallest of each round."""

    rows: tuple[MlperfRow, ...]

    def log_error(self, which: str) -> float:
        """Root mean square of log(predicted / measured) of the relative rate; which is a field, or "linear"."""
        found = [np.log((1.0 if which == "linear" else getattr(r, which)) / r.relative) for r in self.rows]
        return float(np.sqrt(np.mean(np.square(found))))

    @property
    def correlation(self) -> float:
        """Correlation of the logarithms of predicted and measured relative rates."""
        both = np.log([[row.predicted, row.relative] for row in self.rows])
        return float(np.corrcoef(both.T)[0, 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A size of the table."""

    mlperf_round: str
    accelerator: str
    num_devices: int
    num_per_node: int
    batch_size: int
    rate: float


def mlperf_study(folder: Path) -> MlperfStudy:
    """Predicts the rate of every size relative to the smallest of its round.

    Steps of one accelerator are the shipped cost model's (AMP, channels-last) with launches of MXNet, 0.27 of PyTorch's
    (one image, DGX-1: 3.48, 12.78 ms, NVIDIA/DeepLearningExamples); communication has constants of other tables.
    """
    table = load_scaling_table()
    setup = TrainingSetup(
        batch_size_per_device=128, precision=Precision.AMP, layout=Layout.NHWC, optimizer="momentum"
    )
    model = prepare(trace(ModelRequest(model="torchvision:resnet50"), setup))
    rows: list[MlperfRow] = []
    for sizes in _rounds(folder):
        base = min(sizes, key=lambda size: size.num_devices)
        base_s, base_alone_s = _steps_s(model, setup, base, table)
        for size in sizes:
            if size.num_devices == base.num_devices:
                continue
            step_s, alone_s = _steps_s(model, setup, size, table)
            share = size.batch_size / base.batch_size
            rows.append(
                MlperfRow(
                    mlperf_round=size.mlperf_round,
                    accelerator=size.accelerator,
                    num_devices=size.num_devices,
                    batch_size_per_device=size.batch_size,
                    rate=size.rate,
                    relative=size.rate / base.rate,
                    predicted=share * base_s / step_s,
                    batch_only=share * base_alone_s / alone_s,
                )
            )
    return MlperfStudy(rows=tuple(rows))


def _rounds(folder: Path) -> list[list[_Size]]:
    """Sizes of each round and accelerator that has several."""
    table = public_table(folder, "mlperf_training")
    keep = (
        (table["benchmark"] == "resnet")
        & (table["division"] == "closed")
        & table["submitter"].str.contains("NVIDIA", case=False, na=False)
        & table["accelerator"].isin(list(_SYSTEMS))
        & table["samples_per_second_per_accelerator"].notna()
    )
    keys = ["mlperf_round", "accelerator", "n_accelerators", "accelerators_per_node", "global_batch_size"]
    medians = table[keep].groupby(keys)[["samples_per_second_per_accelerator"]].median().reset_index()
    # Later rounds list systems again that were measured for an earlier one: such rows count once.
    medians = medians.drop_duplicates([*keys[1:], "samples_per_second_per_accelerator"])
    found: dict[tuple[str, str], list[_Size]] = {}
    for row in medians.to_dict("records"):
        size = _Size(
            mlperf_round=str(row["mlperf_round"]),
            accelerator=str(row["accelerator"]),
            num_devices=int(row["n_accelerators"]),
            num_per_node=int(row["accelerators_per_node"]),
            batch_size=max(1, round(row["global_batch_size"] / row["n_accelerators"])),
            rate=float(row["samples_per_second_per_accelerator"]),
        )
        found.setdefault((size.mlperf_round, size.accelerator), []).append(size)
    return [sizes for sizes in found.values() if len({size.num_devices for size in sizes}) > 1]


def _cluster(size: _Size) -> Cluster:
    device, inter = _SYSTEMS[size.accelerator]
    per_node = min(size.num_per_node, size.num_devices)
    return cluster_of(find_device(device), size.num_devices // per_node, per_node, inter=inter)


def _steps_s(
    model: PreparedModel, setup: TrainingSetup, size: _Size, table: ScalingTable
) -> tuple[float, float]:
    """Step of all accelerators and of one alone at the batch of this size [s]."""
    run = Run(
        model=ModelRequest(model=model.graph.model),
        setup=replace(setup, batch_size_per_device=size.batch_size, host_slowdown=0.27),
        cluster=_cluster(size),
    )
    (one,) = one_steps(model, run, [size.batch_size], load_weights(shipped_weights_path()))
    step_s, _ = scaled_step(one, run.cluster, run.sharing, table, size.batch_size)
    return step_s.value, one.step_s.value
