"""Steps of the very network on the very device that others have published, and what they say about a step of one's own.

The logarithm of a step over its prediction has two sources, of which only the second differs between systems that run
the same network on the same device in the same way:

    log(measured / predicted) = m + s

with m ~ N(0, model^2) the error of the cost model on this network and device, s ~ N(0, system^2) all that one does not
know about a system (its clocks, host and libraries). Of a published row i with batch b_i, m is another one by
N(0, apart_i^2), apart_i^2 = doubling^2 |log2(b / b_i)| + model^2 (q_i - 1)^2, with q_i the ratio, above 1, of the times
of a sample in the two: 1 / q_i of the slower one is the same work, the rest waits for launches and has an error of its
own. With residuals r_i the step of a system that was not measured is

    K    = model^2 1 1' + diag(system^2 + apart_i^2)
    mean = model^2 1' K^-1 r
    var  = model^2 - model^4 1' K^-1 1 + system^2

Rows are predicted with their own release of PyTorch. A row counts if device (or a board that has another size of memory
alone), network (name, input, parameters), phase, precision, layout and whether there is an update agree, and if no
setting changes the operations. Rows of releases before 2.0 say nothing about networks with fused attention, which those
releases did not have.

Source: the constants are those of ``cost.time.evidence``; the table is made by ``python -m studies published-steps``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.base.answers import Answer
from forerun.base.kept import Kept
from forerun.cost.time.evidence import Z_90, shipped_evidence
from forerun.cost.time.features import software_era
from forerun.cost.time.rows import is_mostly_double
from forerun.cost.time.step_times import scaled
from forerun.cost.time.weights import CostModel
from forerun.graph.graph import Floats, Graph, OpClass
from forerun.question.devices.catalogue import load_catalog, same_die
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
    shape = graph.input_shape
    if setup.compile or setup.saving != NO_SAVING or len(shape) != 3 or shape[1] != shape[2]:
        return ()
    text, systems = _table()
    name = graph.model.rpartition(":")[2].partition(".")[0]
    wanted = {key: str(getattr(setup, key)) for key in ("phase", "precision", "layout")}
    boards = (device.name, *(name for name in same_die(device) if _is_twin(device, name)))
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
            found.append(PublishedRow(system.source, system.torch_version, size, float(time_ms) / 1e3))
    return tuple(found)


def _is_twin(device: Device, name: str) -> bool:
    """True if boards of one die differ in the size of their memory alone, which no step feels."""
    other = load_catalog()[name]
    return other.memory_bandwidth_bytes_per_s == device.memory_bandwidth_bytes_per_s


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


StepsOf = Callable[[Device, Sequence[TrainingSetup], str | None], Floats]
"""Steps of a network on a device with a release of PyTorch, by the cost model alone, (p,) [s]."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """One network on one device in one kind of step, and the cost model alone that predicts it."""

    model: PreparedModel
    device: Device
    setup: TrainingSetup
    weights: CostModel
    steps_of: StepsOf

    def log_steps(self, rows: Sequence[PublishedRow], batch_sizes: Sequence[int]) -> Floats:
        """Logarithms of predicted steps with the release of PyTorch of each row, (k,)."""
        logs = np.empty(len(rows))
        for release in {row.torch_version for row in rows}:
            own = [index for index, row in enumerate(rows) if row.torch_version == release]
            setups = [replace(self.setup, batch_size_per_device=batch_sizes[index]) for index in own]
            # The cost model takes one release at a time; rows of one table have several.
            logs[own] = np.log(self.steps_of(self.device, setups, release))
        return logs

    def published(self) -> tuple[tuple[PublishedRow, ...], Floats]:
        """Published rows and the logarithms of their predicted steps, (k,), found once for all batch sizes."""

        def make() -> tuple[tuple[PublishedRow, ...], Floats]:
            rows = known_rows(self.model, self.device, self.setup, self.weights)
            return rows, self.log_steps(rows, [row.batch_size for row in rows])

        # Rows have batch sizes of their own: all batches of a sweep share one entry.
        values = (replace(self.setup, batch_size_per_device=1),)
        return _PUBLISHED.get((self.model, self.device, self.weights), values, make)

    def at_this_batch(
        self, rows: Sequence[PublishedRow], log_predicted: Floats, order: Sequence[int]
    ) -> tuple[PublishedStep, ...]:
        """Published steps in an order, each also as it would be at the batch size asked for."""
        sizes = [self.setup.batch_size_per_device] * len(rows)
        ratios = np.exp(self.log_steps(rows, sizes) - log_predicted)
        return tuple(
            PublishedStep(
                **asdict(rows[index]), at_this_batch_s=rows[index].step_time_s * float(ratios[index])
            )
            for index in order
        )


_PUBLISHED: Kept[tuple[tuple[PublishedRow, ...], Floats]] = Kept(4_096)


def known_rows(
    model: PreparedModel, device: Device, setup: TrainingSetup, weights: CostModel
) -> tuple[PublishedRow, ...]:
    """Published rows of a prepared network; none of a part of one or in fp64, nor where a calibration outranks them."""
    if not model.is_whole or weights.calibrated_device is not None or is_mostly_double(model.ops):
        return ()
    return published_rows(model.graph, device, setup)


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
    if not any(rows for rows, _ in known):
        return steps
    spreads = shipped_evidence().spreads
    log_factor, width = np.zeros(len(known)), steps.log_width.copy()
    published: list[tuple[PublishedStep, ...]] = [()] * len(known)
    for index, ((rows, log_predicted), setup) in enumerate(zip(known, setups, strict=True)):
        if not rows:
            continue
        batch_sizes = np.asarray([row.batch_size for row in rows], dtype=np.float64)
        # Batches err alike by their ratio, so their distance counts in doublings.
        doublings = np.log2(batch_sizes / setup.batch_size_per_device)
        system = float(steps.system_log_width[index]) / Z_90
        # Rounding can leave the whole a little below its part.
        model_variance = max((float(width[index]) / Z_90) ** 2 - system**2, 0.0)
        per_sample = np.log(steps.step_s[index] / setup.batch_size_per_device)
        log_filled = np.abs(log_predicted - np.log(batch_sizes) - per_sample)
        log_factor[index], variance = posterior_of_system(
            np.log([row.step_time_s for row in rows]) - log_predicted,
            spreads.doubling**2 * np.abs(doublings) + model_variance * np.expm1(log_filled) ** 2,
            model_variance,
            system**2,
        )
        width[index] = Z_90 * np.sqrt(variance)
        if with_steps:
            # The nearest batch first; within half a doubling the newest software says most.
            eras = np.asarray([software_era(row.torch_version) for row in rows])
            order = np.lexsort((-eras, np.abs(doublings).round()))
            published[index] = asked[index].at_this_batch(rows, log_predicted, order.tolist())
    return replace(
        steps,
        times=scaled(steps.times, np.exp(log_factor)),
        log_width=width,
        published=tuple(published),
    )
