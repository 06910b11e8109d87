"""A dense neural network on a few figures of the model: the regressor of the CNN time predictor of old."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from forerun.errors import InvalidSetupError
from forerun.regressors.features import WholeModelFeatures
from forerun.regressors.interface import Floats, check_fit_input, not_fitted

__all__ = ["AnnSettings", "NeuralNetwork"]

_SCALAR_COLUMNS = (
    "num_parameters",
    "batch_size",
    "image_size",
    "flops",
    "traffic_bytes",
    "num_kernels",
    "peak_flops_per_s",
    "bandwidth_bytes_per_s",
)

# Fewer rows than this are all needed for the fit; then the best training loss stops it.
_FEWEST_ROWS_TO_HOLD_OUT = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnSettings:
    """How the network looks and learns.

    Attributes:
        columns: Scalar columns of ``WholeModelFeatures`` to read; their logarithms are the input.
        hidden_sizes: Units of the hidden ReLU layers.
        loss: ``mse`` or ``mae``, on the standardised logarithm of the time.
        learning_rate: Step size of Adam.
        max_epochs: Passes over the rows.
        patience_epochs: Passes without a better loss after which the fit stops.
        batch_rows: Rows per step of Adam.
        held_out_share: Share of the rows that decides when to stop.
        seeds: One network per seed; predictions are averaged in the logarithm.
    """

    columns: tuple[str, ...] = ("num_parameters", "batch_size", "image_size")
    hidden_sizes: tuple[int, ...] = (64, 64)
    loss: Literal["mse", "mae"] = "mse"
    learning_rate: float = 5e-3
    max_epochs: int = 400
    patience_epochs: int = 60
    batch_rows: int = 128
    held_out_share: float = 0.15
    seeds: tuple[int, ...] = (0, 1, 2)

    def __post_init__(self) -> None:
        unknown = [name for name in self.columns if name not in _SCALAR_COLUMNS]
        if unknown or not self.columns:
            raise InvalidSetupError(f"columns must be of {', '.join(_SCALAR_COLUMNS)}, got {self.columns}")
        if self.loss not in ("mse", "mae"):
            raise InvalidSetupError(f"loss must be mse or mae, got '{self.loss}'")
        if not self.seeds or not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise InvalidSetupError(
                f"expected a seed or more and positive hidden sizes, got {self.seeds}, {self.hidden_sizes}"
            )


@dataclass(frozen=True, slots=True)
class _Scaling:
    """Means and deviations that make inputs and target standard."""

    input_mean: Floats
    input_std: Floats
    target_mean: float
    target_std: float


class NeuralNetwork:
    """log t = network(log parameters, log batch, log image size, ...), by default two layers of 64 ReLU."""

    def __init__(self, settings: AnnSettings | None = None) -> None:
        self.settings = settings or AnnSettings()
        self._networks: list[nn.Sequential] = []
        self._scaling: _Scaling | None = None

    def _inputs(self, features: WholeModelFeatures) -> Floats:
        columns = [getattr(features, name) for name in self.settings.columns]
        return np.asarray(np.log(np.maximum(np.column_stack(columns), 1.0)), dtype=float)

    def fit(self, features: WholeModelFeatures, step_time_s: Floats) -> None:
        """Fit one network per seed."""
        target = np.log(check_fit_input(features, step_time_s))
        inputs = self._inputs(features)
        self._scaling = _Scaling(
            inputs.mean(0), _deviation(inputs), float(target.mean()), float(_deviation(target[:, None])[0])
        )
        x = torch.tensor(self._scaled(inputs), dtype=torch.float32)
        y = torch.tensor((target - self._scaling.target_mean) / self._scaling.target_std, dtype=torch.float32)
        self._networks = [_fit_network(x, y, self.settings, seed) for seed in self.settings.seeds]

    def predict(self, features: WholeModelFeatures) -> Floats:
        """Times of the averaged networks [s]."""
        if self._scaling is None:
            raise not_fitted("the neural network")
        x = torch.tensor(self._scaled(self._inputs(features)), dtype=torch.float32)
        with torch.no_grad():
            standard = torch.stack([network(x)[:, 0] for network in self._networks]).mean(0)
        logs = standard.double().numpy() * self._scaling.target_std + self._scaling.target_mean
        return np.asarray(np.exp(logs), dtype=float)

    def _scaled(self, inputs: Floats) -> Floats:
        assert self._scaling is not None
        return np.asarray((inputs - self._scaling.input_mean) / self._scaling.input_std, dtype=float)


def _deviation(values: Floats) -> Floats:
    """Standard deviation per column, 1 where a column is constant."""
    deviation = values.std(axis=0)
    return np.where(deviation > 1e-9, deviation, 1.0)


def _build(num_inputs: int, hidden_sizes: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden_sizes:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))


def _fit_network(x: torch.Tensor, y: torch.Tensor, settings: AnnSettings, seed: int) -> nn.Sequential:
    """Adam until the held-out loss stops falling; the best state is kept."""
    # Global generators are left as they were found: a prediction library must not reseed its user.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _build(x.shape[1], settings.hidden_sizes)
        order = torch.randperm(len(x))
        num_held_out = int(settings.held_out_share * len(x)) if len(x) >= _FEWEST_ROWS_TO_HOLD_OUT else 0
        fit_rows, held_out = order[num_held_out:], order[:num_held_out] if num_held_out else order
        _train(network, x[fit_rows], y[fit_rows], x[held_out], y[held_out], settings)
    return network.eval()


def _train(
    network: nn.Sequential,
    x: torch.Tensor,
    y: torch.Tensor,
    x_held_out: torch.Tensor,
    y_held_out: torch.Tensor,
    settings: AnnSettings,
) -> None:
    loss_of = nn.MSELoss() if settings.loss == "mse" else nn.L1Loss()
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    best_loss, best_state, epochs_since = float("inf"), copy.deepcopy(network.state_dict()), 0
    for _ in range(settings.max_epochs):
        for rows in torch.split(torch.randperm(len(x)), settings.batch_rows):
            optimizer.zero_grad()
            loss_of(network(x[rows])[:, 0], y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(loss_of(network(x_held_out)[:, 0], y_held_out))
        epochs_since += 1
        if loss < best_loss:
            best_loss, best_state, epochs_since = loss, copy.deepcopy(network.state_dict()), 0
        if epochs_since >= settings.patience_epochs:
            break
    network.load_state_dict(best_state)
