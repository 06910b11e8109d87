"""Worth of more devices to a job: useful samples per second, the best batch of each number, the upper hull."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from forerun.errors import InvalidSetupError
from forerun.scheduler.speed import SpeedModel

__all__ = ["BatchEfficiency", "Efficiency", "RateCurve", "rate_curve", "upper_hull"]

NUM_BATCHES_TRIED = 25


class Efficiency(Protocol):
    """Worth of a sample in a larger batch."""

    def __call__(self, batch_size: float, progress: float) -> float:
        """Progress of a sample, relative to one in a batch of the size asked for.

        Args:
            batch_size: Samples of one step on all devices.
            progress: Share of the job that is done, 0 to 1.
        """
        ...

    def __hash__(self) -> int:
        """Curves are kept by their efficiency."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchEfficiency:
    """Statistical efficiency from the gradient noise scale: eff(M) = (phi + M0) / (phi + M).

    Attributes:
        noise_scale: phi, the batch beyond which more samples stop to help.
        base_batch_size: M0, where the efficiency is 1.

    Source: McCandlish et al. 2018, arXiv 1812.06162; the form is that of Pollux, OSDI 2021, section 3.1.
    """

    noise_scale: float
    base_batch_size: float

    def __post_init__(self) -> None:
        if self.noise_scale < 0 or self.base_batch_size <= 0:
            raise InvalidSetupError(
                "a noise scale must be zero or more and the base batch above zero, got "
                f"{self.noise_scale} and {self.base_batch_size}"
            )

    def __call__(self, batch_size: float, progress: float) -> float:
        """Progress of a sample, the same all along the job."""
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + batch_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RateCurve:
    """Useful samples per second against the number of devices of one kind, packed on as few nodes as they need.

    Attributes:
        rates: By number of devices, from 0; zero where the job cannot run [1/s].
        batch_sizes: Global batch that gives this rate, by number of devices.
        hull: Numbers of devices at the corners of the least concave curve above the rates, from 0 to the best.
    """

    rates: tuple[float, ...]
    batch_sizes: tuple[float, ...]
    hull: tuple[int, ...]

    @property
    def best(self) -> int:
        """Fewest devices with the highest rate; 0 if the job cannot run here."""
        return self.hull[-1]

    @property
    def fewest(self) -> int:
        """Fewest devices the job runs on at all; 0 if it cannot run here."""
        return next((n for n, rate in enumerate(self.rates) if rate > 0), 0)

    def best_within(self, num_devices: int) -> int:
        """Fewest devices with the highest rate among at most so many."""
        end = min(num_devices, len(self.rates) - 1)
        return max(range(end + 1), key=lambda n: (self.rates[n], -n))

    def scaled(self, factors: Sequence[float]) -> RateCurve:
        """The same curve with each rate multiplied, by number of devices."""
        rates = tuple(rate * factor for rate, factor in zip(self.rates, factors, strict=False))
        return RateCurve(rates=rates, batch_sizes=self.batch_sizes, hull=upper_hull(rates))


def upper_hull(rates: Sequence[float]) -> tuple[int, ...]:
    """Corners of the least concave function above the rates, up to the first maximum.

    >>> upper_hull([0.0, 1.0, 1.8, 1.2, 3.0, 3.0])
    (0, 1, 4)
    """
    end = max(range(len(rates)), key=lambda n: (rates[n], -n))
    corners = [0]
    for n in range(1, end + 1):
        while len(corners) > 1 and _is_below(rates, corners[-2], corners[-1], n):
            corners.pop()
        corners.append(n)
    return tuple(corners)


def _is_below(rates: Sequence[float], a: int, b: int, c: int) -> bool:
    """True if the point at b lies on or below the line from a to c."""
    return (rates[b] - rates[a]) * (c - a) <= (rates[c] - rates[a]) * (b - a)


@lru_cache(maxsize=20_000)
def rate_curve(
    speed: SpeedModel,
    efficiency: Efficiency | None,
    batch_range: tuple[float, float],
    devices_per_node: int,
    max_devices: int,
    progress: float,
) -> RateCurve:
    """The curve of one job on one kind of device.

    Args:
        speed: Its speed there.
        efficiency: What a sample of a larger batch is worth; None: always the same.
        batch_range: Smallest and largest global batch to choose from.
        devices_per_node: Devices of a node.
        max_devices: Length of the curve.
        progress: Share of the job that is done; the efficiency may depend on it.
    """
    low, high = batch_range
    steps = NUM_BATCHES_TRIED - 1
    tried = [low] if low == high else [low * (high / low) ** (i / steps) for i in range(steps + 1)]
    worth = [1.0 if efficiency is None else efficiency(batch, progress) for batch in tried]
    rates, batches = [0.0], [low]
    for n in range(1, max_devices + 1):
        nodes = -(-n // devices_per_node)
        found = [speed(n, nodes, batch) * use for batch, use in zip(tried, worth, strict=True)]
        chosen = max(range(len(tried)), key=found.__getitem__)
        rates.append(found[chosen])
        batches.append(tried[chosen])
    return RateCurve(rates=tuple(rates), batch_sizes=tuple(batches), hull=upper_hull(rates))
