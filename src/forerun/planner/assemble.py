"""Makes a plan from columns: selects candidates, evaluates them exactly, and describes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.planner.candidates import HIGH, LOW, VALUE, CandidateTable
from forerun.planner.choice import (
    DEVICE_MEMORY,
    best_row,
    excesses,
    keeps,
    nearest_miss,
    objective_values,
    pareto_rows,
    relaxations,
    sensitivity,
)
from forerun.planner.engine import Engine
from forerun.planner.limits import Limit
from forerun.planner.plan import (
    BrokenLimit,
    Plan,
    PlanCandidate,
    PlanPoint,
    PlanRelaxation,
    PlanSensitivity,
    PlanWords,
    Rejection,
)
from forerun.prediction.input_pipeline import LOADER_BOUND_NOTE, is_loader_bound, workers_needed
from forerun.run.input_pipeline import InputPipeline

__all__ = ["make_plan"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MOST_ROUNDS = 4
_MOST_ON_FRONT = 24
_MOST_RELAXATIONS = 3
_MOST_DRAWN = 600
_DISTINCT = 0.01
"""Neighbours on the front that are nearer than this in both objectives count as one."""


def make_plan(
    engine: Engine,
    limits: Sequence[Limit],
    minimize: str,
    *,
    words: PlanWords,
    num_points: int,
    max_rejected: int,
    exact: bool = True,
) -> Plan:
    """The plan of an engine's candidates.

    Candidates are evaluated exactly before they are printed. As that can change the selection, it is repeated until
    the selection stays.

    Args:
        engine: Evaluates candidates.
        limits: Limits to keep.
        minimize: The objective, a key of ``OBJECTIVES``.
        words: The job in words, and earlier notes.
        num_points: Number of candidates to list.
        max_rejected: Number of rejected candidates to list.
        exact: Whether to evaluate listed candidates exactly; otherwise their figures are those of the grid.
    """
    loader = engine.loader
    table = engine.all_candidates()
    is_exact = np.full(len(table), not exact)
    for _ in range(_MOST_ROUNDS):
        shown = _shown_rows(table, limits, minimize, num_points)
        missing = shown[~is_exact[shown]]
        if not missing.size:
            break
        table = _with_rows(table, missing, engine.exactly([table.key(int(row)) for row in missing]))
        is_exact[missing] = True
    return _plan(table, limits, minimize, words, loader, num_points, max_rejected)


def _shown_rows(table: CandidateTable, limits: Sequence[Limit], minimize: str, num_points: int) -> Ints:
    excess = excesses(table, limits)
    chosen = best_row(table, minimize, excess)
    rows = [*_listed(table, minimize, excess, num_points), *_front(table, excess)]
    rows += _by_device(table, minimize, excess)
    rows += _unpriced(table, limits, minimize, excess)
    rows += [item.row for item in relaxations(table, limits, minimize, excess)[:_MOST_RELAXATIONS]]
    rows.append(nearest_miss(excess) if chosen is None else chosen)
    if chosen is not None:
        rows += sensitivity(table, limits, minimize, chosen).rivals
    return np.unique(np.asarray(rows, dtype=np.int64))


def _by_device(table: CandidateTable, minimize: str, excess: Floats) -> list[int]:
    """The best candidate of each device, in the order of the devices."""
    objective = np.where(keeps(excess), objective_values(table, minimize), np.inf)
    found = []
    for number in range(len(table.options)):
        rows = np.flatnonzero(table.option == number)
        best = int(rows[np.argmin(objective[rows])])
        if np.isfinite(objective[best]):
            found.append(best)
    return found


def _unpriced(table: CandidateTable, limits: Sequence[Limit], minimize: str, excess: Floats) -> list[int]:
    """Where cost is asked about: the fastest candidate of each device without a price that keeps all other limits."""
    of_cost = [row for row, limit in enumerate(limits) if limit.quantity.name == "cost"]
    if not of_cost and minimize != "cost":
        return []
    allowed = keeps(np.delete(excess, of_cost, axis=0))
    job_s = np.where(allowed, table.values["job_time_s"][VALUE], np.inf)
    found = []
    for number, option in enumerate(table.options):
        rows = np.flatnonzero(table.option == number)
        if option.usd_per_hour is None and np.isfinite(job_s[rows]).any():
            found.append(int(rows[np.argmin(job_s[rows])]))
    return found


def _candidates(table: CandidateTable, excess: Floats) -> tuple[PlanCandidate, ...]:
    count = len(table)
    rows = np.unique(np.linspace(0, count - 1, min(count, _MOST_DRAWN)).astype(int))
    kept = keeps(excess)
    return tuple(_candidate(table, int(row), bool(kept[row])) for row in rows)


def _candidate(table: CandidateTable, row: int, keeps_limits: bool) -> PlanCandidate:
    def value(name: str) -> float | None:
        found = float(table.values[name][VALUE, row])
        return None if np.isnan(found) else found

    return PlanCandidate(
        **_axes(table, row),
        step_time_s=float(table.values["step_time_s"][VALUE, row]),
        step_time_low_s=float(table.values["step_time_s"][LOW, row]),
        step_time_high_s=float(table.values["step_time_s"][HIGH, row]),
        throughput_samples_per_s=float(table.values["throughput_samples_per_s"][VALUE, row]),
        job_time_s=float(table.values["job_time_s"][VALUE, row]),
        num_epochs=float(table.values["num_epochs"][VALUE, row]),
        cost_usd=value("cost_usd"),
        energy_j=value("energy_j"),
        peak_memory_bytes=float(table.values["peak_memory_bytes"][VALUE, row]),
        keeps_limits=keeps_limits,
    )


def _axes(table: CandidateTable, row: int) -> dict[str, Any]:
    """The fields that distinguish a candidate, by name."""
    configuration = table.configurations[table.configuration[row]]
    option = table.options[table.option[row]]
    return {
        "model": configuration.model,
        "device": option.device.name,
        "num_devices": option.num_devices,
        "batch_size_per_device": int(table.batch_size[row]),
        "precision": str(configuration.precision),
        "layout": str(configuration.layout),
        "image_size": configuration.image_size,
        "settings": {
            name: value
            for name, value in configuration.settings.items()
            if name != "strategy" or option.num_devices > 1
        },
    }


def _listed(table: CandidateTable, minimize: str, excess: Floats, num_points: int) -> list[int]:
    """The best candidates by the objective, or the nearest misses if nothing keeps the limits."""
    allowed = np.flatnonzero(keeps(excess))
    if allowed.size:
        order = np.argsort(objective_values(table, minimize)[allowed], kind="stable")
        return [int(row) for row in allowed[order][:num_points]]
    return [int(row) for row in np.argsort(excess.max(axis=0), kind="stable")[:num_points]]


def _front(table: CandidateTable, excess: Floats) -> list[int]:
    """The front, without neighbours that differ by less than 1 % in everything, and at a readable length."""
    allowed = keeps(excess)
    if not allowed.any():
        allowed = excess[-1] <= 0
    rows = pareto_rows(table, allowed)
    names = [name for name in ("job_time_s", "cost_usd", "energy_j", "accuracy") if _known(table, name)]
    kept: list[int] = []
    for row in rows:
        values = [table.values[name][VALUE, row] for name in names]
        if not any(_alike(table, names, values, other) for other in kept):
            kept.append(int(row))
    if len(kept) <= _MOST_ON_FRONT:
        return kept
    return [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, _MOST_ON_FRONT).astype(int))]


def _known(table: CandidateTable, name: str) -> bool:
    return bool(np.isfinite(table.values[name][VALUE]).any())


def _alike(table: CandidateTable, names: Sequence[str], values: Sequence[float], other: int) -> bool:
    pairs = (
        (value, float(table.values[name][VALUE, other])) for name, value in zip(names, values, strict=True)
    )
    return all(abs(value - own) <= _DISTINCT * abs(own) for value, own in pairs)


def _with_rows(table: CandidateTable, rows: Ints, exact: CandidateTable) -> CandidateTable:
    values = {}
    for name, column in table.values.items():
        changed = column.copy()
        changed[:, rows] = exact.values[name]
        values[name] = changed
    return replace(table, values=values)


def _plan(
    table: CandidateTable,
    limits: Sequence[Limit],
    minimize: str,
    words: PlanWords,
    loader: InputPipeline | None,
    num_points: int,
    max_rejected: int,
) -> Plan:
    excess = excesses(table, limits)
    chosen = best_row(table, minimize, excess)
    bounds = [limit.bound for limit in limits]

    def point(row: int) -> PlanPoint:
        return _point(table, row, loader)

    def rejection(row: int) -> Rejection:
        return _rejection(table, row, limits, bounds, excess)

    kept = keeps(excess)
    worst = excess.max(axis=0)
    rejected = np.flatnonzero(~kept)
    nearest_first = rejected[np.argsort(worst[rejected], kind="stable")]
    found = relaxations(table, limits, minimize, excess)[:_MOST_RELAXATIONS]
    return Plan(
        minimize=minimize,
        limits=tuple(limit.text for limit in limits),
        num_candidates=len(table),
        num_feasible=int(kept.sum()),
        chosen=None if chosen is None else point(chosen),
        points=tuple(point(row) for row in _listed(table, minimize, excess, num_points)),
        pareto=tuple(point(row) for row in _front(table, excess)),
        best_by_device=tuple(point(row) for row in _by_device(table, minimize, excess)),
        unpriced=tuple(point(row) for row in _unpriced(table, limits, minimize, excess)),
        candidates=_candidates(table, excess),
        nearest_miss=rejection(nearest_miss(excess)) if chosen is None else None,
        rejected=tuple(rejection(int(row)) for row in nearest_first[:max_rejected]),
        num_rejected_by_limit=_counts(limits, excess),
        binding=_binding(table, limits, minimize, excess, chosen),
        relaxations=tuple(
            PlanRelaxation(
                limit=item.limit,
                bound=item.bound,
                factor=item.factor,
                gain=None if np.isnan(item.gain) else item.gain,
                point=point(item.row),
            )
            for item in found
        ),
        sensitivity=None if chosen is None else _sensitivity(table, limits, minimize, chosen, loader),
        job=words.job,
        target=words.target,
        notes=(*words.notes, *_note_of_loader(table, chosen, loader)),
    )


def _names(limits: Sequence[Limit]) -> tuple[str, ...]:
    return (*(limit.text for limit in limits), DEVICE_MEMORY)


def _counts(limits: Sequence[Limit], excess: Floats) -> tuple[tuple[str, int, int], ...]:
    broken = excess > 0
    alone = broken & (broken.sum(axis=0) == 1)
    return tuple((name, int(broken[i].sum()), int(alone[i].sum())) for i, name in enumerate(_names(limits)))


def _binding(
    table: CandidateTable, limits: Sequence[Limit], minimize: str, excess: Floats, chosen: int | None
) -> str | None:
    """The limit that costs most; without a choice, the worst one of the nearest miss.

    A limit whose quantity is not known of a candidate, such as the cost of a device without a price, does not bind it.
    """
    names = _names(limits)
    if chosen is None:
        return names[int(np.argmax(excess[:, nearest_miss(excess)]))]
    objective = objective_values(table, minimize)
    best = float(objective[chosen])
    losses = []
    for index in range(len(names)):
        others = np.delete(excess, index, axis=0)
        others[:, np.isinf(excess[index])] = np.inf
        row = best_row(table, minimize, others) if len(names) > 1 else None
        losses.append(best if row is None else float(objective[row]))
    least = int(np.argmin(losses))
    return names[least] if losses[least] < best * (1 - 1e-6) else None


def _sensitivity(
    table: CandidateTable, limits: Sequence[Limit], minimize: str, chosen: int, loader: InputPipeline | None
) -> PlanSensitivity:
    found = sensitivity(table, limits, minimize, chosen)
    return PlanSensitivity(
        keeps_limits=found.keeps_limits,
        broken=found.broken,
        stays_best=found.stays_best,
        rivals=tuple(_point(table, row, loader) for row in found.rivals),
        regret=found.regret,
    )


def _point(table: CandidateTable, row: int, loader: InputPipeline | None) -> PlanPoint:
    option = table.options[table.option[row]]
    required: dict[str, Any] = {
        name: table.interval(name, row)
        for name in (
            "step_time_s",
            "throughput_samples_per_s",
            "epoch_time_s",
            "job_time_s",
            "num_epochs",
            "peak_memory_bytes",
        )
    }
    accuracy = float(table.values["accuracy"][VALUE, row])
    device_rate = float(table.values["device_samples_per_s"][VALUE, row])
    rental = option.rental
    given = "given" if option.usd_per_hour is not None else None
    return PlanPoint(
        **_axes(table, row),
        **required,
        cost_usd=table.interval("cost_usd", row),
        energy_j=table.interval("energy_j", row),
        co2_g=table.interval("co2_g", row),
        accuracy=None if np.isnan(accuracy) else accuracy,
        fits=_fits(table, row),
        price_usd_per_hour=option.usd_per_hour,
        price_source=given
        if rental is None
        else (
            f"{rental.num_instances} x {rental.price.provider} {rental.price.instance}, {rental.price.kind}, "
            f"{rental.price.date}"
        ),
        provenance=str(table.provenance[row]),
        workers_needed=None if loader is None else workers_needed(loader, device_rate),
    )


def _note_of_loader(
    table: CandidateTable, chosen: int | None, loader: InputPipeline | None
) -> tuple[str, ...]:
    """Said where the choice waits for its loader, as ``predict`` says it of a run."""
    if loader is None or chosen is None:
        return ()
    device_rate, rate = (
        float(table.values[name][VALUE, chosen])
        for name in ("device_samples_per_s", "throughput_samples_per_s")
    )
    return (LOADER_BOUND_NOTE,) if is_loader_bound(1 / rate, 1 / device_rate, loader) else ()


def _fits(table: CandidateTable, row: int) -> str:
    # The ends of the memory are the limits of the allocator at 1.03 and 0.97: the band of the verdict "close".
    peak, available = table.values["peak_memory_bytes"][:, row], table.device_memory_bytes[row]
    if peak[HIGH] <= available:
        return "yes"
    return "no" if peak[LOW] > available else "close"


def _rejection(
    table: CandidateTable, row: int, limits: Sequence[Limit], bounds: Sequence[float], excess: Floats
) -> Rejection:
    names, all_bounds = _names(limits), (*bounds, float(table.device_memory_bytes[row]))
    quantities = (*(limit.quantity.field for limit in limits), "peak_memory_bytes")
    broken = []
    for index in np.argsort(-excess[:, row], kind="stable"):
        share = float(excess[index, row])
        if share <= 0:
            break
        value = float(table.values[quantities[index]][VALUE, row])
        broken.append(
            BrokenLimit(
                limit=names[index],
                value=None if np.isnan(value) else value,
                bound=all_bounds[index],
                excess=share if np.isfinite(share) else None,
            )
        )
    return Rejection(
        **_axes(table, row),
        broken=tuple(broken),
    )
