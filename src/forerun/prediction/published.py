"""Steps of the very network that others have published, and what they say about a step of one's own.

The logarithm of a step over its prediction has two sources, of which only the second differs between systems that run
the same network on the same device in the same way:

    log(measured / predicted) = m + s

with m ~ N(0, model^2) the error of the cost model on this network and device, s ~ N(0, system^2) all that one does not
know about a system (its clocks, host and libraries). Of a published row i with batch b_i, m is another one by
N(0, apart_i^2), apart_i^2 = doubling^2 |log2(b / b_i)| + model^2 (q_i - 1)^2 + host_i^2, with host_i the spread of
hosts as far as one decided the row (``host_spread``) and q_i the ratio, above 1, of the times
of a sample in the two: 1 / q_i of the slower one is the same work, the rest waits for launches and has an error of its
own. With residuals r_i the step of a system that was not measured is

    K    = model^2 1 1' + diag(system^2 + apart_i^2)
    mean = model^2 1' K^-1 r
    var  = model^2 - model^4 1' K^-1 1 + system^2

Rows on other boards of the device's architecture say less: m = c + d, with c ~ N(0, KIN model^2) common to the boards
of an architecture and d, the rest, of one board. Their rows give a posterior of c, and so the m ~ N(mean, model'^2)
from which the rows on the device itself go on. Devices left out: 16.6 to 15.2 %, sources 16.2 to 15.4 %.

Rows are predicted with their own release of PyTorch. A row counts if device (or a board that has another size of memory
alone; for c, any of the architecture), network (name, input, parameters), phase, precision, layout and whether there is
an update agree, and if no setting changes the operations. Rows of releases before 2.0 say nothing about networks with
fused attention, which those releases did not have.

Source: the constants are those of ``cost.time.evidence``; the table is made by ``python -m studies published-steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.answers import Answer
from forerun.base.kept import Kept
from forerun.cost.time.evidence import Z_90, shipped_evidence
from forerun.cost.time.features import software_era
from forerun.cost.time.rows import is_mostly_double
from forerun.cost.time.step_times import StepTimes, host_spread, scaled
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Bools, Floats, Graph, Ints, OpClass
from forerun.question.devices.catalogue import devices_of_architecture, load_catalog, same_die
from forerun.question.devices.device import Device
from forerun.question.saving import NO_SAVING
from forerun.question.setup import Phase, TrainingSetup

if TYPE_CHECKING:
    from forerun.prediction.step import PreparedModel, TimedSteps

_ROUNDING = 5_500
"""Tables give millions of parameters with two decimals."""

_ALIKE = ("sgd", "nesterov", "momentum")
"""Optimizers whose update reads and writes about as much."""

_FIRST_FUSED = 2
"""Major release of PyTorch with fused attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep(Answer):
    """A published step beside the question.

    Attributes:
        source: Who published it, with the licence.
        torch_version: Release of PyTorch.
        batch_size: Its batch size on one device.
        step_time_s: Its step [s].
        at_this_batch_s: The same at the batch size of the question, scaled by the cost model [s].
    """

    source: str
    torch_version: str
    batch_size: int
    step_time_s: float
    at_this_batch_s: float


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """A row of the table."""

    device: str
    source: str
    torch_version: str
    batch_size: int
    step_time_s: float


@dataclass(frozen=True, slots=True)
class _System:
    device: str
    phase: str
    precision: str
    layout: str
    torch_version: str
    optimizer: str
    batch_size: int
    source: str


def published_rows(graph: Graph, device: Device, setup: TrainingSetup) -> tuple[PublishedRow, ...]:
    """Published steps of a network on a device in the same circumstances, of any batch size and release.

    Args:
        graph: The network's step.
        device: The device.
        setup: The circumstances.
    """
    boards = _twins(device)
    return tuple(row for row in rows_of_architecture(graph, device, setup) if row.device in boards)


def rows_of_architecture(graph: Graph, device: Device, setup: TrainingSetup) -> tuple[PublishedRow, ...]:
    """Published steps as of ``published_rows``, on any board of the device's architecture; searched once and kept."""
    values = (device.name, device.architecture, replace(setup, batch_size_per_device=1))
    return _ROWS.get((graph,), values, lambda: _searched(graph, device, setup))


