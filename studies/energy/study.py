"""Energy of epochs under power limits, with the network and the limit, and with the GPU as well, held out.

The time of the epoch at the board's largest limit is given, as it is to the baseline; the study predicts power and
the slowdown under the limit. Constants of the law are of a GPU each, taken to be alike, but for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy.optimize import least_squares
from torch import nn

from forerun.cost.time.power import POWER_LAW, PowerLaw, demand_share, limited_share, power_slowdown
from forerun.cost.time.weights import CostModel
from forerun.evidence.fitting.evaluation import errors
from forerun.prediction.point_times import point_times
from forerun.prediction.step import PreparedModel, ideal_times_s, points_of, prepare
from forerun.question.devices import find_device
from forerun.question.devices.device import NumberFormat
from forerun.question.model import ModelRequest
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace
from studies.markdown import error_cells, markdown_table
from studies.tables.public import public_table
from studies.tables.transformers import prepared_bert

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
    key = ["gpu", "network", "dataset", "batch_size", "optimizer"]
    needed = [*key, "power_limit_w", "time_per_epoch_s", "average_power_w"]
    frame = public_table(folder, "zeus_epoch_time_power", needed)
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
        return prepare(trace(ModelRequest(model=f"{__file__}:shufflenet_v2", input_shape=(3, 32, 32)), setup))
    head = "BertForQuestionAnswering" if dataset == "squad" else "BertForSequenceClassification"
    return prepared_bert(setup, _BERT_TOKENS[dataset], head=head)


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


ENERGY_STUDY_VERSION = 4
"""Raised whenever the study changes what it computes; kept results of other versions are not used."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Constant:
    """Fit of one constant of the law.

    Attributes:
        low, begin, high: Bounds, and the start of a fit: power that goes with the cube of the clock down to half, not
            what other fits found.
        likeness: Assumed similarity of GPUs: weight of the differences of their logarithms from the mean.
    """

    low: float
    begin: float
    high: float
    likeness: float = 0.0


_PER_GPU = {
    "idle_share": _Constant(0.02, 0.2, 0.39, likeness=0.2),
    "full_share": _Constant(0.4, 0.9, 1.1),
    "slowdown_exponent": _Constant(0.05, 1 / 3, 1.5, likeness=0.15),
    "knee_share": _Constant(0.02, 0.5, 0.95, likeness=0.5),
    "activity_factor": _Constant(0.5, 3.0, 30.0, likeness=1.0),
    "activity_exponent": _Constant(0.5, 1.0, 3.0, likeness=1.3),
}
_SHARED = {"compute_weight": _Constant(-2.0, 0.0, 2.0)}

_OUTLIER = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergyResult:
    """Energies of epochs, each predicted by a law that has seen neither its network nor its limit [J].

    Attributes:
        gpu, network: GPU and network of each row.
        measured_j: Measured energy.
        known_gpu_j: Predicted, with other networks and limits of the same GPU in the fit.
        new_gpu_j: Predicted, with no row of the GPU in the fit.
        tdp_time_j: The board's limit times the measured time, the baseline.
        limit_time_j: The limit that was set times the measured time.
        laws: Constants fitted to all rows, by GPU.
    """

    gpu: npt.NDArray[np.str_]
    network: npt.NDArray[np.str_]
    measured_j: Floats
    known_gpu_j: Floats
    new_gpu_j: Floats
    tdp_time_j: Floats
    limit_time_j: Floats
    laws: dict[str, PowerLaw]


def energy_study(rows: EnergyRows) -> EnergyResult:
    """Predicts every row by fits without its network and its limit, then without its GPU too."""
    known, new = np.full(len(rows), np.nan), np.full(len(rows), np.nan)
    limit_w = np.round(rows.limit_share * rows.board_limit_w)
    for network in np.unique(rows.network):
        for limit in np.unique(limit_w):
            tested = (rows.network == network) & (limit_w == limit)
            if tested.any():
                rest = (rows.network != network) & (limit_w != limit)
                _predict_into(known, rows, tested, fit_power_laws(rows, rest))
        for gpu in np.unique(rows.gpu):
            tested = (rows.network == network) & (rows.gpu == gpu)
            laws = fit_power_laws(rows, (rows.network != network) & (rows.gpu != gpu))
            _predict_into(new, rows, tested, {str(gpu): mean_law(list(laws.values()))})
    return EnergyResult(
        gpu=rows.gpu,
        network=rows.network,
        measured_j=rows.power_w * rows.time_s,
        known_gpu_j=known,
        new_gpu_j=new,
        tdp_time_j=rows.board_limit_w * rows.time_s,
        limit_time_j=rows.limit_share * rows.board_limit_w * rows.time_s,
        laws=fit_power_laws(rows, np.ones(len(rows), dtype=bool)),
    )


def mean_law(laws: Sequence[PowerLaw]) -> PowerLaw:
    """The law of a GPU that nobody measured: the mean of the others."""
    means: dict[str, Any] = {
        name: float(np.mean([getattr(law, name) for law in laws])) for name in (*_PER_GPU, *_SHARED)
    }
    return replace(laws[0], **means)


def _predict_into(out: Floats, rows: EnergyRows, tested: Bools, laws: dict[str, PowerLaw]) -> None:
    for gpu, law in laws.items():
        chosen = tested & (rows.gpu == gpu)
        share, slowdown = _under_limit(rows, chosen, law)
        out[chosen] = share * rows.board_limit_w[chosen] * rows.full_time_s[chosen] * slowdown


