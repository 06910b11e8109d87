"""Throughput per accelerator from one machine to thousands: ResNet-50 of MLPerf Training, NVIDIA's closed results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from forerun.cost.communication.constants import ScalingTable, load_scaling_table
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.prediction.replica_step import one_steps, scaled_step
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.devices.catalogue import find_device
from forerun.question.devices.cluster import Cluster, cluster_of
from forerun.question.model import ModelRequest
from forerun.question.run import Run
from forerun.question.setup import Layout, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.tables.public import public_table

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

    The step of one accelerator is the shipped cost model's (PyTorch, AMP, channels-last), whatever framework was used;
    the constants of communication are those fitted to other tables.
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
        setup=replace(setup, batch_size_per_device=size.batch_size),
        cluster=_cluster(size),
    )
    (one,) = one_steps(model, run, [size.batch_size], load_weights(shipped_weights_path()))
    step_s, _ = scaled_step(one, run.cluster, run.sharing, table, size.batch_size)
    return step_s.value, one.step_s.value
