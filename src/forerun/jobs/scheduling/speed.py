"""Speed of a job against the devices it is given: protocols, forms, their fit, and the gain from more devices.

A speed model is any callable of these signatures, so that a model of communication plugs in as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from itertools import pairwise
from math import ceil, exp, inf, log
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


SpeedModel = Callable[[int, int, float], float]
"""Samples per second of all devices together, zero where the batch cannot be run, against the devices (n >= 1) of one
kind, the nodes they are on and the samples of one step on all devices; hashable, for curves are kept by it."""


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
        # A batch that fits exactly must not become two passes by the last bit of the quotient.
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

    def grid(self, num_devices: Ints, num_nodes: Ints, batch_sizes: Floats) -> Floats:
        """Samples per second of many sizes at many batches, (sizes, batches); the same law."""
        n = num_devices[:, None].astype(float)
        per_device = batch_sizes / n
        num_passes = np.maximum(1.0, np.ceil(per_device / self.max_batch_per_device - 1e-9))
        gradient = self.gradient_s + self.gradient_per_sample_s * per_device / num_passes
        local = self.local_sync_s + self.local_sync_per_device_s * (n - 2)
        apart = self.node_sync_s + self.node_sync_per_device_s * (n - 2)
        sync = np.where(n == 1, 0.0, np.where(num_nodes[:, None] == 1, local, apart))
        g = self.overlap
        step = (num_passes - 1) * gradient + (gradient**g + sync**g) ** (1 / g)
        return np.where(batch_sizes < n, 0.0, batch_sizes / step)


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

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second."""
        points = sorted(self.samples_per_s.items())
        if num_devices <= points[0][0]:
            return points[0][1] * num_devices / points[0][0]
        # Straight in the logarithms, as power laws are.
        for (low, slow), (high, fast) in pairwise(points):
            slope = log(fast / slow) / log(high / low)
            if num_devices <= high:
                return slow * exp(slope * log(num_devices / low))
        last, speed = points[-1]
        # Beyond the last point neither faster than linear nor slower with more: two noisy points may say either.
        return float(speed * (num_devices / last) ** (min(1.0, max(0.0, slope)) if len(points) > 1 else 0.0))

    def grid(self, num_devices: Ints, num_nodes: Ints, batch_sizes: Floats) -> Floats:
        """Samples per second of many sizes, the same at every batch, (sizes, batches)."""
        found = np.asarray([self(n, 1, 1.0) for n in num_devices.tolist()])
        return np.broadcast_to(found[:, None], (len(found), len(batch_sizes)))


