"""Widths of intervals: fitted on steps whose source, device or family was left out, checked by leaving out more.

Rows are asked as a user asks, with nothing but what must be typed. The costs minimise the mean score of the 90 %
interval of log(measured / predicted), 2 h + 20 max(0, |e| - h), each system alike, pulled weakly to the defaults of
``LogWidths``: what is common to a system is one draw, however many rows it has. The differences between systems are
those of pairs of systems that ran the same network on the same device:

    (90 % quantile of |r_i - r_j| / 1.645)^2 = 2 system^2 + doubling^2 doublings

with non-negative squares, each pair of systems alike.

Source: Gneiting and Raftery 2007, J. Am. Stat. Assoc. 102(477), equation 43 (the score).
"""

from __future__ import annotations

import datetime
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.cost.time.correction import PriorScales
from forerun.cost.time.evidence import (
    Z_90,
    ErrorSpreads,
    Evidence,
    Kind,
    LogWidths,
    architecture_name,
    operation_mix,
    shipped_evidence,
    step_kind,
)
from forerun.cost.time.rows import DistinctOps
from forerun.evidence.fitting.measured_steps import Measured
from forerun.question.devices.device import Device
from studies.optime.fit import source_of, system_of, table_of
from studies.optime.studies import StepStudies

Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]

