"""Speed models fitted to measured steps, by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize

from forerun.errors import InvalidSetupError
from forerun.scheduler.speed import DataParallelSpeed

__all__ = [
    "StepPoint",
    "fit_data_parallel",
]

Floats = npt.NDArray[np.float64]

_SMALLEST_S = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPoint:
    """One measured data-parallel step.

    Attributes:
        num_devices, num_nodes: Where it ran.
        batch_size_per_device: Samples of a device.
        step_time_s: The whole step [s].
        sync_time_s: The part of it in which gradients were waited for [s]; None if it was not told apart.
    """

    num_devices: int
    num_nodes: int
    batch_size_per_device: float
    step_time_s: float
    sync_time_s: float | None = None


def fit_data_parallel(points: Sequence[StepPoint], max_batch_per_device: float = np.inf) -> DataParallelSpeed:
    """The seven parameters that make the root mean square of log(predicted / measured) smallest.

    The step and, where it was told apart, the step without waiting count equally. As in Pollux, an exponent far from
    1 and a synchronisation that grows fast with the devices cost a little, and what no point shows is pinned: without
    points on several nodes they cost 1.1 times what one node does.

    Args:
        points: Measured steps, at least one.
        max_batch_per_device: Most samples that fit on a device.

    Raises:
        InvalidSetupError: There is no point.

    Source: Qiao et al. 2021, "Pollux", OSDI, section 4.1.
    """
    if not points:
        raise InvalidSetupError("expected at least one measured step, got none")
    table = _Table(points)
    best = min(
        (
            minimize(
                table.loss,
                table.start(overlap),
                method="L-BFGS-B",
                bounds=[(np.log(_SMALLEST_S), 6.0)] * 6 + [(1.0, 10.0)],
            )
            for overlap in (1.0, 2.5)
        ),
        key=lambda found: float(found.fun),
    )
    values = np.exp(best.x[:6])
    if not table.is_apart.any():
        values[4:6] = 1.1 * values[2:4]
    return DataParallelSpeed(
        gradient_s=float(values[0]),
        gradient_per_sample_s=float(values[1]),
        local_sync_s=float(values[2]),
        local_sync_per_device_s=float(values[3]),
        node_sync_s=float(values[4]),
        node_sync_per_device_s=float(values[5]),
        overlap=float(best.x[6]),
        max_batch_per_device=max_batch_per_device,
    )


class _Table:
    """Measured steps as arrays, and the loss of seven parameters on them."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        self.num_devices = np.asarray([p.num_devices for p in points], dtype=float)
        self.batch = np.asarray([p.batch_size_per_device for p in points], dtype=float)
        self.step_s = np.asarray([p.step_time_s for p in points])
        waited = np.asarray([np.nan if p.sync_time_s is None else p.sync_time_s for p in points])
        self.gradient_s = np.maximum(self.step_s - waited, 0.05 * self.step_s)
        self.is_shared = self.num_devices > 1
        self.is_apart = np.asarray([p.num_nodes > 1 for p in points])

    def start(self, overlap: float) -> Floats:
        fastest = float(self.step_s.min())
        per_sample = 0.5 * float((self.step_s / self.batch).min())
        sync = 0.3 * fastest
        guess = [0.5 * fastest, per_sample, sync, 0.02 * sync, sync, 0.02 * sync]
        return np.asarray([*np.log(np.maximum(guess, 10 * _SMALLEST_S)), overlap])

    def loss(self, x: Floats) -> float:
        a, b, local, local_more, apart, apart_more = np.exp(x[:6])
        g = x[6]
        gradient = a + b * self.batch
        others = self.num_devices - 2
        sync = np.where(self.is_apart, apart + apart_more * others, local + local_more * others)
        step = np.where(self.is_shared, (gradient**g + np.abs(sync) ** g) ** (1 / g), gradient)
        error = float(np.mean(np.log(step / self.step_s) ** 2))
        known = ~np.isnan(self.gradient_s)
        if known.any():
            error += float(np.mean(np.log(gradient[known] / self.gradient_s[known]) ** 2))
        growth = (local_more / local) ** 2 + (apart_more / apart) ** 2
        return float(error + 1e-3 * (g - 1) ** 2 + 1e-2 * growth)
