"""Measured throughputs of one network on many devices, from tables that no fit has read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.cost.time.weights import CostModel
from forerun.prediction.point_times import point_times
from forerun.prediction.step import PreparedModel, prepare
from forerun.question.devices import find_device
from forerun.question.devices.device import Device
from forerun.question.model import ModelRequest
from forerun.question.setup import Phase, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.tables.public import public_table
from studies.tables.transformers import prepared_bert

if TYPE_CHECKING:
    from collections.abc import Hashable

    import pandas as pd

_NETWORKS = {
    "alexnet": "alexnet",
    "googlenet-v1": "googlenet",
    "inception3": "inception_v3",
    **{name: name for name in ("vgg16", "vgg19", "densenet161")},
    **{f"resnet{depth}": f"resnet{depth}" for depth in (18, 34, 50, 101, 152)},
}
_BERT = {"bert_base_squad": (768, 12), "bert_large_squad": (1024, 24)}
_BERT_TOKENS = 384
_SOURCES = {
    "u39kun/deep-learning-benchmark": "u39kun",
    "jcjohnson/cnn-benchmarks": "jcjohnson",
    "lambdal/lambda-tensorflow-benchmark": "Lambda TensorFlow",
    "lambdal/deeplearning-benchmark": "Lambda BERT",
}
_PRECISIONS = ("fp32", "tf32", "fp16", "amp")
_MIXED_FP16 = ("Lambda TensorFlow", "Lambda BERT")
"""Their fp16 keeps fp32 weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """Throughput of one network on one device.

    Attributes:
        group: Set of comparable measurements: source, network, phase and kind of precision.
        device: Catalogue name.
        precision: Precision of the run.
        measured_samples_per_s: Measured throughput.
        predicted_samples_per_s: Predicted throughput.
    """

    group: str
    device: str
    precision: Precision
    measured_samples_per_s: float
    predicted_samples_per_s: float


def kind_of(precision: Precision) -> str:
    """Half or full precision, as a user asks for it; on newer devices full precision runs as TF32."""
    return "half" if precision.is_half else "full"


def outside_rates(folder: Path, weights: CostModel) -> list[MeasuredRate]:
    """Rows of ``gpu_benchmarks`` that no fit has read, with the shipped model's predictions.

    Networks that torchvision or Transformers define, on single GPUs of the catalogue. XLA runs are left out.

    Raises:
        RecordError: The table lacks its columns.
    """
    needed = (
        "source", "phase", "model", "gpu", "n_gpus", "dtype", "batch_size_per_gpu", "throughput", "framework",
    )  # fmt: skip
    frame = public_table(folder, "gpu_benchmarks", needed)
    is_xla = frame["framework"].str.contains("XLA") | frame["system"].fillna("").str.contains("XLA")
    chosen = frame[
        frame["source"].isin(_SOURCES)
        & (frame["n_gpus"] == 1)
        & frame["dtype"].isin(_PRECISIONS)
        & frame["throughput"].notna()
        & frame["batch_size_per_gpu"].notna()
        & ~is_xla
        & ~frame["framework"].str.contains("cuDNN none")
    ]
    return [
        rate
        for name, rows in chosen.groupby(["source", "model", "phase"])
        for rate in _rates(name, rows, weights)
    ]


def _rates(name: Hashable, rows: pd.DataFrame, weights: CostModel) -> Iterator[MeasuredRate]:
    source, model, phase = (str(part) for part in name)  # type: ignore[attr-defined]
    title = _SOURCES[source]
    if (model in _BERT) != (title == "Lambda BERT") or (model not in _BERT and model not in _NETWORKS):
        return
    setups = [_setup(row, title, phase) for row in rows.to_dict("records")]
    devices = [find_device(gpu) for gpu in rows["gpu"]]
    predicted = _predicted(model, devices, setups, weights)
    sizes = np.asarray([setup.batch_size_per_device for setup in setups])
    for device, setup, rate, step_s, size in zip(
        devices, setups, rows["throughput"], predicted, sizes, strict=True
    ):
        yield MeasuredRate(
            group=f"{title} {model} {phase} {kind_of(setup.precision)}",
            device=device.name,
            precision=setup.precision,
            measured_samples_per_s=float(rate),
            predicted_samples_per_s=float(size / step_s),
        )


def _setup(row: Mapping[Any, Any], title: str, phase: str) -> TrainingSetup:
    precision = Precision(row["dtype"])
    if precision is Precision.FP16 and title in _MIXED_FP16:
        precision = Precision.AMP
    optimizer = "adam" if title == "Lambda BERT" else "sgd" if title == "Lambda TensorFlow" else "none"
    return TrainingSetup(
        batch_size_per_device=int(row["batch_size_per_gpu"]),
        precision=precision,
        phase=Phase(phase),
        optimizer=optimizer if phase == "train" else "none",
    )


def _predicted(
    model: str, devices: list[Device], setups: list[TrainingSetup], weights: CostModel
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Predicted steps, one trace per kind of precision [s]."""
    times = np.empty(len(setups))
    for precision in dict.fromkeys(setup.precision for setup in setups):
        rows = [i for i, setup in enumerate(setups) if setup.precision is precision]
        prepared = _prepared(model, setups[rows[0]])
        found = point_times(prepared, [devices[i] for i in rows], [setups[i] for i in rows], weights)
        times[rows] = found.step_s
    return times


def _prepared(model: str, setup: TrainingSetup) -> PreparedModel:
    if model not in _BERT:
        return prepare(trace(ModelRequest(model=f"torchvision:{_NETWORKS[model]}"), setup))
    hidden_size, num_layers = _BERT[model]
    return prepared_bert(setup, _BERT_TOKENS, hidden_size=hidden_size, num_layers=num_layers)


def groups_of(rates: Iterable[MeasuredRate]) -> dict[str, list[MeasuredRate]]:
    """Measurements by set."""
    found: dict[str, list[MeasuredRate]] = {}
    for rate in rates:
        found.setdefault(rate.group, []).append(rate)
    return found
