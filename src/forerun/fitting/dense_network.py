"""Small dense networks on NumPy: settings, prediction, and a summary like that of Keras.

The fit is in ``dense_training``; a fitted network is a list of matrices, so prediction needs no framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError
from forerun.fitting.interface import Floats

__all__ = ["DenseNetwork", "DenseSettings", "Scaling", "network_arrays", "networks_of", "summary_text"]

_WIDTHS = (26, 24, 10)
_RULE = sum(_WIDTHS) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSettings:
    """Shape and training of a dense network.

    Attributes:
        hidden_sizes: Units of the hidden ReLU layers.
        dropout: Share of units that training silences after each hidden layer.
        loss: ``mse`` or ``mae``, on the standardised logarithm of the time.
        learning_rate: Step size of Adam.
        max_epochs: Passes over the rows.
        patience_epochs: Passes without a better loss after which the fit stops.
        batch_rows: Rows per step of Adam.
        held_out_share: Share of the rows that decides when to stop.
        seeds: One network per seed; predictions are averaged in the logarithm.
    """

    hidden_sizes: tuple[int, ...] = (64, 64)
    dropout: float = 0.0
    loss: Literal["mse", "mae"] = "mse"
    learning_rate: float = 5e-3
    max_epochs: int = 400
    patience_epochs: int = 60
    batch_rows: int = 128
    held_out_share: float = 0.15
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        if self.loss not in ("mse", "mae"):
            raise InvalidSetupError(f"loss must be mse or mae, got '{self.loss}'")
        if not self.seeds or not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise InvalidSetupError(
                f"expected a seed or more and positive hidden sizes, got {self.seeds}, {self.hidden_sizes}"
            )
        if not (0 <= self.dropout < 1 and 0 <= self.held_out_share < 1):
            raise InvalidSetupError(
                "expected dropout and held_out_share of at least 0 and below 1, "
                f"got {self.dropout} and {self.held_out_share}"
            )
        if min(self.max_epochs, self.patience_epochs, self.batch_rows) < 1 or not self.learning_rate > 0:
            raise InvalidSetupError(
                "expected at least one epoch, one epoch of patience and one row per batch, and a positive learning "
                f"rate, got {self.max_epochs}, {self.patience_epochs}, {self.batch_rows}, {self.learning_rate}"
            )


@dataclass(frozen=True, slots=True)
class DenseNetwork:
    """y = W_n relu(... relu(W_1 x + b_1) ...) + b_n.

    Attributes:
        weights: Matrices (units, inputs), one per layer.
        biases: Vectors (units,), one per layer.
    """

    weights: tuple[Floats, ...]
    biases: tuple[Floats, ...]

    def __call__(self, inputs: Floats) -> Floats:
        """Outputs, (n,), of inputs, (n, columns)."""
        values = inputs
        for layer, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            values = values @ weight.T + bias
            if layer < len(self.weights) - 1:
                np.maximum(values, 0.0, out=values)
        return np.asarray(values[:, 0], dtype=float)


@dataclass(frozen=True, slots=True)
class Scaling:
    """Means and deviations that make inputs and target standard."""

    input_mean: Floats
    input_std: Floats
    target_mean: float
    target_std: float

    @classmethod
    def of(cls, inputs: Floats, target: Floats) -> Scaling:
        """Scaling of inputs, (n, columns), and a target, (n,)."""
        return cls(
            inputs.mean(0), _deviation(inputs), float(target.mean()), float(_deviation(target[:, None])[0])
        )

    def inputs(self, inputs: Floats) -> Floats:
        """Standard inputs."""
        return np.asarray((inputs - self.input_mean) / self.input_std, dtype=float)

    def target(self, target: Floats) -> Floats:
        """Standard target."""
        return np.asarray((target - self.target_mean) / self.target_std, dtype=float)

    def plain(self, standard: Floats) -> Floats:
        """The target in its own unit."""
        return np.asarray(standard * self.target_std + self.target_mean, dtype=float)


def _deviation(values: Floats) -> Floats:
    """Standard deviation per column, 1 where a column is constant."""
    deviation = values.std(axis=0)
    return np.asarray(np.where(deviation > 1e-9, deviation, 1.0), dtype=float)


def network_arrays(networks: Sequence[DenseNetwork], scaling: Scaling) -> dict[str, npt.NDArray[Any]]:
    """Networks and scaling as named arrays."""
    arrays: dict[str, npt.NDArray[Any]] = {
        "input_mean": scaling.input_mean,
        "input_std": scaling.input_std,
        "target": np.array([scaling.target_mean, scaling.target_std]),
    }
    for member, network in enumerate(networks):
        for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
            arrays[f"{member}.{layer}.weight"] = weight
            arrays[f"{member}.{layer}.bias"] = bias
    return arrays


def networks_of(
    arrays: Mapping[str, npt.NDArray[Any]], num_inputs: int, settings: DenseSettings
) -> tuple[list[DenseNetwork], Scaling]:
    """Networks and scaling from named arrays.

    Raises:
        KeyError: An array is missing.
        ValueError: An array does not have the shape that the settings give it.
    """
    sizes = (num_inputs, *settings.hidden_sizes, 1)
    layers = range(len(sizes) - 1)

    def array(name: str, *shape: int) -> Floats:
        found = np.asarray(arrays[name], dtype=float)
        if found.shape != shape:
            raise ValueError(f"array '{name}' must have shape {shape}, got {found.shape}")
        return found

    networks = [
        DenseNetwork(
            tuple(array(f"{member}.{i}.weight", sizes[i + 1], sizes[i]) for i in layers),
            tuple(array(f"{member}.{i}.bias", sizes[i + 1]) for i in layers),
        )
        for member in range(len(settings.seeds))
    ]
    target = array("target", 2)
    scaling = Scaling(
        array("input_mean", num_inputs), array("input_std", num_inputs), float(target[0]), float(target[1])
    )
    return networks, scaling


def summary_text(name: str, num_inputs: int, settings: DenseSettings) -> str:
    """Layers, output shapes and parameters as Keras prints them.

    >>> print(summary_text("ann", 3, DenseSettings(hidden_sizes=(8,), seeds=(0,))))
    Model: "ann"
    _____________________________________________________________
     Layer (type)              Output Shape            Param #
    =============================================================
     input (Input)             (None, 3)               0
     dense (Dense, relu)       (None, 8)               32
     dense_1 (Dense)           (None, 1)               9
    =============================================================
    Total params: 41 (164 B)
    Trainable params: 41 (164 B)
    Non-trainable params: 0 (0 B)
    _____________________________________________________________
    """
    rows, total = _layer_rows(num_inputs, settings)
    lines = [f'Model: "{name}"', "_" * _RULE, _line("Layer (type)", "Output Shape", "Param #"), "=" * _RULE]
    lines += [_line(layer, f"(None, {units})", f"{count:,}") for layer, units, count in rows]
    lines += ["=" * _RULE, f"Total params: {_params(total)}", f"Trainable params: {_params(total)}"]
    lines += [f"Non-trainable params: {_params(0)}", "_" * _RULE]
    if len(settings.seeds) > 1:
        seeds = ", ".join(map(str, settings.seeds))
        lines.append(f"{len(settings.seeds)} such networks (seeds {seeds}), averaged in the logarithm")
    return "\n".join(lines)


def _layer_rows(num_inputs: int, settings: DenseSettings) -> tuple[list[tuple[str, int, int]], int]:
    """(name, units, parameters) of each layer, and all parameters."""
    rows, inputs = [("input (Input)", num_inputs, 0)], num_inputs
    for index, units in enumerate((*settings.hidden_sizes, 1)):
        is_hidden = index < len(settings.hidden_sizes)
        suffix = f"_{index}" if index else ""
        kind = "Dense, relu" if is_hidden else "Dense"
        rows.append((f"dense{suffix} ({kind})", units, units * (inputs + 1)))
        if is_hidden and settings.dropout:
            rows.append((f"dropout{suffix} (Dropout)", units, 0))
        inputs = units
    return rows, sum(count for _, _, count in rows)


def _line(*cells: str) -> str:
    return " " + "".join(cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)).rstrip()


def _params(count: int) -> str:
    size = 4.0 * count  # as float32, which is what they were trained in
    return f"{count:,} ({size:.0f} B)" if size < 1000 else f"{count:,} ({size / 1000:.2f} kB)"
