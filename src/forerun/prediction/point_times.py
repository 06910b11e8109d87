"""Step times of many points with how active the device is, for plans: no breakdown, arrays in and out.

Of a grid up to 16 batch sizes are evaluated one by one. Of more, 16 at equal distances of their logarithm are, and log
time is interpolated in log batch by monotone cubics (PCHIP) between them: a step time is smooth in the batch but for
the last wave of a kernel, and the error stays far below the interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from forerun.base.kept import Kept
from forerun.base.numerics import monotone_cubic
from forerun.cost.memory.stream import live_peak_bytes
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Graph, Ints
from forerun.prediction.step import (
    PreparedModel,
    ideal_times_s,
    interval_ends_s,
    points_of,
    timed_steps,
)
from forerun.question.devices.device import Device
from forerun.question.setup import TrainingSetup

KEPT_ROWS: Kept[Floats] = Kept(1024)
"""Rows of devices over a grid of batch sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PointTimes:
    """Steps of many points; all arrays have the shape of the points.

    Attributes:
        step_s: Time of a step [s].
        log_width: Half-width of its 90 % interval in log time.
        least_s: Time of the products at the peak of the device, which no step undercuts [s].
        activity: Time of the work at peak rates plus that of the traffic at full bandwidth, over the step.
        compute_fraction: Share of the former in the two together, 0 to 1.
    """

    step_s: Floats
    log_width: Floats
    least_s: Floats
    activity: Floats
    compute_fraction: Floats

    def row(self, index: int) -> PointTimes:
        """The points of one device of a grid, (batch sizes,) each."""
        return PointTimes(**{column.name: getattr(self, column.name)[index] for column in fields(self)})

    def ends(self, index: int | None = None) -> Floats:
        """Value, low and high of the steps, (3, p) [s]; of a grid those of one device."""
        found = self if index is None else self.row(index)
        return interval_ends_s(found.step_s, found.log_width, found.least_s)


def point_times(
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    torch_version: str | None = None,
) -> PointTimes:
    """Steps of one model at p pairs of device and setup; arrays are (p,)."""
    from threadpoolctl import threadpool_limits  # a single prediction is one product

    with threadpool_limits(1):  # the products are small: threads would wait for each other
        found = timed_steps(model, devices, setups, weights, torch_version)
        compute_s, memory_s = ideal_times_s(model, points_of(model, devices, found.setups, torch_version))
    return PointTimes(
        step_s=found.step_s,
        log_width=found.log_width,
        least_s=found.least_s,
        activity=(compute_s + memory_s) / found.step_s,
        compute_fraction=compute_s / np.maximum(compute_s + memory_s, 1e-30),
    )


def grid_times(
    model: PreparedModel,
    devices: Sequence[Device],
    batch_sizes: Ints,
    setup: TrainingSetup,
    weights: CostModel,
    torch_version: str | None = None,
) -> PointTimes:
    """Steps over a grid; arrays are (devices, batch sizes).

    Rows of devices are remembered: a plan is often asked again with another budget.
    """
    # The sizes are in the key already; with one of them the setup would make it another key.
    values = (batch_sizes.tobytes(), replace(setup, batch_size_per_device=1), torch_version)
    rows = [KEPT_ROWS.find((model, weights, device), values) for device in devices]
    missing = [number for number, row in enumerate(rows) if row is None]
    if missing:
        wanted = [devices[number] for number in missing]
        new = _grid_rows(model, wanted, batch_sizes, setup, weights, torch_version)
        for number, row in zip(missing, new, strict=True):
            rows[number] = row
            KEPT_ROWS.keep((model, weights, devices[number]), values, row)
    stacked = np.stack([row for row in rows if row is not None], axis=1)
    return PointTimes(**{column.name: row for column, row in zip(fields(PointTimes), stacked, strict=True)})


def _grid_rows(
    model: PreparedModel,
    devices: Sequence[Device],
    batch_sizes: Ints,
    setup: TrainingSetup,
    weights: CostModel,
    torch_version: str | None,
) -> list[Floats]:
    """One array (5, batch sizes) per device: time, width, least time, activity and share of arithmetic."""
    nodes = grid_nodes(batch_sizes)
    setups = [replace(setup, batch_size_per_device=int(size)) for size in nodes]
    each_device = [device for device in devices for _ in setups]
    found = point_times(model, each_device, setups * len(devices), weights, torch_version)

    def at_wanted(values: Floats) -> Floats:
        # A fraction may be zero, and the interpolation is of logarithms.
        return between_nodes(nodes, np.maximum(values, 1e-9).reshape(len(devices), len(nodes)), batch_sizes)

    by_device = found.step_s.reshape(len(devices), len(nodes))
    # A larger batch takes no less time: without the waves of single kernels a step would be monotone.
    step_s = np.maximum.accumulate(by_device, axis=1).reshape(-1)
    activity = found.activity * found.step_s / step_s
    columns = (step_s, found.log_width, found.least_s, activity, found.compute_fraction)
    return list(np.stack([at_wanted(values) for values in columns], axis=1))


def grid_live_bytes(graph: Graph, batch_sizes: Ints) -> Floats:
    """Peak of live bytes at each batch size, (batch sizes,) [bytes].

    Between the nodes of the grid it is interpolated linearly. The peak is the largest of many lines in the batch, so a
    straight line between two of its points is never below it.
    """
    nodes = grid_nodes(batch_sizes)
    peaks = np.asarray([live_peak_bytes(graph.memory, int(size)) for size in nodes], dtype=np.float64)
    return np.interp(batch_sizes, nodes, peaks)


MAX_EXACT_BATCH_SIZES = 16
"""More batch sizes than these are interpolated between as many of them."""


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
    values: Floats = np.exp(monotone_cubic(np.log(nodes), np.log(grid), np.log(wanted)))
    return values