def _searched(graph: Graph, device: Device, setup: TrainingSetup) -> tuple[PublishedRow, ...]:
    shape = graph.input_shape
    if setup.compile or setup.saving != NO_SAVING or len(shape) != 3 or shape[1] != shape[2]:
        return ()
    text, systems = _table()
    name = graph.model.rpartition(":")[2].partition(".")[0]
    wanted = {key: str(getattr(setup, key)) for key in ("phase", "precision", "layout")}
    boards = {device.name, *(board.name for board in devices_of_architecture(device.architecture))}
    optimizer = setup.optimizer if setup.phase is Phase.TRAIN else "none"
    kin = _ALIKE if optimizer in _ALIKE else (optimizer,)
    is_fused = bool((graph.ops.op_class == OpClass.ATTENTION).any())
    is_in_parts = not setup.fused_attention and bool((graph.ops.op_class == OpClass.BMM).any())
    found = []
    for counted, cells in _lines(text, f"\n{name}\t{shape[1]}\t"):
        # One name, two networks: a later version of a library may have another head.
        if abs(counted - graph.num_parameters) > _ROUNDING:
            continue
        for cell in cells:
            key, _, time_ms = cell.partition("=")
            code, _, batch = key.partition("@")
            system = systems[code]
            if system.device not in boards or system.optimizer not in kin:
                continue
            if any(getattr(system, key) != value for key, value in wanted.items()):
                continue
            # Attention was another set of kernels before: such a row is of another step.
            is_new = int(system.torch_version.partition(".")[0]) >= _FIRST_FUSED
            if is_in_parts if is_new else is_fused:
                continue
            size = int(batch) if batch else system.batch_size
            time_s = float(time_ms) / 1e3
            found.append(PublishedRow(system.device, system.source, system.torch_version, size, time_s))
    return tuple(found)


def _twins(device: Device) -> tuple[str, ...]:
    """The device, and boards of its die that differ in the size of their memory alone, which no step feels."""
    catalog, own = load_catalog(), device.memory_bandwidth_bytes_per_s
    found = (name for name in same_die(device) if catalog[name].memory_bandwidth_bytes_per_s == own)
    return (device.name, *found)


KIN = 0.6
"""Share of the variance of the cost model's error on a network that boards of one architecture have in common. Of .5 to
.7, the log interval score is the same within .03, of devices as of sources left out."""


def posterior_of_kin(
    residuals: Floats, variances: Floats, boards: Ints, model_variance: float
) -> tuple[float, float]:
    """Mean and variance of the cost model's error on a board, from rows on others of its architecture.

    The rows of a board are one, of variance v = 1 / sum of 1 / variance, about c + d; its posterior of c has the
    precision 1 / (KIN M) + sum over boards of 1 / ((1 - KIN) M + v).

    Args:
        residuals: log(measured / predicted) of published rows, (k,).
        variances: Of each row about the error of its board, (k,).
        boards: Number of the board of each row, (k,).
        model_variance: Variance M of the cost model's error on one board.
    """
    weights = 1 / variances
    sums = np.bincount(boards, weights), np.bincount(boards, weights * residuals)
    # Numbers of boards that have no row here, as that of the device itself, are left out.
    total, weighted = (found[sums[0] > 0] for found in sums)
    own_variance = (1 - KIN) * model_variance
    return posterior_of_system(weighted / total, 1 / total, KIN * model_variance, own_variance)


def posterior_of_system(
    residuals: Floats, apart_variance: Floats, model_variance: float, system_variance: float
) -> tuple[float, float]:
    """Mean and variance of the log residual of a system that was not measured.

    Rows are independent given the shared error m ~ N(0, M): its posterior has the precision 1 / M + sum of w_i, with
    w_i = 1 / (S + a_i).

    Args:
        residuals: log(measured / predicted) of published rows, (k,).
        apart_variance: Variance that their other batch adds to each, a, (k,).
        model_variance: Variance M of the cost model's own error, which all systems share.
        system_variance: Variance S between systems.

    >>> mean, variance = posterior_of_system(np.array([0.2]), np.zeros(1), 0.03, 0.01)
    >>> round(mean, 3), round(variance, 4)
    (0.15, 0.0175)
    """
    weights = 1 / (system_variance + apart_variance)
    shared_variance = model_variance / (1 + model_variance * weights.sum())
    return float(shared_variance * (weights @ residuals)), float(shared_variance + system_variance)


