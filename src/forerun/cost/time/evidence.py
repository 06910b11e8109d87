"""Evidence behind a step time: how far a question lies from the steps that were measured, and how wide that makes it.

The half-width of the 90 % interval of the log step time is

    h = b + min over measured systems s of d(question, s) + c * spread of the ensemble

    d = what another phase, number format, compiler, device, architecture and vendor cost, each if it differs,
        + era * |difference of the software's era| + mix * (distance of the mixes of operations)

The mix of a step is the share of each group of classes in its traffic plus its work at 50 FLOP a byte; the distance of
two mixes is half the sum of the absolute differences, 0 to 1. What each difference costs is fitted on steps whose
source, device or family of networks was left out of the fit of the cost model (docs/methods/intervals.md). Nobody can
fit it for an architecture that no table has: there the interval is an order of magnitude wide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache, cached_property
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import CostModelError
from forerun.cost.time.features import Point
from forerun.cost.time.law import GROUP_OF_CLASS, NUM_GROUPS
from forerun.cost.time.rows import DistinctOps
from forerun.question.devices.device import Device
from forerun.question.setup import Precision, TrainingSetup

__all__ = [
    "EVIDENCE_FORMAT_VERSION",
    "NEAR_MIX",
    "ORDER_OF_MAGNITUDE",
    "ErrorSpreads",
    "Evidence",
    "Kind",
    "LogWidths",
    "MeasuredSystem",
    "load_evidence",
    "number_format",
    "operation_mix",
    "shipped_evidence",
    "shipped_evidence_path",
    "step_kind",
]

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, bool]

EVIDENCE_FORMAT_VERSION = 2

ORDER_OF_MAGNITUDE = log(10.0) / 2.0
"""Least half-width of a log time on an architecture that no table has: high is ten times low."""

NEAR_MIX = 0.25
"""Distance of mixes up to which a network counts as one like those that were measured."""

_FLOP_PER_BYTE = 50.0
_MIX_BATCH = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWidths:
    """Costs of differences: what each adds to the half-width of a log step time.

    Attributes:
        base: Half-width without any difference.
        phase: Another phase.
        number_format: Another number format.
        compiler: Compiled or not.
        era: A difference of one in the software's era (PyTorch 0.4 is 0, 2.9 is 1).
        device: Another device.
        architecture: Another architecture.
        vendor: Another vendor.
        mix: Networks of entirely other operations.
        spread: A standard deviation of one over the ensemble.
    """

    base: float = 0.25
    phase: float = 0.12
    number_format: float = 0.05
    compiler: float = 0.2
    era: float = 0.25
    device: float = 0.1
    architecture: float = 0.05
    vendor: float = 0.2
    mix: float = 0.25
    spread: float = 0.5

    @property
    def of_differences(self) -> Floats:
        """Costs in the order of the columns of ``Evidence.differences``."""
        names = ("phase", "number_format", "compiler", "era", "device", "architecture", "vendor", "mix")
        return np.asarray([getattr(self, name) for name in names])


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSpreads:
    """Standard deviations of log times that no cost model explains.

    Attributes:
        system: Between a system and the mean of all that run the same step on the same device.
        doubling: Added in squares between two steps of one network for each doubling of the batch.
        release: The same for releases of PyTorch a whole era apart, 0.4 and 2.9.
    """

    system: float
    doubling: float
    release: float

    def apart_variance(self, doublings: Floats, eras: Floats) -> Floats:
        """Variance that so many doublings of the batch and so large a part of an era add, elementwise."""
        found: Floats = self.doubling**2 * np.abs(doublings) + self.release**2 * np.abs(eras)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSystem:
    """Steps of one kind on one device with one version of the software.

    Attributes:
        device, architecture, vendor: Where they were measured.
        kind: Phase, number format and compiler.
        era: Era of the software.
        networks: Those of the kind's mixes that the measured networks are nearest to.
    """

    device: str
    architecture: str
    vendor: str
    kind: Kind
    era: float
    networks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Evidence:
    """Measured systems, and what they say about intervals.

    Attributes:
        widths: What each difference costs.
        systems: The measured systems.
        mixes: Mixes of the networks that were measured in each kind of step, (m, groups) each.
        architectures: Architectures of devices in any table, of whole steps or of operators, as "vendor architecture".
        spreads: Differences between systems.
        calibration_scales: Standard deviations of the ways in which devices differ (``correction.PriorScales``).
        made: Day and tables of the fit.
    """

    widths: LogWidths
    systems: tuple[MeasuredSystem, ...]
    mixes: Mapping[Kind, Floats]
    architectures: tuple[str, ...]
    spreads: ErrorSpreads
    calibration_scales: Mapping[str, float]
    made: Mapping[str, Any]

    def differences(self, point: Point, mix: Floats) -> Floats:
        """Differences of a question from every measured system, (systems, 8); columns as in ``LogWidths``."""
        columns = self._columns
        phase, kept_format, is_compiled = step_kind(point.setup)
        device = point.device
        return np.column_stack(
            [
                columns["phase"] != phase,
                columns["number_format"] != kept_format,
                columns["compiler"] != is_compiled,
                np.abs(columns["era"] - point.era),
                columns["device"] != device.name,
                columns["architecture"] != device.architecture,
                columns["vendor"] != device.vendor,
                self._mix_distances(mix),
            ]
        ).astype(np.float64)

    def log_width(self, point: Point, mix: Floats) -> float:
        """Half-width of the 90 % interval of the log step time where the members of the ensemble agree."""
        costs = self.differences(point, mix) @ self.widths.of_differences
        return self.widths.base + float(costs.min())

    def is_near(self, device: Device, setup: TrainingSetup, mix: Floats) -> bool:
        """True if networks like this one were measured on such a device in the same phase, format and compiler."""
        kind = step_kind(setup)
        own = [
            index
            for index, system in enumerate(self.systems)
            if system.device == device.name and system.kind == kind
        ]
        return bool(own) and bool(self._mix_distances(mix)[own].min() <= NEAR_MIX)

    def knows_architecture(self, device: Device) -> bool:
        """True if anything was measured on a device of this architecture."""
        return architecture_name(device) in self.architectures

    @cached_property
    def _columns(self) -> dict[str, npt.NDArray[Any]]:
        found: dict[str, npt.NDArray[Any]] = {
            name: np.asarray([getattr(system, name) for system in self.systems])
            for name in ("device", "architecture", "vendor", "era")
        }
        for index, name in enumerate(("phase", "number_format", "compiler")):
            found[name] = np.asarray([system.kind[index] for system in self.systems])
        return found

    def _mix_distances(self, mix: Floats) -> Floats:
        """Distance of a mix from the nearest one of each system, (systems,)."""
        mixes, is_of_system = self._mixes
        distances = np.abs(mixes - mix).sum(axis=1) / 2.0
        found: Floats = np.where(is_of_system, distances, 1.0).min(axis=1)
        return found

    @cached_property
    def _mixes(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """All mixes, (m, groups), and those of each system, (systems, m)."""
        begins = dict(zip(self.mixes, np.cumsum([0, *map(len, self.mixes.values())]).tolist(), strict=False))
        mixes = np.concatenate(list(self.mixes.values()))
        is_of_system = np.zeros((len(self.systems), len(mixes)), dtype=bool)
        for index, system in enumerate(self.systems):
            is_of_system[index, begins[system.kind] + np.asarray(system.networks)] = True
        return mixes, is_of_system

    def to_json(self) -> str:
        """The text of the file."""
        kinds = list(self.mixes)
        whole = {
            "format_version": EVIDENCE_FORMAT_VERSION,
            "made": dict(self.made),
            "widths": asdict(self.widths),
            "spreads": asdict(self.spreads),
            "calibration_scales": dict(self.calibration_scales),
            "architectures": list(self.architectures),
            "kinds": [
                {"kind": list(kind), "mixes": np.round(self.mixes[kind], 3).tolist()} for kind in kinds
            ],
            "systems": [
                [s.device, s.architecture, s.vendor, kinds.index(s.kind), round(s.era, 4), list(s.networks)]
                for s in self.systems
            ],
        }
        return json.dumps(whole, separators=(",", ":")).replace('],["', '],\n["') + "\n"


def architecture_name(device: Device) -> str:
    """An architecture with its vendor, such as "amd cdna3"."""
    return f"{device.vendor} {device.architecture}"


def number_format(precision: Precision) -> str:
    """Arithmetic of most products: ``half``, ``tf32`` or ``full``."""
    if precision.is_half:
        return "half"
    return "tf32" if precision is Precision.TF32 else "full"


def step_kind(setup: TrainingSetup) -> Kind:
    """Phase, number format and compiler of a step."""
    return str(setup.phase), number_format(setup.precision), bool(setup.compile)


def operation_mix(ops: DistinctOps) -> Floats:
    """Share of each group of classes in the traffic of a step plus its work at 50 FLOP a byte, (groups,)."""
    batch = np.asarray([1.0, _MIX_BATCH])
    sizes = ops.count * (ops.flops @ batch / _FLOP_PER_BYTE + ops.moved_bytes @ batch)
    sums = np.bincount(GROUP_OF_CLASS[ops.op_class], weights=np.maximum(sizes, 0.0), minlength=NUM_GROUPS)
    shares: Floats = sums / max(float(sums.sum()), 1e-30)
    return shares


def shipped_evidence_path() -> Path:
    """The evidence that comes with the package."""
    return Path(__file__).parent / "fitted" / "evidence.json"


@cache
def shipped_evidence() -> Evidence:
    """The evidence behind the shipped weights.

    Raises:
        CostModelError: The file is missing or damaged.
    """
    return load_evidence(shipped_evidence_path())


def load_evidence(path: Path) -> Evidence:
    """Evidence from a file.

    Raises:
        CostModelError: The file is missing or damaged.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        if whole["format_version"] != EVIDENCE_FORMAT_VERSION:
            raise ValueError(f"format {whole['format_version']} instead of {EVIDENCE_FORMAT_VERSION}")
        kinds: Sequence[Kind] = [
            (str(entry["kind"][0]), str(entry["kind"][1]), bool(entry["kind"][2])) for entry in whole["kinds"]
        ]
        return Evidence(
            widths=LogWidths(
                **{field.name: float(whole["widths"][field.name]) for field in fields(LogWidths)}
            ),
            systems=tuple(
                MeasuredSystem(
                    device=device,
                    architecture=architecture,
                    vendor=vendor,
                    kind=kinds[kind],
                    era=float(era),
                    networks=tuple(networks),
                )
                for device, architecture, vendor, kind, era, networks in whole["systems"]
            ),
            mixes={
                kind: np.asarray(entry["mixes"], dtype=np.float64)
                for kind, entry in zip(kinds, whole["kinds"], strict=True)
            },
            architectures=tuple(whole["architectures"]),
            spreads=ErrorSpreads(**{name: float(value) for name, value in whole["spreads"].items()}),
            calibration_scales={name: float(value) for name, value in whole["calibration_scales"].items()},
            made=whole["made"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CostModelError(
            f"expected what was measured behind the cost model in {path.name}, but it is missing or damaged ({error}); "
            "reinstall forerun"
        ) from error
