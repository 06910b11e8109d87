"""Times of single convolutions on a P100, from the public tables of layers that were timed alone.

TensorFlow's tables have small layers; DeepBench's, of the same library of kernels, has those of many channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from forerun.evidence.fitting.evaluation import Floats
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
