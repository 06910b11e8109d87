"""Fitted constants of several devices, and their files: those of layouts and those of data parallel training.

Of layouts they are rates of collectives, and the price of doing them beside computation. Of data parallel training, per
kind of link and of software: from the measured step t1 of one device, n devices take

    t_n = t1 (1 + drag E_n) + overhead_s + exposed + slowdown (busy - exposed)

with the all-reduces of the gradient buckets at ``share`` of the link's usable bandwidth, E_n the expected maximum of
n normal numbers (stragglers, input and host contention grow alike), ``slowdown`` the time that a hidden
second of communication adds to the backward pass (1: nothing is hidden), and ``overhead_s`` further time of a step of
several devices.

Measured steps of several devices correct the logarithm of a predicted one. The errors of predicted layouts (log of
measured over predicted) are taken for a Gaussian process over the shape of a step: near shapes err alike. With
measured errors y at shapes X, a new shape x has

    mean = k (K + s^2 I)^-1 y,   variance = k(x, x) - k (K + s^2 I)^-1 k^T,   k(x, z) = a^2 + b^2 exp(-|x - z|)

where |x - z| is the distance of shapes in lengths that were fitted with a, b and s on public steps
(``studies/layouts/study.py``). So a shape that was measured is predicted as it was measured, a like one nearly so,
and an unlike one as before.

Source: Rasmussen and Williams 2006, Gaussian Processes for Machine Learning, equations 2.25 and 2.26.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.answers import fields_of, from_plain
from forerun.base.errors import CostModelError
from forerun.base.received import DAMAGE, check_array, check_name, in_a_line, json_file, read_json
from forerun.cost.communication.collectives import AllReduce
from forerun.graph.graph import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutConstants:
    """Physical constants, each fitted on the measurements that the table names.

    Attributes:
        start_s: Time of a collective of no data between two devices, beside its hops [s].
        hop_s: Further time of each further device of a node [s].
        half_rate_bytes: Bytes across each link at which half of the full rate is reached [bytes].
        intra_share: Rate of large messages over the usable rate of the link, by collective.
        inter_share: The same between nodes.
        network_hops: Latencies of the network that a collective pays per further node.
        slowdown: Time that a second of hidden communication adds to the computation beside it.
        launch_s: Time in which the host launches one collective of tensor or context parallelism, with the framework's
            own work around it [s].
        crossing_s: Time that a collective of tensor parallelism waits for each further node of its group: nothing hides
            it, and the hosts of several nodes never launch at one moment [s].
        blocked_s: Further time of a collective of tensor parallelism for each device of its group, in pipelines over
            nodes whose hosts wait at every handover (nanotron) [s].
        blocked_crossing_s: The same for each further node of the group [s].
        slice_s: Time of the host for cutting, joining and copying back one slice of a tensor, of which nanotron's ZeRO
            has one for each replica [s].
        stall_s: Further time of each exchange of a stage in some of such pipelines, the more the more nodes [s].
        stall_nodes: Nodes from which on most of such pipelines stall.
        stage_s: Time of handing over a micro-step between two stages, beside the transfer [s].
    """

    start_s: float = 5e-6
    hop_s: float = 1e-6
    half_rate_bytes: float = 4e6
    intra_share: Mapping[str, float] = field(default_factory=dict)
    inter_share: float = 1.0
    network_hops: float = 2.0
    slowdown: float = 0.1
    launch_s: float = 0.0
    crossing_s: float = 0.0
    blocked_s: float = 0.0
    blocked_crossing_s: float = 0.0
    slice_s: float = 0.0
    stall_s: float = 0.0
    stall_nodes: float = inf
    stage_s: float = 0.0

    def intra_share_of(self, kind: str) -> float:
        """Rate of large messages of a collective inside a node over the usable rate of the link."""
        return self.intra_share.get(str(kind), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """The constants with their origin.

    Attributes:
        constants: The constants.
        log_spread: Standard deviation of the logarithm of predicted over measured steps of several devices, on the
            worst of the sources that were left out of the fit.
        provenance: Tables, rows and date.
        measured: Steps that were measured on the user's cluster, None without.
    """

    constants: LayoutConstants
    log_spread: float
    provenance: Mapping[str, Any]
    measured: MeasuredLayouts | None = None

    def to_json(self) -> str:
        """The text of the file."""
        return json_file({name: value for name, value in fields_of(self).items() if name != "measured"})


@cache
def load_layout_table(path: Path | None = None) -> LayoutTable:
    """The fitted constants.

    Raises:
        CostModelError: The file is missing or damaged.
    """
    shipped = Path(__file__).parent / "weights" / "layout_constants.json"
    found: LayoutTable = _table(LayoutTable, path or shipped, "the constants of layouts")
    return found


def _table(kind: Any, file: Path, what: str) -> Any:
    """A table of constants, each a finite number of zero or more."""
    try:
        return from_plain(kind, read_json(file))
    except (OSError, ValueError) as error:
        raise CostModelError(f"expected {what} in {file.name}, but {error}; fit them again") from error


FULL_SLOWDOWN_BYTES_PER_S = 12.5e9
"""Rate of InfiniBand EDR, over which most rows of several nodes were measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingConstants:
    """Effect of training on a link.

    Attributes:
        share: Bandwidth that training reaches, relative to the usable bandwidth of the catalogue.
        slowdown: Cost of a hidden second of communication, 0 to 1.
        drag: Coefficient of variation that explains the waiting of n devices.
        overhead_s: Further time of a step of several devices [s].
    """

    share: float = 1.0
    slowdown: float = 0.0
    drag: float = 0.0
    overhead_s: float = 0.0

    def slowdown_on(self, all_reduce: AllReduce) -> float:
        """Cost of a hidden second over these links.

        Hidden communication takes memory bandwidth and cores for the bytes it moves: between nodes whose links are
        slower than ``FULL_SLOWDOWN_BYTES_PER_S`` a second moves fewer.
        """
        if all_reduce.num_nodes == 1:
            return self.slowdown
        return self.slowdown * min(1.0, all_reduce.inter_bytes_per_s / FULL_SLOWDOWN_BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTable:
    """Constants by stack ("pytorch", "tensorflow", ...) and link class ("nvlink", "pcie", "network").

    Attributes:
        constants: By ``"stack/link"``, ``"stack"``, ``"link"`` and ``""`` for anything else.
        log_spread: Standard deviation of the logarithm of predicted over measured steps, held out, by link class.
        provenance: Source tables, rows and date.
    """

    constants: Mapping[str, ScalingConstants]
    log_spread: Mapping[str, float]
    provenance: Mapping[str, Any]

    def of(self, stack: str, link: str) -> ScalingConstants:
        """The most specific constants for a stack and a link."""
        for key in (f"{stack}/{link}", f"/{link}", f"{stack}/", ""):
            if key in self.constants:
                return self.constants[key]
        raise CostModelError("the table of scaling constants has no default entry ''; fit it again")

    def spread_of(self, link: str) -> float:
        """Spread of the logarithm of a step on several devices that comes from scaling alone."""
        return self.log_spread.get(link, max(self.log_spread.values(), default=0.1))

    def to_json(self) -> str:
        """The text of the file."""
        return json_file(fields_of(self))


def shipped_table_path() -> Path:
    """Path of the fitted constants."""
    return Path(__file__).parent / "weights" / "scaling_constants.json"


@cache
def load_scaling_table(path: Path | None = None) -> ScalingTable:
    """The fitted constants.

    Raises:
        CostModelError: The file is missing or damaged.
    """
    found: ScalingTable = _table(ScalingTable, path or shipped_table_path(), "the constants of scaling")
    return found


_KIND = "forerun layouts measured"
_VERSION = 1
"""Files without one are of this version."""
_LEAST_S = 1e-6
_MOST_STEPS = 1000
"""The correction inverts a matrix of as many rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Figures of a step that its error depends on.

    Attributes:
        hidden_size: Width of a token.
        block_s: Predicted micro-step of the slowest stage over its blocks [s].
        exposed_share: Share of the step that is communication which nothing hides.
        waiting_share: Share of the step that waits for the host.
    """

    hidden_size: float
    block_s: float
    exposed_share: float
    waiting_share: float

    @property
    def coordinates(self) -> tuple[float, float, float, float]:
        """Sizes by their logarithms, shares as they are."""
        return (
            log(max(1.0, self.hidden_size)),
            log(max(_LEAST_S, self.block_s)),
            self.exposed_share,
            self.waiting_share,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorLaw:
    """Scatter of the logarithms of errors, and the lengths over which shapes err alike.

    Attributes:
        common: Standard deviation of what all steps of a cluster have in common.
        shape: That of what depends on the shape.
        noise: That of repeats of one shape.
        lengths: Lengths of the four coordinates of a shape.

    The figures are the likeliest on eight sources of public steps, at most 60 of each
    (``studies/layouts/study.py``).
    """

    common: float = 0.030
    shape: float = 0.127
    noise: float = 0.025
    lengths: tuple[float, float, float, float] = (0.41, 0.19, 0.035, 0.11)

    def alike(self, one: Floats, other: Floats) -> Floats:
        """Covariances of errors at shapes, (n, m)."""
        distance = np.linalg.norm((one[:, None] - other[None]) / np.asarray(self.lengths), axis=-1)
        found: Floats = self.common**2 + self.shape**2 * np.exp(-distance)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayouts:
    """Measured steps of one kind of device.

    Attributes:
        device: Name of the device.
        shapes: Shapes of the steps.
        logs: Logarithms of measured over predicted steps.
        law: Scatter of errors.
    """

    device: str
    shapes: tuple[StepShape, ...]
    logs: tuple[float, ...]
    law: ErrorLaw = ErrorLaw()

    def correction(self, shape: StepShape) -> tuple[float, float]:
        """Mean of the logarithm of measured over predicted at a shape, and what is left of its standard deviation."""
        known = np.asarray([one.coordinates for one in self.shapes])
        here = np.asarray([shape.coordinates])
        law = self.law
        covariance = law.alike(known, known) + law.noise**2 * np.eye(len(known))
        near = law.alike(here, known)[0]
        weights = np.linalg.solve(covariance, near)
        before = law.common**2 + law.shape**2
        # Below zero by rounding alone.
        left = max(0.0, before - float(weights @ near))
        return float(weights @ np.asarray(self.logs)), float(
            np.sqrt((left + law.noise**2) / (before + law.noise**2))
        )

    def without(self, index: int) -> MeasuredLayouts | None:
        """The others of the steps; None if there are none."""
        if len(self.logs) == 1:
            return None
        kept = [number for number in range(len(self.logs)) if number != index]
        shapes = tuple(self.shapes[number] for number in kept)
        return replace(self, shapes=shapes, logs=tuple(self.logs[number] for number in kept))

    def to_json(self) -> str:
        """The text of the file."""
        return json_file({"kind": _KIND, "version": _VERSION, **asdict(self)})


def is_layouts_file(name: str | None) -> bool:
    """True for the name of a file of measured layouts, other than one of a calibrated device."""
    return name is not None and name.lower().endswith(".json")


def load_measured_layouts(path: Path, device: str) -> MeasuredLayouts:
    """The measured steps of a file.

    Raises:
        CostModelError: The file is missing, damaged, or of another device.
    """
    try:
        document = read_json(path)
        if not isinstance(document, dict) or document.pop("kind", None) != _KIND:
            raise ValueError("it is another kind of file")
        if (version := document.pop("version", _VERSION)) != _VERSION:
            raise ValueError(f"its version is {in_a_line(version)[:20]}, not {_VERSION}")
        found: MeasuredLayouts = from_plain(MeasuredLayouts, document, least=-np.inf)
        _check_numbers(found)
    except DAMAGE as error:
        raise CostModelError(
            f"expected measured steps of layouts in {path.name}, but {in_a_line(error)}; make them with: "
            "forerun calibrate --from steps.csv --out FILE.json"
        ) from error
    if found.device != device:
        raise CostModelError(
            f"{path.name} holds steps measured on {found.device}, not on {device}; leave --calibration out"
        )
    return found


def _check_numbers(found: MeasuredLayouts) -> None:
    check_name("device", found.device)
    if not found.logs or len(found.logs) != len(found.shapes):
        raise ValueError(f"it has {len(found.logs)} logs of {len(found.shapes)} shapes")
    if len(found.logs) > _MOST_STEPS:
        raise ValueError(f"it has {len(found.logs):,} steps, more than {_MOST_STEPS:,}")
    ranges: dict[str, tuple[float, float]] = {
        "hidden_size": (0, 1e9),
        "block_s": (0, 1e9),
        "exposed_share": (0, 1),
        "waiting_share": (0, 1),
    }
    columns: dict[str, Sequence[float]] = {
        name: [getattr(shape, name) for shape in found.shapes] for name in ranges
    }
    law = asdict(found.law)
    columns |= {name: value if name == "lengths" else (value,) for name, value in law.items()}
    ranges |= {"common": (0, 10), "shape": (0, 10), "noise": (1e-4, 10), "lengths": (1e-4, 1e4)}
    for name, (low, high) in {**ranges, "logs": (-10, 10)}.items():
        values = np.asarray(columns.get(name, found.logs), dtype=np.float64)
        check_array(name, values, "float64", values.shape, low, high)