def _lines(text: str, begin: str) -> list[tuple[int, list[str]]]:
    """Parameters and cells of the lines with this beginning."""
    # Searched, not split into its 2,000 lines: a question wants a few, and each answer asks.
    found, at = [], text.find(begin)
    while at >= 0:
        end = text.index("\n", at + 1)
        counted, cells = text[at + len(begin) : end].split("\t")
        found.append((int(counted), cells.split(" ")))
        at = text.find(begin, end)
    return found


@cache
def _table() -> tuple[str, Mapping[str, _System]]:
    """The lines of the networks, and the systems by their codes."""
    text = Path(__file__).with_name("published_steps.txt").read_text(encoding="utf-8")
    head, _, networks = text.partition("\n\n")
    systems = {}
    for line in head.splitlines():
        if not line.startswith("#"):
            code, device, phase, precision, layout, release, optimizer, batch, source = line.split("\t")
            systems[code] = _System(device, phase, precision, layout, release, optimizer, int(batch), source)
    return f"\n{networks}", systems


StepsOf = Callable[[Sequence[Device], Sequence[TrainingSetup], str | None], StepTimes]
"""Steps of a network on p devices with a release of PyTorch, by the cost model alone."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One network on one device in one kind of step, and the cost model alone that predicts it."""

    model: PreparedModel
    device: Device
    setup: TrainingSetup
    weights: CostModel
    steps_of: StepsOf

    def log_steps(
        self, rows: Sequence[PublishedRow], devices: Sequence[Device], batch_sizes: Sequence[int]
    ) -> Floats:
        """Logarithms of steps on the devices, predicted with the release of PyTorch of each row, (k,)."""
        logs = np.empty(len(rows))
        for release in {row.torch_version for row in rows}:
            own = [index for index, row in enumerate(rows) if row.torch_version == release]
            setups = [replace(self.setup, batch_size_per_device=batch_sizes[index]) for index in own]
            # The cost model takes one release at a time; rows of one table have several.
            logs[own] = np.log(self.steps_of([devices[index] for index in own], setups, release).step_s)
        return logs

    def published(self) -> _Published:
        """Published rows of the network on boards of the architecture, found once for all batch sizes."""

        def of_architecture() -> tuple[tuple[PublishedRow, ...], Floats]:
            rows = known_rows(self.model, self.device, self.setup, self.weights)
            catalog, sizes = load_catalog(), [row.batch_size for row in rows]
            predicted = self.log_steps(rows, [catalog[row.device] for row in rows], sizes)
            return rows, np.log([row.step_time_s for row in rows]) - predicted

        def make() -> _Published:
            kin = (self.device.vendor, self.device.architecture)
            rows, residuals = _RESIDUALS.get((self.model, self.weights), (*kin, *values), of_architecture)
            if not rows:
                return _NONE
            twins = _twins(self.device)
            # How far a batch fills the device is asked once for each size: releases differ little in it.
            sizes, places = np.unique([row.batch_size for row in rows], return_inverse=True)
            setups = [replace(self.setup, batch_size_per_device=int(size)) for size in sizes]
            times = self.steps_of([self.device] * len(setups), setups, None)
            per_sample, spread = np.log(times.step_s / sizes), host_spread(times)
            names, boards = np.unique([row.device for row in rows], return_inverse=True)
            is_own = np.isin(names, twins)[boards]
            return _Published(rows, residuals, per_sample[places], spread[places] ** 2, is_own, boards)

        # Rows have batch sizes of their own: all batches of a sweep share one entry.
        values = (replace(self.setup, batch_size_per_device=1),)
        return _PUBLISHED.get((self.model, self.device, self.weights), values, make)

    def at_this_batch(self, found: _Published, order: Sequence[int]) -> tuple[PublishedStep, ...]:
        """Published steps in an order, each also as it would be at the batch size asked for."""
        rows = [found.rows[index] for index in order]
        sizes = [self.setup.batch_size_per_device] * len(rows)
        asked = self.log_steps(rows, [self.device] * len(rows), sizes)
        return tuple(
            PublishedStep(
                source=row.source,
                torch_version=row.torch_version,
                batch_size=row.batch_size,
                step_time_s=row.step_time_s,
                at_this_batch_s=float(at_this_batch_s),
            )
            for row, at_this_batch_s in zip(rows, np.exp(asked + found.residuals[order]), strict=True)
        )


