"""Speed of a job against what it is given: two short protocols, and the forms that need no other part.

A speed model is any callable of these signatures, so that a model of communication plugs in as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, exp, inf, log
from typing import Protocol

from forerun.errors import InvalidSetupError

__all__ = [
    "DataParallelSpeed",
    "MeasuredSpeed",
    "ServerSpeed",
    "SpeedModel",
    "SynchronousServerSpeed",
]


class SpeedModel(Protocol):
    """Data-parallel training on devices of one kind."""

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second of all devices together; zero where the batch cannot be run.

        Args:
            num_devices: Devices, n >= 1.
            num_nodes: Nodes they are on.
            batch_size: Samples of one step on all devices.
        """
        ...

    def __hash__(self) -> int:
        """Curves are kept by their speed model."""
        ...


class ServerSpeed(Protocol):
    """Training with parameter servers."""

    def __call__(self, num_workers: int, num_servers: int) -> float:
        """Steps per second with w workers and p servers, both >= 1."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSpeed:
    """The seven-parameter form of Pollux, with gradient accumulation.

    With m samples a device and accumulation step,

        t_grad = gradient_s + gradient_per_sample_s * m
        t_sync = 0 for one device; sync_s + sync_per_device_s * (n - 2), local or between nodes
        t_step = (s - 1) * t_grad + (t_grad ** g + t_sync ** g) ** (1 / g)

    for s accumulation steps and overlap exponent g: 1 is no overlap of computing and communicating, 10 nearly full.

    Attributes:
        gradient_s: Constant part of forward and backward [s].
        gradient_per_sample_s: Their part per sample of a device [s].
        local_sync_s: All-reduce of two devices of one node [s].
        local_sync_per_device_s: More of it for each further device of the node [s].
        node_sync_s: All-reduce of two devices of different nodes [s].
        node_sync_per_device_s: More of it for each further device [s].
        overlap: Exponent g, 1 to 10.
        max_batch_per_device: Most samples that fit on a device; more are accumulated.

    Source: Qiao et al. 2021, "Pollux", OSDI, section 3.2.
    """

    gradient_s: float
    gradient_per_sample_s: float
    local_sync_s: float = 0.0
    local_sync_per_device_s: float = 0.0
    node_sync_s: float = 0.0
    node_sync_per_device_s: float = 0.0
    overlap: float = 1.0
    max_batch_per_device: float = inf

    def sync_time_s(self, num_devices: int, num_nodes: int) -> float:
        """Time of one all-reduce by itself [s]."""
        if num_devices == 1:
            return 0.0
        if num_nodes == 1:
            return self.local_sync_s + self.local_sync_per_device_s * (num_devices - 2)
        return self.node_sync_s + self.node_sync_per_device_s * (num_devices - 2)

    def step_time_s(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Time of one step of the whole batch [s]."""
        per_device = batch_size / num_devices
        num_passes = max(1, ceil(per_device / self.max_batch_per_device - 1e-9))
        gradient = self.gradient_s + self.gradient_per_sample_s * per_device / num_passes
        sync = self.sync_time_s(num_devices, num_nodes)
        g = self.overlap
        return (num_passes - 1) * gradient + float((gradient**g + sync**g) ** (1 / g))

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second; zero for less than one sample a device."""
        if batch_size < num_devices:
            return 0.0
        return batch_size / self.step_time_s(num_devices, num_nodes, batch_size)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSpeed:
    """Speed from measured points: a line in log-log coordinates between them.

    Beyond the last point the last two points' slope goes on, at most 1 and at least 0; before the first point the
    speed is proportional to the devices. The batch a device gets is that of the measurements: a larger batch on as
    many devices is not known to be faster.

    Attributes:
        samples_per_s: Measured speed by number of devices [1/s].
    """

    samples_per_s: Mapping[int, float]

    def __post_init__(self) -> None:
        if not self.samples_per_s:
            raise InvalidSetupError("expected at least one measured speed, got none")
        for count, speed in self.samples_per_s.items():
            if count < 1 or not 0 < speed < inf:
                raise InvalidSetupError(
                    f"a measured speed needs at least one device and samples per second above zero, got {speed} on "
                    f"{count} devices"
                )

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second."""
        points = sorted(self.samples_per_s.items())
        if num_devices <= points[0][0]:
            return points[0][1] * num_devices / points[0][0]
        for (low, slow), (high, fast) in pairwise(points):
            if num_devices <= high:
                share = log(num_devices / low) / log(high / low)
                return slow * exp(share * log(fast / slow))
        last, speed = points[-1]
        if len(points) == 1:
            return speed
        before, slower = points[-2]
        slope = min(1.0, max(0.0, log(speed / slower) / log(last / before)))
        return float(speed * (num_devices / last) ** slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class SynchronousServerSpeed:
    """Optimus' speed of synchronous training with parameter servers, at a fixed global batch.

    Steps per second with w workers and p servers:

        f = 1 / (t0 / w + t1 + t2 * w / p + t3 * w + t4 * p)

    t0 is the time of the whole batch on one worker, t1 what does not depend on either, t2 sending and receiving
    parameters, t3 and t4 the overhead of each connection [s].

    Source: Peng et al. 2018, "Optimus", EuroSys, equation 4.
    """

    batch_s: float
    constant_s: float
    transfer_s: float
    per_worker_s: float
    per_server_s: float

    def __call__(self, num_workers: int, num_servers: int) -> float:
        """Steps per second."""
        w, p = num_workers, num_servers
        return 1.0 / (
            self.batch_s / w
            + self.constant_s
            + self.transfer_s * w / p
            + self.per_worker_s * w
            + self.per_server_s * p
        )
