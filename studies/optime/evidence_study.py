"""Widths of intervals: fitted on steps whose source, device or family was left out, checked by leaving out more.

The costs minimise the pinball loss of the 90 % quantile of |log(measured / predicted)|, each group alike (a device as
one source measured it in one phase, or a fold of families), pulled weakly to the defaults of ``LogWidths``. All are
then multiplied by what lets nine groups of ten have 85 % of their rows inside, the group to come counted as one more
that is never covered: what is common to a group is one draw, however many rows it has.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.cost.time.correction import PriorScales
from forerun.cost.time.evidence import (
    ErrorSpreads,
    Evidence,
    Kind,
    LogWidths,
    MeasuredSystem,
    architecture_name,
    operation_mix,
    shipped_evidence,
    step_kind,
)
from forerun.cost.time.rows import DistinctOps
from forerun.evidence.fitting.measured_steps import Measured
from forerun.question.devices.device import Device
from studies.optime.fit import source_of, table_of
from studies.optime.studies import HeldOut, StepStudies

__all__ = [
    "CoverageCheck",
    "JudgedRows",
    "KnownNetwork",
    "check_widths",
    "evidence_of",
    "fit_widths",
    "judged_rows",
]

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]

_MOST_ROWS = 60
"""Rows of a group that are looked at: what is common to the group does not get surer by more of them."""

_MOST_MIXES, _MIX_APART = 24, 0.08
_SHARE_OF_ROWS, _SHARE_OF_GROUPS = 0.85, 0.9
_TARGET, _PULL = 0.9, 1e-3
_LARGE_GROUP = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNetwork:
    """A network that was measured on a device in one kind of step.

    Attributes:
        device: The device.
        kind: Phase, number format and compiler.
        era: Era of the software.
        mix: Its mix of operations, (groups,).
    """

    device: Device
    kind: Kind
    era: float
    mix: Floats

    @classmethod
    def of(cls, step: Measured) -> KnownNetwork:
        """That of a step of the fit."""
        return cls(device=step.device, kind=step_kind(step.setup), era=step.point.era, mix=_mix_of(step))


def evidence_of(
    steps: Sequence[Measured],
    operator_devices: Sequence[Device] = (),
    widths: LogWidths | None = None,
    spreads: ErrorSpreads | None = None,
    scales: PriorScales | None = None,
    others: Sequence[KnownNetwork] = (),
) -> Evidence:
    """The evidence that measured steps are.

    Args:
        steps: Steps of the fit.
        operator_devices: Devices with operators timed alone.
        others: Networks that are in no fit, whose measured steps were predicted within the base width.
        widths: What differences cost.
        spreads: Differences between systems; those that are shipped unless given.
        scales: Prior scales of calibrations.
    """
    networks = [*map(KnownNetwork.of, {(id(s.ops), s.system): s for s in steps}.values()), *others]
    mixes: dict[Kind, dict[int, Floats]] = {}
    measured: dict[tuple[str, Kind, float], set[int]] = {}
    for one in networks:
        mixes.setdefault(one.kind, {})[id(one.mix)] = one.mix
        measured.setdefault((one.device.name, one.kind, one.era), set()).add(id(one.mix))
    chosen = {kind: _apart(np.stack(list(own.values()))) for kind, own in sorted(mixes.items())}
    nearest = {
        kind: {name: int(np.abs(chosen[kind] - mix).sum(axis=1).argmin()) for name, mix in own.items()}
        for kind, own in mixes.items()
    }
    by_name = {one.device.name: one.device for one in networks}
    systems = [
        MeasuredSystem(
            device=name,
            architecture=by_name[name].architecture,
            vendor=by_name[name].vendor,
            kind=kind,
            era=era,
            networks=tuple(sorted({nearest[kind][network] for network in own})),
        )
        for (name, kind, era), own in measured.items()
    ]
    devices = [step.device for step in steps] + list(operator_devices)
    return Evidence(
        widths=widths or LogWidths(),
        systems=tuple(sorted(systems, key=lambda s: (s.device, s.kind, s.era))),
        mixes=chosen,
        architectures=tuple(sorted({architecture_name(device) for device in devices})),
        spreads=spreads or shipped_evidence().spreads,
        calibration_scales=asdict(scales or PriorScales()),
        made={
            "date": datetime.date.today().isoformat(),
            "rows": dict(sorted(Counter(table_of(step) for step in steps).items())),
        },
    )


_MIXES: dict[int, tuple[DistinctOps, Floats]] = {}


def _mix_of(step: Measured) -> Floats:
    """Mix of a step, found once for all steps of its network."""
    known = _MIXES.get(id(step.ops))
    if known is None or known[0] is not step.ops:
        known = _MIXES[id(step.ops)] = (step.ops, operation_mix(step.ops))
    return known[1]


def _apart(mixes: Floats) -> Floats:
    """A few of the mixes, so that the others are near one of them: each next one is the farthest from those chosen."""
    chosen = [mixes.mean(axis=0)]
    distances = np.abs(mixes - chosen[0]).sum(axis=1) / 2.0
    while len(chosen) < _MOST_MIXES and distances.max() > _MIX_APART:
        chosen.append(mixes[distances.argmax()])
        distances = np.minimum(distances, np.abs(mixes - chosen[-1]).sum(axis=1) / 2.0)
    return np.stack(chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRows:
    """Held-out steps with their differences from what was measured without them, n rows.

    Attributes:
        left_out: What was left out: ``families``, a device or a source, (n,).
        study: ``families``, ``devices`` or ``sources``, (n,).
        group: Device, table and phase under what was left out, or the fold, (n,).
        source: Who measured the step, (n,).
        device: Where, (n,).
        errors: |log(measured / predicted)|, (n,).
        spread: Standard deviation over the ensemble, (n,).
        differences: Differences from each measured system, large where there is none, (n, systems, 8).
    """

    left_out: Names
    study: Names
    group: Names
    source: Names
    device: Names
    errors: Floats
    spread: Floats
    differences: npt.NDArray[np.float32]

    def half_widths(self, widths: LogWidths) -> Floats:
        """Half-widths of the log times, (n,)."""
        costs = (self.differences @ widths.of_differences.astype(np.float32)).min(axis=1)
        found: Floats = widths.base + costs + widths.spread * self.spread
        return found

    def take(self, chosen: npt.NDArray[np.bool_]) -> JudgedRows:
        """Some of the rows."""
        return JudgedRows(**{field.name: getattr(self, field.name)[chosen] for field in fields(JudgedRows)})

    @property
    def weights(self) -> Floats:
        """Weights of the rows, each group alike; they add up to one, (n,)."""
        _, index, sizes = np.unique(self.group, return_inverse=True, return_counts=True)
        found: Floats = 1.0 / sizes[index] / len(sizes)
        return found


def judged_rows(
    studies: StepStudies, steps: Sequence[Measured], others: Sequence[KnownNetwork] = ()
) -> JudgedRows:
    """The held-out steps of all studies, at most sixty of a group.

    Args:
        studies: What was predicted without what.
        steps: All steps, of which the studies left some out.
        others: Networks beside them, of sources that no study leaves out.
    """
    parts: list[tuple[str, str, HeldOut, list[Measured]]] = []
    for fold in np.unique(studies.families.fold):
        held = studies.families.take(np.flatnonzero(studies.families.fold == fold))
        families = {step.record.family for step in held.steps}
        rest = [step for step in steps if step.record.family not in families]
        parts.append(("families", f"fold {fold}", held, rest))
    for name, held in studies.devices.items():
        parts.append(("devices", name, held, [step for step in steps if step.device.name != name]))
    for name, held in studies.sources.items():
        parts.append(("sources", name, held, [step for step in steps if source_of(step) != name]))
    random = np.random.default_rng(0)
    columns: dict[str, list[str]] = {name: [] for name in ("left_out", "study", "group", "source", "device")}
    errors, spread, differences = [], [], []
    for study, name, whole, rest in parts:
        evidence = evidence_of(rest, others=[one for one in others if one.device.name != name])
        groups = np.asarray(
            [f"{step.device.name}, {table_of(step)} {step.record.phase}" for step in whole.steps]
        )
        for group in dict.fromkeys(groups.tolist()):
            rows = np.flatnonzero(groups == group)
            if len(rows) > _MOST_ROWS:
                rows = np.sort(random.choice(rows, _MOST_ROWS, replace=False))
            for row in rows:
                step = whole.steps[int(row)]
                columns["left_out"].append(name)
                columns["study"].append(study)
                columns["group"].append(f"without {name}: {group}")
                columns["source"].append(source_of(step))
                columns["device"].append(step.device.name)
                differences.append(evidence.differences(step.point, _mix_of(step)))
            errors.append(np.abs(whole.residuals[rows]))
            spread.append(whole.spread[rows])
    # Fits that left systems out have fewer: the missing ones are infinitely far.
    padded = np.full((len(differences), max(map(len, differences)), differences[0].shape[1]), 1e3, np.float32)
    for own, found in zip(padded, differences, strict=True):
        own[: len(found)] = found
    return JudgedRows(
        errors=np.concatenate(errors),
        spread=np.concatenate(spread),
        differences=padded,
        **{name: np.asarray(values) for name, values in columns.items()},
    )


def fit_widths(rows: JudgedRows) -> LogWidths:
    """Costs of differences, by the rows."""
    start = np.log([getattr(LogWidths(), field.name) for field in fields(LogWidths)])
    weights = rows.weights

    def loss(logs: Floats) -> float:
        beyond = rows.errors - rows.half_widths(_widths(logs))
        pinball = np.where(beyond > 0, _TARGET * beyond, (_TARGET - 1) * beyond)
        return float((weights * pinball).sum() + _PULL * ((logs - start) ** 2).sum())

    options: Any = {"maxiter": 4, "xtol": 0.03, "ftol": 1e-4}
    found = np.asarray(optimize.minimize(loss, start, method="Powell", options=options).x)
    factor = _common_factor(rows, _widths(found))
    return _widths(found + np.log(factor))


def _widths(logs: Floats) -> LogWidths:
    return LogWidths(
        **{field.name: float(value) for field, value in zip(fields(LogWidths), np.exp(logs), strict=True)}
    )


def _common_factor(rows: JudgedRows, widths: LogWidths) -> float:
    """Factor of all widths that lets nine groups of ten have 85 % of their rows inside."""
    scores = rows.errors / rows.half_widths(widths)
    own = sorted(
        float(np.quantile(scores[rows.group == group], _SHARE_OF_ROWS)) for group in np.unique(rows.group)
    )
    return own[min(ceil((len(own) + 1) * _SHARE_OF_GROUPS), len(own)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoverageCheck:
    """Coverage of 90 % intervals on groups that their costs have not seen.

    Attributes:
        num_groups: Number of groups.
        coverage: Share of rows inside, each group alike.
        worst_coverage: That of the worst group of twenty rows or more, of all groups if there is none.
        worst_group: Its name.
        median_half_width: Median over the groups of exp(half-width) - 1, the upper half-width as a share of the value.
        by_left_out: Coverage of what was left out, its groups alike, and the median half-width there.
    """

    num_groups: int
    coverage: float
    worst_coverage: float
    worst_group: str
    median_half_width: float
    by_left_out: Mapping[str, tuple[float, float]]


def check_widths(rows: JudgedRows) -> dict[str, CoverageCheck]:
    """Coverage by study, each row by costs fitted without any row of its source, or of its device.

    Rows of devices that were left out are judged by costs without that device, all others by costs without the source.
    """
    widths = np.empty(len(rows.errors))
    is_device = rows.study == "devices"
    for column, chosen in ((rows.source, ~is_device), (rows.device, is_device)):
        for name in np.unique(column[chosen]):
            own = (column == name) & chosen
            widths[own] = rows.take(own).half_widths(fit_widths(rows.take(column != name)))
    return {
        study: _check(rows.take(rows.study == study), widths[rows.study == study])
        for study in dict.fromkeys(rows.study.tolist())
    }


def _check(rows: JudgedRows, widths: Floats) -> CoverageCheck:
    inside = rows.errors <= widths
    groups = {name: np.flatnonzero(rows.group == name) for name in dict.fromkeys(rows.group.tolist())}
    shares = {name: float(inside[own].mean()) for name, own in groups.items()}
    half = {name: float(np.expm1(np.median(widths[own]))) for name, own in groups.items()}
    large = [name for name, own in groups.items() if len(own) >= _LARGE_GROUP] or list(groups)
    worst = min(large, key=lambda name: shares[name])
    left_out = {name: str(rows.left_out[own[0]]) for name, own in groups.items()}
    return CoverageCheck(
        num_groups=len(groups),
        coverage=float(np.mean(list(shares.values()))),
        worst_coverage=shares[worst],
        worst_group=worst,
        median_half_width=float(np.median(list(half.values()))),
        by_left_out={
            title: (
                float(np.mean([shares[name] for name in groups if left_out[name] == title])),
                float(np.median([half[name] for name in groups if left_out[name] == title])),
            )
            for title in dict.fromkeys(left_out.values())
        },
    )
