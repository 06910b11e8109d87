"""The software stack as an input: TensorFlow's steps from a model fitted on PyTorch, with the stack's effect on top.

Two questions, each with what is asked about held out:

- the practicum's three networks on a P100 in Keras (TensorFlow 2), each network in turn;
- ResNet-50 of the vendor's examples in TensorFlow, each GPU in turn.

Equation of a Keras step:

    step = a + sum over convolutions (f + x + w) + k d

f, x and w are the times of the forward pass and of the gradients by input and by weights, from convolutions timed one
by one on the same GPU, without the overhead of the call (no row of a whole network). TensorFlow's tables of layers have
small ones; DeepBench's, of the same library of kernels, has those of many channels. d is the device time of everything
outside these layers by the shipped cost model, of the graph of Keras. Fitted on the other networks are a, what a step
of ``fit`` costs whatever it does, and k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from forerun.cost.time.step_times import step_times
from forerun.cost.time.weights import CostModel, load_weights, shipped_weights_path
from forerun.evidence.fitting.evaluation import Floats
from forerun.graph.graph import OpClass
from forerun.prediction.step import points_of, prepare
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.setup import Layout, OptimizerImplementation, Precision, TrainingSetup
from forerun.tracing.trace import trace
from studies.keras.mirrored_study import start_of_runs_s, start_share_s
from studies.markdown import markdown_table
from studies.tables.public import public_table

_LARGEST_BATCH = 64
"""Of the layers that were timed; beyond it the time grows by the slope from half of it."""

_OVERHEAD_MS = 0.2
"""Floor of the forward times on this GPU: what one call costs, whatever its layer (0.3 % quantile 0.24, least 0.18)."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution with stride 1 on square images; sizes in pixels and channels."""

    size: int
    kernel: int
    num_inputs: int
    num_outputs: int
    padding: str


