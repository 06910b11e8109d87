"""Figures of single layers on a device, the input of a layer regressor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.interface import Floats
from forerun.adapters.classics.step_features import peak_flops_per_s
from forerun.base.errors import RecordError
from forerun.evidence.measurement.layer_figures import layer_figures
from forerun.evidence.records.measurement import Scalar
from forerun.question.devices.device import Device
from forerun.question.setup import Precision

__all__ = ["LAYER_NUMBERS", "LAYER_WORDS", "LayerCase", "LayerFeatures", "layer_case", "layer_features"]

LAYER_SIZES = (
    "batch_size", "in_size", "in_features", "out_features", "kernel", "stride", "groups", "sequence_length",
    "num_heads",
)  # fmt: skip
LAYER_WORK = ("flops", "input_bytes", "output_bytes", "weight_bytes")
LAYER_DEVICE = ("peak_flops_per_s", "bandwidth_bytes_per_s", "memory_bytes", "num_compute_units")

LAYER_NUMBERS = (*LAYER_SIZES, *LAYER_WORK, *LAYER_DEVICE)
"""Numbers of a layer, in the order of their columns; a size that a kind of layer does not have is zero."""

LAYER_WORDS = (
    "layer",
    "mode",
    "padding",
    "use_bias",
    "activation",
    "optimizer",
    "precision",
    "layout",
    "framework",
)
"""Choices of a layer, in the order of their columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCase:
    """One layer on one device.

    Attributes:
        sizes: Those of ``LAYER_SIZES`` that the layer has.
        words: Those of ``LAYER_WORDS`` that apply; ``layer`` and ``mode`` must be there.
        flops: Work of the forward pass [FLOP].
        num_inputs, num_outputs, num_parameters: Elements read, written, and held as weights.
        device: Device of the layer.
    """

    sizes: dict[str, float]
    words: dict[str, str]
    flops: float
    num_inputs: float
    num_outputs: float
    num_parameters: float
    device: Device = field(repr=False)

    @property
    def precision(self) -> Precision:
        """Numeric recipe; fp32 unless a word says otherwise."""
        return Precision(self.words.get("precision", Precision.FP32))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFeatures:
    """One row per layer, n rows.

    Attributes:
        numbers: Columns ``LAYER_NUMBERS``, (n, numbers).
        words: Columns ``LAYER_WORDS``, text, (n, words).
    """

    numbers: Floats
    words: npt.NDArray[np.str_]

    def __post_init__(self) -> None:
        for name, found, columns in (
            ("numbers", self.numbers, LAYER_NUMBERS),
            ("words", self.words, LAYER_WORDS),
        ):
            if found.shape != (len(self.numbers), len(columns)):
                raise RecordError(
                    f"layer features: expected {len(columns)} columns of {name} in each of {len(self.numbers)} rows, "
                    f"got shape {found.shape}"
                )
        if not np.all(np.isfinite(self.numbers) & (self.numbers >= 0)):
            row, column = np.argwhere(~(np.isfinite(self.numbers) & (self.numbers >= 0)))[0]
            raise RecordError(
                f"layer features: '{LAYER_NUMBERS[column]}' of row {row + 1} must be zero or more, "
                f"got {self.numbers[row, column]}; drop the row"
            )

    def __len__(self) -> int:
        return len(self.numbers)

    def take(self, rows: npt.NDArray[np.int64]) -> LayerFeatures:
        """The rows with these indices, in their order."""
        return LayerFeatures(numbers=self.numbers[rows], words=self.words[rows])

    def number(self, name: str) -> Floats:
        """A column of ``LAYER_NUMBERS``, (n,)."""
        return np.asarray(self.numbers[:, LAYER_NUMBERS.index(name)], dtype=float)

    @property
    def flops(self) -> Floats:
        """Work of the forward pass [FLOP], (n,)."""
        return self.number("flops")

    @property
    def peak_flops_per_s(self) -> Floats:
        """Peak rate of the device [FLOP/s], (n,)."""
        return self.number("peak_flops_per_s")

    @property
    def moved_bytes(self) -> Floats:
        """Traffic of the forward pass if every element moves once [bytes], (n,)."""
        return self.number("input_bytes") + self.number("output_bytes") + self.number("weight_bytes")


def layer_features(cases: Sequence[LayerCase]) -> LayerFeatures:
    """Features of layers; the work is that of the forward pass, the word ``mode`` names the measured part."""
    if not cases:
        raise RecordError("expected at least one layer to compute features of, got none")
    words = np.array(
        [[case.words.get(name, "none") for name in LAYER_WORDS] for case in cases], dtype=np.str_
    )
    return LayerFeatures(numbers=np.array([_numbers(case) for case in cases], dtype=float), words=words)


def _numbers(case: LayerCase) -> list[float]:
    element_bytes = 2.0 if case.precision.is_half else 4.0
    device = case.device
    return [
        *(case.sizes.get(name, 0.0) for name in LAYER_SIZES),
        case.flops,
        element_bytes * case.num_inputs,
        element_bytes * case.num_outputs,
        element_bytes * case.num_parameters,
        peak_flops_per_s(device, case.precision),
        device.memory_bandwidth_bytes_per_s,
        device.memory_bytes,
        float(device.num_compute_units),
    ]


_DEFAULT_WORDS = {
    "mode": "forward",
    "activation": "none",
    "optimizer": "none",
    "precision": str(Precision.FP32),
    "layout": "nchw",
}


def layer_case(
    kind: str, parameters: Mapping[str, Scalar], device: Device, framework: str = "pytorch"
) -> LayerCase:
    """One layer on a device.

    Args:
        kind: Kind of layer, as in ``measurement.layers.figures``.
        parameters: Sizes and choices of the layer under the names of the public layer tables.
        device: Device of the layer.
        framework: Framework of the layer; at equal sizes, times differ between frameworks.

    Raises:
        InvalidSetupError: No such kind, a size is missing, or sizes contradict each other.
    """
    figures = layer_figures(kind, parameters)
    words = {name: str(parameters.get(name) or default) for name, default in _DEFAULT_WORDS.items()}
    words |= {
        "layer": kind,
        "framework": framework,
        "use_bias": str(bool(parameters.get("use_bias"))).lower(),
    }
    if parameters.get("kernel") is not None:
        words["padding"] = str(parameters.get("padding") or "same")
    if words["mode"] == "forward" or not figures.num_parameters:  # nothing is updated
        words["optimizer"] = "none"
    return LayerCase(
        sizes=_sizes(parameters),
        words=words,
        flops=figures.flops,
        num_inputs=float(prod(figures.input_shape)),
        num_outputs=float(prod(figures.output_shape)),
        num_parameters=float(figures.num_parameters),
        device=device,
    )


def _sizes(parameters: Mapping[str, Scalar]) -> dict[str, float]:
    values = {name: parameters.get(name) for name in LAYER_SIZES}
    found = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
    if "kernel" in found:
        found.setdefault("stride", 1.0)
    return found
