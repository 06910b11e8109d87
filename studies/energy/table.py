"""Rows of ``zeus_epoch_time_power`` with the activity of the GPU: epochs of real networks under power limits."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from forerun.base.errors import RecordError
from forerun.cost.time.weights import CostModel
from forerun.prediction.point_times import point_times
from forerun.prediction.step import PreparedModel, ideal_times_s, points_of, prepare
from forerun.question.devices import find_device
from forerun.question.devices.device import NumberFormat
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace

Floats = npt.NDArray[np.float64]

_DEVICES = {
    "NVIDIA A40": "a40",
    "NVIDIA P100": "p100-pcie-16gb",
    "NVIDIA Quadro RTX 6000": "quadro-rtx-6000",
    "NVIDIA V100": "v100-pcie-16gb",
}
_NUM_SAMPLES = {"imagenet": 1_281_167, "cifar100": 50_000, "squad": 88_524, "movielens-1m": 5 * 994_169}
"""Samples of an epoch: sequences of SQuAD after it is cut up, positives and four negatives each of MovieLens."""

_BERT_TOKENS = {"squad": 384, "sentiment140": 128}
_NCF = ("ncf", "movielens-1m")
_NCF_LAYERS = ((256, 128), (128, 64), (64, 32), (64, 1))
_NCF_PARAMETERS = (6040 + 3706) * (32 + 128)
_NCF_VALUES_PER_SAMPLE = 2 * (32 + 128) + 256 + 128 + 64 + 32 + 64
_BYTES_PER_PARAMETER = 36.0
"""Adam reads and writes weights and both moments, reads the gradient, which was cleared and written before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyRows:
    """Epochs, n of them; arrays are (n,).

    Attributes:
        gpu, network: Names of the GPU and the network.
        board_limit_w: Power limit of the board as shipped [W].
        limit_share: Limit that was set over ``board_limit_w``.
        full_time_s: Time of the same epoch at the largest limit [s].
        full_limit_share: Largest limit over ``board_limit_w``.
        time_s, power_w: Measured time and average power [s, W].
        activity: Ideal time of the work over the time at the largest limit.
        compute_fraction: Share of arithmetic in the ideal time.
    """

    gpu: npt.NDArray[np.str_]
    network: npt.NDArray[np.str_]
    board_limit_w: Floats
    limit_share: Floats
    full_time_s: Floats
    full_limit_share: Floats
    time_s: Floats
    power_w: Floats
    activity: Floats
    compute_fraction: Floats

    def __len__(self) -> int:
        return len(self.gpu)


def energy_rows(folder: Path, weights: CostModel) -> EnergyRows:
    """The rows whose networks can be traced or counted by hand; speech is left out, its samples have no one length.

    Args:
        folder: Folder of the public tables.
        weights: Predicts the steps of the one dataset whose length is not published.

    Raises:
        RecordError: The table lacks its columns.
    """
    frame = pd.read_parquet(folder / "zeus_epoch_time_power.parquet")
    key = ["gpu", "network", "dataset", "batch_size", "optimizer"]
    needed = {*key, "power_limit_w", "time_per_epoch_s", "average_power_w"}
    if missing := needed - set(frame.columns):
        raise RecordError(f"zeus_epoch_time_power.parquet: expected the columns {sorted(missing)}")
    frame = frame[frame["network"] != "deepspeech2"]
    full = frame.sort_values("power_limit_w").groupby(key).last()
    full = full.rename(columns={"time_per_epoch_s": "full_time_s", "power_limit_w": "full_limit_w"})
    joined = frame.merge(full[["full_time_s", "full_limit_w"]].reset_index(), on=key)
    parts = [_with_activity(rows, weights) for _, rows in joined.groupby(["network", "dataset"])]
    found = pd.concat(parts)
    board_w = np.asarray([find_device(_DEVICES[gpu]).power_limit_w for gpu in found["gpu"]])
    return EnergyRows(
        gpu=found["gpu"].to_numpy(dtype=str),
        network=found["network"].to_numpy(dtype=str),
        board_limit_w=board_w,
        limit_share=found["power_limit_w"].to_numpy(dtype=float) / board_w,
        full_time_s=found["full_time_s"].to_numpy(dtype=float),
        full_limit_share=found["full_limit_w"].to_numpy(dtype=float) / board_w,
        time_s=found["time_per_epoch_s"].to_numpy(dtype=float),
        power_w=found["average_power_w"].to_numpy(dtype=float),
        activity=found["activity"].to_numpy(dtype=float),
        compute_fraction=found["compute_fraction"].to_numpy(dtype=float),
    )