@dataclass(frozen=True, slots=True)
class ConvolutionTimes:
    """Fitted trees for the logarithm of the forward time without the call's overhead."""

    trees: Any

    def training_s(self, layers: Sequence[Convolution], batch_size: int) -> float:
        """Forward pass and both gradients of the layers; the first needs no gradient by its input [s].

        The gradient by the input is the convolution with its channels exchanged, that by the weights is taken to cost
        what the forward pass does: the three have the same work.
        """
        if batch_size > _LARGEST_BATCH:
            half, full = (self.training_s(layers, n) for n in (_LARGEST_BATCH // 2, _LARGEST_BATCH))
            return full + (full - half) * (batch_size - _LARGEST_BATCH) / (_LARGEST_BATCH // 2)
        total = 0.0
        for index, layer in enumerate(layers):
            total += 2 * self.forward_s(layer, batch_size)
            if index:
                turned = Convolution(
                    layer.size, layer.kernel, layer.num_outputs, layer.num_inputs, layer.padding
                )
                total += self.forward_s(turned, batch_size)
        return total

    def forward_s(self, layer: Convolution, batch_size: int) -> float:
        """Forward pass of one layer [s]."""
        row = [
            batch_size,
            layer.size,
            layer.kernel,
            1,
            layer.padding == "same",
            layer.num_inputs,
            layer.num_outputs,
        ]
        features = convolution_features(np.asarray([row], dtype=float))
        return float(np.exp(self.trees.predict(features)[0])) / 1e3


def alignment(channels: Floats) -> Floats:
    """Largest power of two that divides the channels, 32 at most, as its logarithm; kernels take multiples well."""
    whole = channels.astype(np.int64)
    powers: Floats = np.log2(np.minimum(whole & -whole, 32))
    return powers


def convolution_features(rows: Floats) -> Floats:
    """Features of convolutions.

    Args:
        rows: (n, 7): batch, size, kernel, stride, 1 for same padding, input and output channels.
    """
    batch, size, kernel, stride, is_same, inputs, outputs = rows.T
    out = np.where(is_same > 0, np.ceil(size / stride), np.ceil((size - kernel + 1) / stride))
    flops = 2 * batch * out**2 * kernel**2 * inputs * outputs
    read, written, weights = batch * size**2 * inputs, batch * out**2 * outputs, kernel**2 * inputs * outputs
    logs = [
        flops,
        read,
        written,
        weights,
        batch * out**2,
        inputs,
        outputs,
        size,
        flops / (read + written + weights),
        out,
    ]
    columns = [np.log(np.maximum(values, 1e-9)) for values in logs]
    return np.column_stack([*columns, kernel, stride, alignment(inputs), alignment(outputs)])


def fit_convolution_times(folder: Path) -> ConvolutionTimes:
    """Trees fitted to the forward times of ``justus_layers``, ``iit_layers`` and ``deepbench_conv`` on a P100.

    Layers that were cut out of the three networks are left out, and training steps too: there the optimizer also
    updated the input.
    """
    from sklearn.ensemble import HistGradientBoostingRegressor

    frames = [_forward_rows(public_table(folder, name)) for name in ("iit_layers", "justus_layers")]
    rows = pd.concat([*frames, _deepbench_rows(public_table(folder, "deepbench_conv"))])
    columns = ["batch_size", "in_size", "kernel", "stride", "is_same", "in_features", "out_features"]
    features = convolution_features(rows[columns].to_numpy(float))
    time_ms = np.maximum(rows["time_ms_median"].to_numpy(float) - _OVERHEAD_MS, 0.01)
    trees = HistGradientBoostingRegressor(
        max_iter=600, learning_rate=0.05, max_leaf_nodes=15, l2_regularization=1.0, random_state=0
    )
    return ConvolutionTimes(trees.fit(features, np.log(time_ms)))


def _forward_rows(frame: pd.DataFrame) -> pd.DataFrame:
    chosen = (
        frame["gpu"].isin(["P100", "P100-PCIE"]) & frame["layer"].eq("conv2d") & frame["mode"].eq("forward")
    )
    chosen &= frame["time_ms_median"].notna()
    if "n_gpus" in frame:
        chosen &= frame["n_gpus"].eq(1) & frame["model_layer"].isna()
    found = frame[chosen]
    return found.assign(is_same=found["padding"].eq("same"))


def _deepbench_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Square fp32 convolutions; their times have no overhead of a call, which the others' have."""
    chosen = frame["gpu"].eq("P100-PCIE") & frame["dtype"].eq("fp32") & frame["time_ms_forward"].notna()
    for one, other in (
        ("width", "height"),
        ("kernel_w", "kernel_h"),
        ("pad_w", "pad_h"),
        ("stride_w", "stride_h"),
    ):
        chosen &= frame[one].eq(frame[other])
    found = frame[chosen]
    return pd.DataFrame(
        {
            "batch_size": found["batch"],
            "in_size": found["width"],
            "kernel": found["kernel_w"],
            "stride": found["stride_w"],
            "is_same": found["pad_w"].gt(0),
            "in_features": found["in_channels"],
            "out_features": found["out_channels"],
            "time_ms_median": found["time_ms_forward"] + _OVERHEAD_MS,
        }
    )


_P100 = "p100-pcie-16gb"
_NETWORKS = {"mnist_cnn": "mnist-cnn", "cifar10_cnn": "cifar10-cnn", "patch_camelyon_cnn": "pcam-cnn"}
_CONVOLUTIONS: Mapping[str, tuple[Convolution, ...]] = {
    "mnist_cnn": (Convolution(28, 3, 1, 32, "valid"), Convolution(13, 3, 32, 32, "valid")),
    "cifar10_cnn": (
        Convolution(32, 3, 3, 64, "valid"),
        Convolution(15, 3, 64, 64, "valid"),
        Convolution(6, 3, 64, 32, "valid"),
    ),
    "patch_camelyon_cnn": (
        Convolution(96, 3, 3, 256, "same"),
        Convolution(48, 3, 256, 256, "same"),
        Convolution(24, 3, 256, 512, "same"),
        Convolution(12, 3, 512, 512, "same"),
        Convolution(6, 3, 512, 1024, "same"),
        Convolution(3, 3, 1024, 1024, "same"),
    ),
}
_VENDOR_DEVICES = {"V100": "v100-sxm2-16gb", "A100": "a100-sxm4-40gb"}
_VENDOR_PRECISIONS = {"fp32": Precision.FP32, "tf32": Precision.TF32, "mixed": Precision.AMP}


_AS_KERAS_2 = TrainingSetup(
    optimizer="adam", layout=Layout.NHWC, optimizer_implementation=OptimizerImplementation.FUSED
)
"""The runs are of Keras 2, whose optimizers update each variable by one kernel."""

_IN_LAYERS = (OpClass.CONV, OpClass.ACTIVATION, OpClass.ADD)
"""Classes inside the layers that were timed: with their biases and activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackStudy:
    """Errors as fractions.

    Attributes:
        networks: By network: rows, error of the PyTorch prediction as it is, of the stack's model with the network held
            out, and of the same after one measured batch size.
        stack: Fitted cost of a step [s] and factor k with each network held out.
        devices: By GPU: rows, error of the PyTorch prediction as it is, and with the factor of the other GPUs.
        device_factors: Measured over predicted on the other GPUs.
    """

    networks: Mapping[str, tuple[int, float, float, float]]
    stack: Mapping[str, tuple[float, float]]
    devices: Mapping[str, tuple[int, float, float]]
    device_factors: Mapping[str, float]


def stack_study(folder: Path) -> StackStudy:
    """Both questions from the public tables in a folder."""
    weights = load_weights(shipped_weights_path())
    rows = keras_network_rows(folder, weights, fit_convolution_times(folder))
    networks: dict[str, tuple[int, float, float, float]] = {}
    stack = {}
    for name in _NETWORKS:
        held = (rows["model"] == name).to_numpy()
        stack[name] = fit_stack(rows[~held])
        networks[name] = _errors(rows[held], *stack[name])
    total = np.concatenate([np.full(n, i) for i, (n, *_) in enumerate(networks.values())])
    means = [np.asarray([found[k] for found in networks.values()])[total].mean() for k in (1, 2, 3)]
    networks["all rows"] = (len(total), float(means[0]), float(means[1]), float(means[2]))
    devices, factors = _vendor(folder, weights)
    return StackStudy(networks=networks, stack=stack, devices=devices, device_factors=factors)


def keras_network_rows(folder: Path, weights: CostModel, times: ConvolutionTimes) -> pd.DataFrame:
    """Measured steps of the three networks on one P100, without the start of the run, and the equation's terms [s]."""
    frame = public_table(folder, "iit_e2e")
    start_s = start_of_runs_s(frame)
    chosen = frame[
        (frame["n_gpus"] == 1) & frame["model"].isin(list(_NETWORKS)) & (frame["optimizer"] == "adam")
    ]
    parts = []
    for name, group in chosen.groupby("model"):
        batches = group["batch_size_per_gpu"].astype(int).tolist()
        network = _NETWORKS[str(name)]
        pytorch_s, _ = _times_s(network, batches, weights, TrainingSetup(optimizer="adam"))
        _, other_s = _times_s(f"keras:{network}", batches, weights, _AS_KERAS_2)
        convolutions = np.asarray([times.training_s(_CONVOLUTIONS[str(name)], b) for b in batches])
        parts.append(
            group.assign(
                measured_s=group["time_ms_step"] / 1e3 - start_share_s(group, start_s),
                pytorch_s=pytorch_s,
                other_s=other_s,
                convolution_s=convolutions,
                occasion=group["dataset"]
                + " "
                + group["lease"].fillna(0).astype(str)
                + " "
                + group["epoch_statistic"],
            )
        )
    return pd.concat(parts)


def _times_s(
    model: str, batches: Sequence[int], weights: CostModel, setup: TrainingSetup
) -> tuple[Floats, Floats]:
    """Predicted time of a step, and the device time outside of convolutions [s]."""
    device = find_device(_P100)
    prepared = prepare(trace(ModelRequest(model=model), setup))
    setups = [replace(setup, batch_size_per_device=batch) for batch in batches]
    points = points_of(prepared, [device] * len(setups), setups, None)
    offsets = np.stack([weights.offsets_of_point(point) for point in points], axis=1)
    times = step_times(prepared.ops, points, weights, offsets, with_kernels=True)
    assert times.kernel_s is not None
    is_other = ~np.isin(prepared.ops.op_class, _IN_LAYERS)
    return times.step_s, times.kernel_s[:, is_other].sum(axis=1)


def fit_stack(rows: Any) -> tuple[float, float]:
    """Cost a of a step [s] and factor k: non-negative least squares of the relative error of a + convolutions + k d."""
    measured = rows["measured_s"].to_numpy(float)
    columns = np.column_stack([np.ones(len(rows)), rows["other_s"].to_numpy(float)]) / measured[:, None]
    (step_cost_s, factor), _ = nnls(columns, 1 - rows["convolution_s"].to_numpy(float) / measured)
    return float(step_cost_s), float(factor)


def _errors(rows: pd.DataFrame, step_cost_s: float, factor: float) -> tuple[int, float, float, float]:
    measured = rows["measured_s"].to_numpy(float)
    predicted = (step_cost_s + rows["convolution_s"] + factor * rows["other_s"]).to_numpy(float)
    as_is = np.abs(rows["pytorch_s"].to_numpy(float) / measured - 1)
    blind = np.abs(predicted / measured - 1)
    after = []
    for index in rows.reset_index().groupby("occasion").groups.values():
        here = np.asarray(index)
        if len(here) < 2:
            continue
        batches = rows["batch_size_per_gpu"].to_numpy(float)[here]
        middle = here[np.argsort(batches)[len(here) // 2]]  # the batch that is measured
        others = here[here != middle]
        scaled = predicted[others] * measured[middle] / predicted[middle]
        after.extend(np.abs(scaled / measured[others] - 1))
    return len(rows), float(as_is.mean()), float(blind.mean()), float(np.mean(after))


def _vendor(folder: Path, weights: CostModel) -> tuple[dict[str, tuple[int, float, float]], dict[str, float]]:
    frame = public_table(folder, "dle_training")
    is_row = frame["framework"].str.startswith("TensorFlow") & frame["model"].eq("resnet50v1.5")
    rows = frame[is_row & frame["n_gpus"].eq(1) & frame["micro_step_time_s"].notna()]
    predicted = np.asarray([_vendor_step_s(row, weights) for row in rows.to_dict("records")])
    ratio = np.log(rows["micro_step_time_s"].to_numpy(float) / predicted)
    gpus = rows["gpu"].to_numpy(str)
    devices, factors = {}, {}
    for gpu in sorted(set(gpus)):
        held = gpus == gpu
        factor = float(np.exp(np.median(ratio[~held])))
        as_is = np.abs(np.exp(-ratio[held]) - 1).mean()
        with_factor = np.abs(factor * np.exp(-ratio[held]) - 1).mean()
        devices[gpu] = (int(held.sum()), float(as_is), float(with_factor))
        factors[gpu] = factor
    return devices, factors


def _vendor_step_s(row: Mapping[Any, Any], weights: CostModel) -> float:
    setup = TrainingSetup(
        batch_size_per_device=int(row["batch_size_per_gpu"]),
        precision=_VENDOR_PRECISIONS[str(row["precision"])],
        layout=Layout.NHWC,
    )
    device = find_device(_VENDOR_DEVICES[str(row["gpu"])])
    prepared = prepare(trace(ModelRequest(model="torchvision:resnet50"), setup))
    (point,) = points_of(prepared, [device], [setup], None)
    offsets = weights.offsets_of_point(point)[:, None]
    return float(step_times(prepared.ops, [point], weights, offsets).step_s[0])


def stack_markdown(study: StackStudy) -> str:
    """Both tables."""

    def percent(value: float) -> str:
        return f"{100 * value:.1f} %"

    networks = [
        (name, str(found[0]), *(percent(value) for value in found[1:]))
        for name, found in study.networks.items()
    ]
    devices = [
        (name, str(n), percent(as_is), percent(held), f"{study.device_factors[name]:.3f}")
        for name, (n, as_is, held) in study.devices.items()
    ]
    return (
        "## Keras and TensorFlow\n\n`iit_e2e`, MAPE:\n\n"
        + markdown_table(
            (
                "network held out",
                "rows",
                "PyTorch prediction as it is",
                "with the stack",
                "after one measured batch",
            ),
            networks,
        )
        + "\n`dle_training`, ResNet-50 in TensorFlow 1.15, MAPE:\n\n"
        + markdown_table(
            ("GPU held out", "rows", "PyTorch prediction as it is", "with the stack's factor", "factor"),
            devices,
        )
    )
