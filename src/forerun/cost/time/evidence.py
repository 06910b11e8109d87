"""Evidence behind a step time: what was measured near a question, and how wide its interval is.

The logarithm of a step over its prediction has two sources that are independent of each other: the system that one does
not know, and the cost model. The half-width of the 90 % interval of the log step time is

    h^2    = (1.645 system)^2 + m^2
    log m  = base + learned * share of the mix whose times are learned + spread * spread of the ensemble
             + unmeasured * (no step was measured on a board of this kind of die)

Linear layers and attention have closed laws, all other classes learned ones. Of what was measured where, the kind of
die alone counts: 96 % of the steps of boards left out lie within, but 78 % where no other board of their die is left.
The mix of a step is the share of each group of classes in its traffic plus its work at 50 FLOP a byte; the distance of
two mixes is half the sum of the absolute differences, 0 to 1. The costs are fitted on steps whose source, device or
family of networks was left out of the fit of the cost model, the differences between systems on pairs of systems
(docs/methods/intervals.md). Where no table has the architecture, the interval is an order of magnitude wide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.base.errors import CostModelError
from forerun.cost.time.law import GROUP_OF_CLASS, LAW_CLASSES, NUM_GROUPS
from forerun.cost.time.rows import DistinctOps
from forerun.question.devices.device import Device
from forerun.question.setup import Precision, TrainingSetup

Floats = npt.NDArray[np.float64]
Kind = tuple[str, str, bool]

EVIDENCE_FORMAT_VERSION = 4

ORDER_OF_MAGNITUDE = log(10.0) / 2.0
"""Least half-width of a log time on an architecture that no table has: high is ten times low."""

NEAR_MIX = 0.25
"""Distance of mixes up to which a network counts as one like those that were measured."""

Z_90 = 1.645
"""Half-width of a 90 % interval in standard deviations."""

REPEAT_NOISE = 0.02
"""Standard deviation of the log time between repeats of one run."""

_CLOSED_GROUPS = sorted(set(GROUP_OF_CLASS[list(LAW_CLASSES)].tolist()))
_WIDEST = 1.5
"""Logarithm of the widest half-width: beyond it only the figure of an order of magnitude is said."""

_FLOP_PER_BYTE = 50.0
_MIX_BATCH = 32.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LogWidths:
    """The cost model's part of a half-width: the logarithm of it is the base plus the costs times their covariates.

    Attributes:
        base: Logarithm of the half-width of a step of closed laws alone, on which the members agree.
        learned: A step of learned laws alone.
        spread: A standard deviation of one over the ensemble.
        unmeasured: A kind of die, one architecture with one kind of memory, of which no step was measured.
    """

    base: float = -1.2
    learned: float = 0.3
    spread: float = 1.0
    unmeasured: float = 0.3

    def half_widths(self, covariates: Floats) -> Floats:
        """The cost model's half-widths of log times, (n, 3) -> (n,); columns as in ``step_covariates``."""
        costs = [self.learned, self.spread, self.unmeasured]
        found: Floats = np.exp(np.minimum(self.base + covariates @ costs, _WIDEST))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorSpreads:
    """Standard deviations of log times that no cost model explains.

    Attributes:
        system: Between a system and the mean of all that run the same step on the same device.
        doubling: Added in squares between two steps of one network for each doubling of the batch.
        after_steps: On a system of which five steps were measured, of a step that was not.
    """

    system: float
    doubling: float
    after_steps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evidence:
    """Measured systems, and what they say about intervals.

    Attributes:
        widths: What each difference costs.
        mixes: Mixes of the networks that were measured in each kind of step, (m, groups) each.
        measured: Those of a kind's mixes that networks measured on a device are nearest to, by its name and the kind.
        architectures: Architectures of devices in any table, of whole steps or of operators, as "vendor architecture".
        spreads: Differences between systems.
        calibration_scales: Standard deviations of the ways in which devices differ (``correction.PriorScales``).
        made: Day and tables of the fit.
    """

    widths: LogWidths
    mixes: Mapping[Kind, Floats]
    measured: Mapping[tuple[str, Kind], Sequence[int]]
    architectures: tuple[str, ...]
    spreads: ErrorSpreads
    calibration_scales: Mapping[str, float]
    made: Mapping[str, Any]

    def log_widths(self, covariates: Floats) -> Floats:
        """Half-widths of the 90 % intervals of log step times, (n, 3) -> (n,)."""
        return np.hypot(Z_90 * self.spreads.system, self.widths.half_widths(covariates))

    def is_near(self, device: Device, setup: TrainingSetup, mix: Floats) -> bool:
        """True if networks like this one were measured on such a device in the same phase, format and compiler."""
        kind = step_kind(setup)
        own = self.measured.get((device.name, kind), ())
        return any(np.abs(self.mixes[kind][network] - mix).sum() / 2.0 <= NEAR_MIX for network in own)

    def knows_architecture(self, device: Device) -> bool:
        """True if anything was measured on a device of this architecture."""
        return architecture_name(device) in self.architectures

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
                [device, kinds.index(kind), list(own)] for (device, kind), own in self.measured.items()
            ],
        }
        # A line for each system, so that the difference of two fits can be read.
        return json.dumps(whole, separators=(",", ":")).replace('],["', '],\n["') + "\n"


def step_covariates(mix: Floats, spread: Floats, is_measured: Sequence[bool]) -> Floats:
    """Covariates of errors of one network at p points, (p, 3); see ``LogWidths``.

    Args:
        mix: Its mix of operations, (groups,).
        spread: Spread of the ensemble, (p,).
        is_measured: Whether a board of the device's kind of die was measured (``CostModel.knows_die``), (p,).
    """
    learned = np.full(len(spread), 1.0 - mix[_CLOSED_GROUPS].sum())
    return np.column_stack([learned, spread, np.logical_not(is_measured)])


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
            widths=LogWidths(**whole["widths"]),
            measured={(device, kinds[kind]): own for device, kind, own in whole["systems"]},
            mixes={
                kind: np.asarray(entry["mixes"], dtype=np.float64)
                for kind, entry in zip(kinds, whole["kinds"], strict=True)
            },
            architectures=tuple(whole["architectures"]),
            spreads=ErrorSpreads(**whole["spreads"]),
            calibration_scales=whole["calibration_scales"],
            made=whole["made"],
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise CostModelError(
            f"expected what was measured behind the cost model in {path.name}, but it is missing or damaged ({error}); "
            "reinstall forerun"
        ) from error
