"""Fits a dense network with Adam and early stopping; torch is loaded here and the result is plain arrays."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from forerun.fitting.dense_network import DenseNetwork, DenseSettings
from forerun.fitting.interface import Floats

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["fit_networks"]

# With fewer rows than this, all serve the fit, and the best training loss stops it.
_FEWEST_ROWS_TO_HOLD_OUT = 40


def fit_networks(inputs: Floats, targets: Floats, settings: DenseSettings) -> list[DenseNetwork]:
    """One network per seed.

    Args:
        inputs: Standard inputs, (n, columns).
        targets: Standard targets, (n,).
        settings: Size and schedule.
    """
    import torch

    x = torch.tensor(inputs, dtype=torch.float32)
    y = torch.tensor(targets, dtype=torch.float32)
    groups = _groups(inputs)
    return [_as_arrays(_fit_one(x, y, groups, settings, seed)) for seed in settings.seeds]


def _groups(inputs: Floats) -> npt.NDArray[np.int64]:
    """Index of the distinct input of each row, (n,): repetitions of a configuration have equal inputs."""
    _, first, group = np.unique(inputs, axis=0, return_index=True, return_inverse=True)
    # In the order of the rows, so that a set without repetitions is numbered 0, 1, 2, ...
    place = np.empty(len(first), dtype=np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    return np.asarray(place[group.reshape(-1)], dtype=np.int64)


def _fit_one(
    x: torch.Tensor, y: torch.Tensor, groups: npt.NDArray[np.int64], settings: DenseSettings, seed: int
) -> nn.Sequential:
    """Adam until the held-out loss stops falling; the best state is kept."""
    import torch

    # Global generators are left as they were found: a prediction library must not reseed its user.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = _build(x.shape[1], settings)
        order = torch.randperm(int(groups.max()) + 1).numpy()
        num_held_out = int(settings.held_out_share * len(order)) if len(x) >= _FEWEST_ROWS_TO_HOLD_OUT else 0
        is_held_out = torch.from_numpy(np.isin(groups, order[:num_held_out]))
        fit_rows = ~is_held_out
        stop_rows = is_held_out if num_held_out else fit_rows
        _train(network, (x[fit_rows], y[fit_rows]), (x[stop_rows], y[stop_rows]), settings)
    return network.eval()


def _build(num_inputs: int, settings: DenseSettings) -> nn.Sequential:
    from torch import nn

    layers: list[nn.Module] = []
    for width in settings.hidden_sizes:
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        if settings.dropout:
            layers.append(nn.Dropout(settings.dropout))
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(num_inputs, 1))


def _train(
    network: nn.Sequential,
    fit_rows: tuple[torch.Tensor, torch.Tensor],
    stop_rows: tuple[torch.Tensor, torch.Tensor],
    settings: DenseSettings,
) -> None:
    import torch
    from torch import nn

    x, y = fit_rows
    loss_of = nn.MSELoss() if settings.loss == "mse" else nn.L1Loss()
    optimizer = torch.optim.Adam(network.parameters(), lr=settings.learning_rate)
    best_loss, best_state, epochs_since = float("inf"), copy.deepcopy(network.state_dict()), 0
    for _ in range(settings.max_epochs):
        network.train()
        for rows in torch.split(torch.randperm(len(x)), settings.batch_rows):
            optimizer.zero_grad()
            loss_of(network(x[rows])[:, 0], y[rows]).backward()
            optimizer.step()
        loss = _loss(network, stop_rows, loss_of)
        epochs_since += 1
        if loss < best_loss:
            best_loss, best_state, epochs_since = loss, copy.deepcopy(network.state_dict()), 0
        if epochs_since >= settings.patience_epochs:
            break
    network.load_state_dict(best_state)


def _loss(network: nn.Sequential, rows: tuple[torch.Tensor, torch.Tensor], loss_of: nn.Module) -> float:
    import torch

    network.eval()
    with torch.no_grad():
        return float(loss_of(network(rows[0])[:, 0], rows[1]))


def _as_arrays(network: nn.Sequential) -> DenseNetwork:
    from torch import nn

    layers: Sequence[nn.Linear] = [layer for layer in network if isinstance(layer, nn.Linear)]
    return DenseNetwork(
        tuple(layer.weight.detach().double().numpy() for layer in layers),
        tuple(layer.bias.detach().double().numpy() for layer in layers),
    )