@dataclass(frozen=True, slots=True, eq=False)
class ScaledSpeed:
    """A speed model times a factor, by number of devices from 0; the last holds for all beyond."""

    model: SpeedModel
    factors: tuple[float, ...]

    def __call__(self, num_devices: int, num_nodes: int, batch_size: float) -> float:
        """Samples per second."""
        factor = self.factors[min(num_devices, len(self.factors) - 1)]
        return factor * self.model(num_devices, num_nodes, batch_size)

    def grid(self, num_devices: Ints, num_nodes: Ints, batch_sizes: Floats) -> Floats:
        """Samples per second of many sizes at many batches, (sizes, batches)."""
        factors = np.asarray(self.factors)[np.minimum(num_devices, len(self.factors) - 1), None]
        return np.asarray(factors * speeds_on_grid(self.model, num_devices, num_nodes, batch_sizes))


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

    Source: Qiao et al. 2021, "Pollux", OSDI, section 4.1.
    """
    from scipy.optimize import minimize  # slow to import, and most jobs say their speed

    table = _Table(points)
    # The loss is not convex in the overlap: one start without overlap, one with some.
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
    # The logarithms were fitted: times stay above zero, and errors are relative.
    values = np.exp(best.x[:6])
    # Without a point on several nodes the fit says nothing of these two.
    if not table.is_apart.any():
        values[4:6] = 1.1 * values[2:4]
    names = [one.name for one in fields(DataParallelSpeed)]
    found: dict[str, float] = dict(zip(names, [*values.tolist(), float(best.x[6])], strict=False))
    return DataParallelSpeed(**found, max_batch_per_device=max_batch_per_device)


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
        # Weak priors: few points leave a long valley of equal loss, in which a fit would end anywhere.
        growth = (local_more / local) ** 2 + (apart_more / apart) ** 2
        return float(error + 1e-3 * (g - 1) ** 2 + 1e-2 * growth)


NUM_BATCHES_TRIED = 25


Efficiency = Callable[[float, float], float]
"""Progress of a sample relative to one in a batch of the size asked for, against the samples of one step on all devices
and the share of the job that is done, 0 to 1; hashable likewise."""


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

    def __call__(self, batch_size: float, progress: float) -> float:
        """Progress of a sample, the same all along the job."""
        return (self.noise_scale + self.base_batch_size) / (self.noise_scale + batch_size)


_PIECES = (1, 8)
"""Ends of the parts in which rates are asked for, from the smallest number of devices: most of a long queue asks for no
more than the first, and most of the rest for a few."""


class RateCurve:
    """Useful samples per second against the number of devices of one kind, packed on as few nodes as they need.

    Rates are those at the best batch of each number of devices, and are asked for when they are needed.

    Args:
        speed: Speed of the job there.
        devices_per_node: Devices of a node.
        sizes: Numbers of devices, ascending.
        tried: Global batches to choose from, and the worth of a sample of each, (2, batches).
    """

    def __init__(
        self, speed: SpeedModel, devices_per_node: int, sizes: tuple[int, ...], tried: Floats
    ) -> None:
        self._speed, self._devices_per_node, self._sizes, self._tried = speed, devices_per_node, sizes, tried
        self._num_asked = 0
        self._rates: dict[int, float] = {}
        self._batches: dict[int, float] = {}

    def _next(self) -> tuple[int, ...]:
        """Numbers of devices whose rates are asked for next."""
        end = next((end for end in _PIECES if end > self._num_asked), None)
        return self._sizes[self._num_asked : end]

    def _ask(self) -> None:
        self._add(*_best(self._speed, self._devices_per_node, self._next(), self._tried))

    def _add(self, rates: Floats, batches: Floats) -> None:
        """Takes up the rates of the next numbers of devices."""
        sizes = self._next()
        self._num_asked += len(sizes)
        for n, rate, batch in zip(sizes, rates.tolist(), batches.tolist(), strict=True):
            if rate > 0:
                self._rates[n], self._batches[n] = rate, batch

    @property
    def rates(self) -> Mapping[int, float]:
        """By number of devices, ascending; only numbers on which the job runs [1/s]."""
        return self._within(self._sizes[-1]) if self._sizes else self._rates

    def _within(self, num_devices: int) -> Mapping[int, float]:
        """The same; beyond so many devices it may lack some."""
        while self._num_asked < len(self._sizes) and self._sizes[self._num_asked] <= num_devices:
            self._ask()
        return self._rates

    @cached_property
    def hull(self) -> tuple[int, ...]:
        """Numbers of devices at the corners of the least concave curve above the rates, from 0 to the best."""
        return upper_hull(self.rates)

    def rate(self, num_devices: int) -> float:
        """Samples per second; zero on a number of devices that is not offered to the job [1/s]."""
        return self._within(num_devices).get(num_devices, 0.0)

    def batch_size(self, num_devices: int) -> float | None:
        """Global batch that gives this rate; None where the job does not run."""
        return self._batches[num_devices] if self.rate(num_devices) else None

    @cached_property
    def fewest(self) -> int:
        """Fewest devices the job runs on at all; 0 if it cannot run here."""
        while not self._rates and self._num_asked < len(self._sizes):
            self._ask()
        return next(iter(self._rates), 0)

    def best_within(self, num_devices: int) -> int:
        """Fewest devices with the highest rate among at most so many; 0 if it runs on none of them."""
        best, highest = 0, 0.0
        for n, rate in self._within(num_devices).items():
            if n > num_devices:
                break
            if rate > highest:
                best, highest = n, rate
        return best

    def after(self, num_devices: int, most: int) -> int | None:
        """The next larger number of devices, at most so many; None if there is none."""
        return next((n for n in self._within(most) if num_devices < n <= most), None)


def _best(
    speed: SpeedModel, devices_per_node: int, sizes: tuple[int, ...], tried: Floats
) -> tuple[Floats, Floats]:
    """Rates at the best batch of each number of devices, and these batches, (..., sizes)."""
    counts, (batches, worth) = np.asarray(sizes), tried
    found = speeds_on_grid(speed, counts, -(-counts // devices_per_node), batches) * worth
    chosen = np.argmax(found, axis=-1)[..., None]
    rates, best = (
        np.take_along_axis(of, chosen, axis=-1)[..., 0]
        for of in (found, np.broadcast_to(batches, found.shape))
    )
    return rates, best


def ask_together(curves: Iterable[RateCurve]) -> None:
    """Asks the first rates of many curves of ``DataParallelSpeed`` in one evaluation of its law, where none is known.

    A curve by itself costs some fifteen calls of NumPy, and a decision about ten thousand jobs has thirty thousand.
    """
    alike: dict[tuple[tuple[int, ...], int, int], dict[RateCurve, DataParallelSpeed]] = {}
    for curve in curves:
        if not curve._num_asked and isinstance(curve._speed, DataParallelSpeed):
            key = (curve._next(), curve._devices_per_node, curve._tried.shape[1])
            alike.setdefault(key, {})[curve] = curve._speed  # jobs may share a curve
    for (sizes, devices_per_node, _), found in alike.items():
        # The law is one of numbers and arrays alike: here each parameter is that of all jobs, (jobs, 1, 1).
        parameters: dict[str, Any] = {
            field.name: np.asarray([getattr(speed, field.name) for speed in found.values()])[:, None, None]
            for field in fields(DataParallelSpeed)
        }
        tried = np.stack([curve._tried for curve in found], axis=1)[:, :, None]
        together = _best(DataParallelSpeed(**parameters), devices_per_node, sizes, tried)
        for curve, rates, batches in zip(found, *together, strict=True):
            curve._add(rates, batches)


def upper_hull(rates: Mapping[int, float]) -> tuple[int, ...]:
    """Corners of the least concave function above the rates and zero at zero, up to the first maximum.

    >>> upper_hull({1: 1.0, 2: 1.8, 3: 1.2, 4: 3.0, 5: 3.0})
    (0, 1, 4)
    """
    end = max(rates, key=lambda n: (rates[n], -n), default=0)
    corners, heights = [0], [0.0]
    for n, rate in rates.items():
        if n > end:
            break
        while len(corners) > 1 and _is_below(corners, heights, n, rate):
            corners.pop()
            heights.pop()
        corners.append(n)
        heights.append(rate)
    return tuple(corners)


def _is_below(corners: Sequence[int], heights: Sequence[float], n: int, rate: float) -> bool:
    """True if the last corner lies on or below the line from the one before to a new point."""
    (a, b), (low, middle) = corners[-2:], heights[-2:]
    # Multiplied out: points on one line are found to be so, which quotients would miss by rounding.
    return (middle - low) * (n - a) <= (rate - low) * (b - a)


_EACH_NUMBER = 16
"""Numbers of devices up to which each is offered, and whole nodes likewise; beyond, doublings and their halves."""


@lru_cache(maxsize=1024)
def offered_sizes(devices_per_node: int, max_devices: int, asked: int = 1) -> tuple[int, ...]:
    """Numbers of devices that a job may be offered, ascending.

    Each up to 16, whole nodes up to 16 of them, then 2^k and 3 * 2^k, and what its owner asks for. Between them a curve
    of speed hardly bends, and a decision about thousands of devices would ask for thousands of numbers.

    >>> offered_sizes(8, 200)[-9:]
    (80, 88, 96, 104, 112, 120, 128, 192, 200)
    """
    doubled = (base << k for base in (1, 3) for k in range(max_devices.bit_length()))
    whole = (devices_per_node * k for k in range(1, _EACH_NUMBER + 1))
    sizes = {*range(1, _EACH_NUMBER + 1), *whole, *doubled, asked, max_devices}
    return tuple(sorted(n for n in sizes if n <= max_devices))


@lru_cache(maxsize=20_000)
def _tried(efficiency: Efficiency | None, batch_range: tuple[float, float], progress: float) -> Floats:
    """Global batches that are tried, and the worth of a sample of each, (2, batches)."""
    low, high = batch_range
    batches = np.asarray([low]) if low == high else np.geomspace(low, high, NUM_BATCHES_TRIED)
    worth = [1.0 if efficiency is None else efficiency(batch, progress) for batch in batches.tolist()]
    return np.stack([batches, worth])


@lru_cache(maxsize=40_000)
def rate_curve(
    speed: SpeedModel,
    efficiency: Efficiency | None,
    batch_range: tuple[float, float],
    devices_per_node: int,
    sizes: tuple[int, ...],
    progress: float,
) -> RateCurve:
    """The curve of one job on one kind of device.

    Args:
        speed: Its speed there.
        efficiency: What a sample of a larger batch is worth; None: always the same.
        batch_range: Smallest and largest global batch to choose from.
        devices_per_node: Devices of a node.
        sizes: Numbers of devices, ascending, see ``offered_sizes``.
        progress: Share of the job that is done; the efficiency may depend on it.
    """
    return RateCurve(speed, devices_per_node, sizes, _tried(efficiency, batch_range, progress))


def speeds_on_grid(speed: SpeedModel, num_devices: Ints, num_nodes: Ints, batch_sizes: Floats) -> Floats:
    """Samples per second of many sizes at each global batch, (sizes, batches).

    A model with a method ``grid(num_devices, num_nodes, batch_sizes)`` answers all at once.
    """
    if (grid := getattr(speed, "grid", None)) is not None:
        return np.asarray(grid(num_devices, num_nodes, batch_sizes), dtype=float)
    places = list(zip(num_devices.tolist(), num_nodes.tolist(), strict=True))
    batches = batch_sizes.tolist()
    return np.asarray([[speed(n, m, batch) for batch in batches] for n, m in places])