@dataclass(frozen=True, slots=True)
class _Published:
    """Published rows of a network on boards of one architecture, for a question about one of them.

    Attributes:
        rows: The k rows.
        residuals: log(measured / predicted) of each, (k,).
        per_sample: Logarithms of the time of a sample in these batches, as predicted on the device, (k,).
        host_variance: Variance of its logarithm by the host that measured it, (k,).
        is_own: Which were measured on this very device, (k,).
        boards: Numbers of their boards, (k,).
    """

    rows: tuple[PublishedRow, ...]
    residuals: Floats
    per_sample: Floats
    host_variance: Floats
    is_own: Bools
    boards: Ints


_EMPTY = np.empty(0)
_NONE = _Published((), _EMPTY, _EMPTY, _EMPTY, np.empty(0, dtype=bool), np.empty(0, dtype=int))
_PUBLISHED: Kept[_Published] = Kept(4_096)
_ROWS: Kept[tuple[PublishedRow, ...]] = Kept(4_096)
_RESIDUALS: Kept[tuple[tuple[PublishedRow, ...], Floats]] = Kept(4_096)


def known_rows(
    model: PreparedModel,
    device: Device,
    setup: TrainingSetup,
    weights: CostModel,
) -> tuple[PublishedRow, ...]:
    """Published rows of a prepared network on boards of the architecture; none of a part of one or in fp64.

    Nor are there any where a calibration outranks them.
    """
    if not model.is_whole or weights.calibrated_device is not None or is_mostly_double(model.ops):
        return ()
    return rows_of_architecture(model.graph, device, setup)


def with_published(
    steps: TimedSteps,
    model: PreparedModel,
    devices: Sequence[Device],
    setups: Sequence[TrainingSetup],
    weights: CostModel,
    steps_of: StepsOf,
    *,
    with_steps: bool,
) -> TimedSteps:
    """Steps with what published steps of the network say about them, and if wanted with those steps themselves.

    Args:
        steps: Steps of p points by the cost model alone.
        model: The network.
        devices: Devices of the points, (p,).
        setups: Their setups, (p,).
        weights: The cost model.
        steps_of: The cost model alone, asked for the rows' own circumstances.
        with_steps: True returns the published steps as well.
    """
    asked = [
        _Asked(model, device, setup, weights, steps_of) for device, setup in zip(devices, setups, strict=True)
    ]
    known = [one.published() for one in asked]
    if not any(one.rows for one in known):
        return steps
    spreads = shipped_evidence().spreads
    log_factor, width = np.zeros(len(known)), steps.log_width.copy()
    published: list[tuple[PublishedStep, ...]] = [()] * len(known)
    kin: list[tuple[str, ...]] = [()] * len(known)
    for index, (found, setup) in enumerate(zip(known, setups, strict=True)):
        if not found.rows:
            continue
        is_own = found.is_own
        batch_sizes = np.asarray([row.batch_size for row in found.rows], dtype=np.float64)
        # Batches err alike by their ratio, so their distance counts in doublings.
        doublings = np.log2(batch_sizes / setup.batch_size_per_device)
        system = float(steps.system_log_width[index]) / Z_90
        # Rounding can leave the whole a little below its part.
        model_variance = max((float(width[index]) / Z_90) ** 2 - system**2, 0.0)
        per_sample = np.log(steps.step_s[index] / setup.batch_size_per_device)
        log_filled = np.abs(found.per_sample - per_sample)
        apart = spreads.doubling**2 * np.abs(doublings) + model_variance * np.expm1(log_filled) ** 2
        apart += found.host_variance
        mean = 0.0
        if not is_own.all():
            mean, model_variance = posterior_of_kin(
                found.residuals[~is_own], system**2 + apart[~is_own], found.boards[~is_own], model_variance
            )
        log_factor[index], variance = posterior_of_system(
            found.residuals[is_own] - mean, apart[is_own], model_variance, system**2
        )
        log_factor[index] += mean
        width[index] = Z_90 * np.sqrt(variance)
        if not with_steps:
            continue
        others = [row.device for row, own in zip(found.rows, is_own, strict=True) if not own]
        kin[index] = tuple(dict.fromkeys(others))
        if is_own.any():
            # The nearest batch first; within half a doubling the newest software says most.
            eras = np.asarray([software_era(row.torch_version) for row in found.rows])
            order = [at for at in np.lexsort((-eras, np.abs(doublings).round())) if is_own[at]]
            published[index] = asked[index].at_this_batch(found, order)
    return replace(
        steps,
        times=scaled(steps.times, np.exp(log_factor)),
        log_width=width,
        published=tuple(published),
        kin=tuple(kin),
    )