_MOST_MIXES, _MIX_APART = 24, 0.08
_TARGET, _PULL = 0.9, 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownNetwork:
    """A network that was measured on a device in one kind of step.

    Attributes:
        device: The device.
        kind: Phase, number format and compiler.
        mix: Its mix of operations, (groups,).
    """

    device: Device
    kind: Kind
    mix: Floats

    @classmethod
    def of(cls, step: Measured) -> KnownNetwork:
        """That of a step of the fit."""
        return cls(device=step.device, kind=step_kind(step.setup), mix=_mix_of(step))


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
    measured: dict[tuple[str, Kind], set[int]] = {}
    for one in networks:
        mixes.setdefault(one.kind, {})[id(one.mix)] = one.mix
        measured.setdefault((one.device.name, one.kind), set()).add(id(one.mix))
    chosen = {kind: _apart(np.stack(list(own.values()))) for kind, own in sorted(mixes.items())}
    nearest = {
        kind: {name: int(np.abs(chosen[kind] - mix).sum(axis=1).argmin()) for name, mix in own.items()}
        for kind, own in mixes.items()
    }
    devices = [step.device for step in steps] + list(operator_devices)
    return Evidence(
        widths=widths or LogWidths(),
        mixes=chosen,
        measured={
            (device, kind): sorted({nearest[kind][network] for network in own})
            for (device, kind), own in sorted(measured.items())
        },
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
    """Held-out steps with what the others know about them, n rows.

    Attributes:
        study: ``families``, ``devices`` or ``sources``, (n,).
        left_out: What was left out: a fold of families, a device or a source, (n,).
        system: Device, source, release, compiler and phase under what was left out, (n,).
        source: Who measured the step, (n,).
        device: Where, (n,).
        asked: log(measured / predicted) as a user asks, (n,).
        informed: The same with release, settings and machine known, (n,).
        covariates: What errors follow (``evidence.step_covariates``), (n, 3).
    """

    study: Names
    left_out: Names
    system: Names
    source: Names
    device: Names
    asked: Floats
    informed: Floats
    covariates: Floats

    def take(self, chosen: npt.NDArray[np.bool_]) -> JudgedRows:
        """Some of the rows."""
        return JudgedRows(**{field.name: getattr(self, field.name)[chosen] for field in fields(JudgedRows)})

    @property
    def weights(self) -> Floats:
        """Weights of the rows, each system alike; they add up to one, (n,)."""
        _, index, sizes = np.unique(self.system, return_inverse=True, return_counts=True)
        found: Floats = 1.0 / sizes[index] / len(sizes)
        return found


def judged_rows(studies: StepStudies) -> JudgedRows:
    """All held-out steps of all studies."""
    folds = {
        f"fold {fold}": studies.families.take(np.flatnonzero(studies.families.fold == fold))
        for fold in np.unique(studies.families.fold)
    }
    groups = {"families": folds, "devices": studies.devices, "sources": studies.sources}
    parts = [(study, name, held) for study, found in groups.items() for name, held in found.items()]
    columns: dict[str, list[Any]] = {field.name: [] for field in fields(JudgedRows)}
    for study, name, held in parts:
        for step in held.steps:
            without = study if study == "families" else name
            columns["system"].append(f"without {without}: {system_of(step)}")
            columns["source"].append(source_of(step))
            columns["device"].append(step.device.name)
        columns["covariates"] += held.covariates.tolist()
        columns["study"] += [study] * len(held.steps)
        columns["left_out"] += [name] * len(held.steps)
        columns["asked"] += held.as_asked().residuals.tolist()
        columns["informed"] += held.residuals.tolist()
    return JudgedRows(**{name: np.asarray(values) for name, values in columns.items()})


def log_interval_scores(errors: Floats, half_widths: Floats) -> Floats:
    """Score of each 90 % interval of a log time, 2 h + 20 max(0, |e| - h), (n,); less is better."""
    found: Floats = 2.0 * half_widths + 20.0 * np.maximum(np.abs(errors) - half_widths, 0.0)
    return found


def fit_widths(rows: JudgedRows, spreads: ErrorSpreads) -> LogWidths:
    """Costs of the covariates with the least mean score, no cost below zero."""
    first = LogWidths()
    start = np.asarray([first.base, *np.sqrt([first.learned, first.spread, first.unmeasured])])
    weights = rows.weights

    def loss(values: Floats) -> float:
        widths = np.hypot(Z_90 * spreads.system, _widths(values).half_widths(rows.covariates))
        scores = log_interval_scores(rows.asked, widths)
        return float(weights @ scores + _PULL * ((values - start) ** 2).sum())

    options: Any = {"maxiter": 6, "xtol": 0.02, "ftol": 1e-5}
    return _widths(np.asarray(optimize.minimize(loss, start, method="Powell", options=options).x))


def _widths(values: Floats) -> LogWidths:
    names = [field.name for field in fields(LogWidths)]
    return LogWidths(**dict(zip(names, [float(values[0]), *(values[1:] ** 2).tolist()], strict=True)))


def fit_spreads(
    steps: Sequence[Measured], residuals: Floats, after_five: Iterable[Floats] = ()
) -> ErrorSpreads:
    """Differences between systems, of pairs that ran one network on one device in the same circumstances.

    Args:
        steps: Measured steps.
        residuals: log(measured / predicted) of each by one cost model, (n,).
        after_five: log(measured / predicted) of held-out systems after five measured steps; systems weigh alike.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, step in enumerate(steps):
        setup, record = step.setup, step.record
        network = (record.model.partition(":")[2], record.image_size, step.run.model.sequence_length)
        form = (setup.precision.is_half or setup.precision, setup.layout, setup.compile, setup.phase)
        alike.setdefault((step.device.name, *network, *form), []).append(index)
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for rows in alike.values():
        for one, other in itertools.combinations(rows, 2):
            first, second = steps[one], steps[other]
            names = sorted((system_of(first), system_of(second)))
            if names[0] == names[1]:
                continue
            ratio = first.setup.batch_size_per_device / second.setup.batch_size_per_device
            apart = abs(float(residuals[one] - residuals[other]))
            pairs.setdefault((names[0], names[1]), []).append((apart, abs(float(np.log2(ratio)))))
    columns, squares = [], []
    for found in pairs.values():
        apart, doublings = np.asarray(found).T
        columns.append([2.0, doublings.mean()])
        squares.append((np.quantile(apart, _TARGET) / Z_90) ** 2)
    solved, _ = optimize.nnls(np.asarray(columns), np.asarray(squares))
    system, doubling = np.sqrt(solved).tolist()
    left = [np.quantile(np.abs(found), np.linspace(0.0, 1.0, 101)) for found in after_five if len(found)]
    after = float(np.quantile(left, _TARGET)) / Z_90 if left else shipped_evidence().spreads.after_steps
    return ErrorSpreads(system=system, doubling=doubling, after_steps=after)


def judged_widths(rows: JudgedRows, spreads: ErrorSpreads, constant: bool = False) -> Floats:
    """Half-widths of log times by costs that have not seen the row's source, or its device, (n,).

    Rows of devices that were left out are judged by costs without that device, all others by costs without the source.

    Args:
        rows: The rows.
        spreads: Differences between systems.
        constant: Whether all rows get one width, that of the least score.
    """
    widths = np.empty(len(rows.asked))
    is_device = rows.study == "devices"
    for column, chosen in ((rows.source, ~is_device), (rows.device, is_device)):
        for name in np.unique(column[chosen]):
            own, rest = (column == name) & chosen, rows.take(column != name)
            if constant:
                order = np.argsort(np.abs(rest.asked))
                shares = np.cumsum(rest.weights[order])
                widths[own] = np.abs(rest.asked)[order][np.searchsorted(shares, _TARGET)]
            else:
                found = fit_widths(rest, spreads).half_widths(rows.covariates[own])
                widths[own] = np.hypot(Z_90 * spreads.system, found)
    return widths