def _under_limit(rows: EnergyRows, chosen: Bools, law: PowerLaw) -> tuple[Floats, Floats]:
    """Power as a share of the board's limit, and time over that at the largest limit."""
    demand = demand_share(rows.activity[chosen], law)
    fraction = rows.compute_fraction[chosen]
    slowdown = power_slowdown(demand, rows.limit_share[chosen], fraction, law)
    at_full = power_slowdown(demand, rows.full_limit_share[chosen], fraction, law)
    return limited_share(demand, rows.limit_share[chosen]), slowdown / at_full


def fit_power_laws(rows: EnergyRows, fitted: Bools) -> dict[str, PowerLaw]:
    """Laws of the GPUs in the fitted rows, by least squares on the logarithms of power and slowdown.

    Args:
        rows: Epochs.
        fitted: Whether each row takes part in the fit, (n,).
    """
    gpus = [str(gpu) for gpu in np.unique(rows.gpu[fitted])]
    chosen = [fitted & (rows.gpu == gpu) for gpu in gpus]
    constants = [constant for constant in _PER_GPU.values() for _ in gpus] + list(_SHARED.values())

    def laws(values: Floats) -> list[PowerLaw]:
        shared = dict(zip(_SHARED, values[-len(_SHARED) :], strict=True))
        own = values[: -len(_SHARED)].reshape(len(_PER_GPU), len(gpus))
        return [
            replace(POWER_LAW, **shared, **dict(zip(_PER_GPU, own[:, index], strict=True)))
            for index in range(len(gpus))
        ]

    def residuals(values: Floats) -> Floats:
        parts = [_residuals(rows, chosen[index], law) for index, law in enumerate(laws(values))]
        own = values[: -len(_SHARED)].reshape(len(_PER_GPU), len(gpus))
        for row, constant in zip(own, _PER_GPU.values(), strict=True):
            if constant.likeness:
                part = np.log(row)
                parts.append(constant.likeness * (part - part.mean()))
        return np.concatenate([*parts, [0.5 * values[-1]]])

    begin = np.asarray([constant.begin for constant in constants])
    bounds = ([constant.low for constant in constants], [constant.high for constant in constants])
    found = least_squares(residuals, begin, bounds=bounds, loss="soft_l1", f_scale=_OUTLIER, xtol=1e-6)
    return dict(zip(gpus, laws(found.x), strict=True))


def _residuals(rows: EnergyRows, chosen: Bools, law: PowerLaw) -> Floats:
    share, slowdown = _under_limit(rows, chosen, law)
    power = np.log(share * rows.board_limit_w[chosen] / rows.power_w[chosen])
    time = np.log(slowdown * rows.full_time_s[chosen] / rows.time_s[chosen])
    return np.concatenate([power, time])


def energy_section(result: EnergyResult) -> str:
    """The section of the accuracy page."""
    predictors = {
        "**forerun**, network and power limit held out": result.known_gpu_j,
        "forerun, network and GPU held out": result.new_gpu_j,
        "TDP x time": result.tdp_time_j,
        "set limit x time": result.limit_time_j,
    }
    table = [(name, *error_cells(errors(energy, result.measured_j))) for name, energy in predictors.items()]
    return (
        "## Energy under power limits\n\n`zeus_epoch_time_power`; the baselines know the measured time.\n\n"
        + markdown_table(("predictor", "rows", "MAPE", "median", "p90"), table)
        + "\nNetwork and power limit held out:\n\n"
        + markdown_table(("rows of", "rows", "MAPE", "median", "p90"), _groups(result, result.network))
    )


def _groups(result: EnergyResult, names: npt.NDArray[np.str_]) -> list[tuple[str, ...]]:
    found = []
    for name in np.unique(names).tolist():
        own = names == name
        found.append((name, *error_cells(errors(result.known_gpu_j[own], result.measured_j[own]))))
    return found


class _Unit(nn.Module):
    """A unit of ShuffleNet v2: two joined, shuffled branches; a first one halves the image and sees all channels."""

    def __init__(self, num_in: int, num_out: int, *, is_first: bool) -> None:
        super().__init__()
        self._is_first = is_first
        if is_first:
            self.left: nn.Module = nn.Sequential(_depthwise(num_in, 2), *_pointwise(num_in, num_out // 2))
            self.right = nn.Sequential(
                *_pointwise(num_in, num_in), _depthwise(num_in, 2), *_pointwise(num_in, num_out // 2)
            )
        else:
            half = num_in // 2
            self.left = nn.Identity()
            self.right = nn.Sequential(*_pointwise(half, half), _depthwise(half, 1), *_pointwise(half, half))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = (images, images) if self._is_first else images.chunk(2, dim=1)
        joined = torch.cat([self.left(left), self.right(right)], dim=1)
        size, channels, height, width = joined.shape
        shuffled = joined.view(size, 2, channels // 2, height, width).transpose(1, 2)
        return shuffled.reshape(size, channels, height, width)


def _pointwise(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(num_in, num_out, 1), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)


def _depthwise(channels: int, stride: int) -> nn.Module:
    convolution = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels))


def _stage(num_in: int, num_out: int, num_units: int) -> nn.Sequential:
    rest = [_Unit(num_out, num_out, is_first=False) for _ in range(num_units)]
    return nn.Sequential(_Unit(num_in, num_out, is_first=True), *rest)


def shufflenet_v2() -> nn.Module:
    """ShuffleNet v2 for images of 32x32 as the energy table measured it: no pooling in the stem, separate first units.

    Layers of github.com/weiaicunzai/pytorch-cifar100, whose networks the authors of the table trained; sizes of Ma et
    al. 2018, table 5, width 1x.
    """
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(inplace=True),
        _stage(24, 116, 3),
        _stage(116, 232, 7),
        _stage(232, 464, 3),
        *_pointwise(464, 1024),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, 100),
    )