def _with_activity(rows: pd.DataFrame, weights: CostModel) -> pd.DataFrame:
    network, dataset = str(rows["network"].iloc[0]), str(rows["dataset"].iloc[0])
    if (network, dataset) == _NCF:
        compute_s, memory_s, predicted_s = _ncf_times(rows)
    else:
        compute_s, memory_s, predicted_s = _traced_times(network, dataset, rows, weights)
    if dataset in _NUM_SAMPLES:
        step_s = rows["full_time_s"].to_numpy() * rows["batch_size"].to_numpy() / _NUM_SAMPLES[dataset]
    else:
        step_s = predicted_s
    ideal_s = compute_s + memory_s
    return rows.assign(activity=ideal_s / step_s, compute_fraction=compute_s / ideal_s)


def _traced_times(
    network: str, dataset: str, rows: pd.DataFrame, weights: CostModel
) -> tuple[Floats, Floats, Floats]:
    """Time of the work at the peaks, of the traffic, and the predicted step, of each row [s]."""
    setup = TrainingSetup(optimizer="adamw" if network.startswith("bert") else "sgd")
    model = _prepared(network, dataset, setup)
    devices = [find_device(_DEVICES[gpu]) for gpu in rows["gpu"]]
    setups = [replace(setup, batch_size_per_device=int(size)) for size in rows["batch_size"]]
    compute_s, memory_s = ideal_times_s(model, points_of(model, devices, setups, None))
    return compute_s, memory_s, point_times(model, devices, setups, weights).step_s


def _prepared(network: str, dataset: str, setup: TrainingSetup) -> PreparedModel:
    if network == "resnet50":
        return prepare(trace(ModelRequest(model="torchvision:resnet50"), setup))
    if network == "shufflenetv2":
        path = Path(__file__).with_name("networks.py")
        return prepare(trace(ModelRequest(model=f"{path}:shufflenet_v2", input_shape=(3, 32, 32)), setup))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(_bert(dataset)), encoding="utf-8")
        request = ModelRequest(model=f"hf:{path}", sequence_length=_BERT_TOKENS[dataset])
        return prepare(trace(request, setup))


def _bert(dataset: str) -> Mapping[str, object]:
    """Sizes of BERT base (Devlin et al. 2019) with the head of the task."""
    head = "BertForQuestionAnswering" if dataset == "squad" else "BertForSequenceClassification"
    return {
        "model_type": "bert",
        "architectures": [head],
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    }


def _ncf_times(rows: pd.DataFrame) -> tuple[Floats, Floats, Floats]:
    """Sizes of neural collaborative filtering (He et al. 2017, 32 factors), whose inputs are numbers of a table."""
    weights = sum(num_in * num_out for num_in, num_out in _NCF_LAYERS)
    sizes = rows["batch_size"].to_numpy(dtype=float)
    devices = [find_device(_DEVICES[gpu]) for gpu in rows["gpu"]]
    peak = np.asarray([device.peak_flops_per_s[NumberFormat.FP32] for device in devices])
    bandwidth = np.asarray([device.memory_bandwidth_bytes_per_s for device in devices])
    compute_s = 6 * weights * sizes / peak
    traffic = (_NCF_PARAMETERS + weights) * _BYTES_PER_PARAMETER + sizes * _NCF_VALUES_PER_SAMPLE * 4 * 4
    return compute_s, traffic / bandwidth, np.full(len(rows), np.nan)
