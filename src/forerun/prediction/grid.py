"""Step times over a grid of devices and batch sizes, fast enough for ten thousand points a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.interpolate import PchipInterpolator
from threadpoolctl import threadpool_limits

from forerun.costs.op_weights import OpTimeWeights
from forerun.hardware.device import Device
from forerun.prediction.step import PreparedModel, predict_intervals
from forerun.workload.setup import TrainingSetup

__all__ = ["MAX_EXACT_BATCH_SIZES", "between_nodes", "grid_nodes", "predict_grid"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

MAX_EXACT_BATCH_SIZES = 16
"""More batch sizes than these are interpolated between as many of them."""


def predict_grid(
    model: PreparedModel,
    devices: Sequence[Device],
    batch_sizes: Sequence[int],
    setup: TrainingSetup,
    weights: OpTimeWeights,
    torch_version: str | None = None,
) -> tuple[Floats, Floats, Floats]:
    """Value, low and high of the step time, (devices, batch sizes) each [s].

    Up to 16 batch sizes are evaluated one by one. Of more, 16 at equal distances of their logarithm are, and
    log time is interpolated in log batch by monotone cubics (PCHIP) between them: a step time is smooth in
    the batch but for the last wave of a kernel, and the error stays far below the interval. A larger batch never
    takes less time: each time is the largest of those of its own and smaller batches.

    Args:
        model: The traced model.
        devices: Devices.
        batch_sizes: Samples per step, in any order.
        setup: Everything but the batch size.
        weights: The fitted model.
        torch_version: PyTorch version of the run, None for the newest known.
    """
    wanted = np.asarray(batch_sizes, dtype=np.int64)
    nodes = grid_nodes(wanted)
    setups = [replace(setup, batch_size_per_device=int(size)) for size in nodes]
    each_device = [device for device in devices for _ in setups]
    with threadpool_limits(1):  # the products are small: threads would wait for each other
        times = predict_intervals(model, each_device, setups * len(devices), weights, torch_version)
    # Networks know no law of the batch: of 20 doublings one is predicted to take less time.
    grids = [np.maximum.accumulate(values.reshape(len(devices), len(nodes)), axis=1) for values in times]
    value, low, high = (between_nodes(nodes, grid, wanted) for grid in grids)
    return value, low, high


def grid_nodes(wanted: Ints) -> Ints:
    """The batch sizes to evaluate, ascending: all, or the wanted ones nearest to equal logarithmic distances."""
    distinct = np.unique(wanted)
    if len(distinct) <= MAX_EXACT_BATCH_SIZES:
        return distinct
    targets = np.geomspace(distinct[0], distinct[-1], MAX_EXACT_BATCH_SIZES)
    nearest = np.abs(np.log(distinct)[None] - np.log(targets)[:, None]).argmin(axis=1)
    chosen: Ints = distinct[np.unique(nearest)]
    return chosen


def between_nodes(nodes: Ints, grid: Floats, wanted: Ints) -> Floats:
    """Positive values at the wanted batch sizes, (devices, wanted), from those at the nodes, (devices, nodes)."""
    if len(nodes) == len(np.unique(wanted)):
        return grid[:, np.searchsorted(nodes, wanted)]
    curves = PchipInterpolator(np.log(nodes), np.log(grid), axis=1)
    values: Floats = np.exp(curves(np.log(wanted)))
    return values
