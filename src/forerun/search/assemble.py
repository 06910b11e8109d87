"""Makes a plan from columns: selects candidates, evaluates them exactly, and describes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from forerun.cost.memory.peak import fits
from forerun.graph.graph import Floats, Ints
from forerun.prediction.run_step import LOADER_BOUND_NOTE, is_loader_bound, workers_needed
from forerun.question.job import InputPipeline
from forerun.search.choice import HIGH, LOW, VALUE, CandidateTable, Choice
from forerun.search.engine import Engine
from forerun.search.plan_answer import (
    BrokenLimit,
    Plan,
    PlanCandidate,
    PlanPoint,
    PlanRelaxation,
    PlanSensitivity,
    Rejection,
)

_MOST_ROUNDS = 4
_MOST_ON_FRONT = 24
_MOST_RELAXATIONS = 3
_MOST_RIVALS = 5
_MOST_DRAWN = 600
_FIGURES = (
    "step_time_s",
    "throughput_samples_per_s",
    "job_time_s",
    "num_epochs",
    "cost_usd",
    "energy_j",
    "peak_memory_bytes",
)
_DISTINCT = 0.01
"""Neighbours on the front that are nearer than this in both objectives count as one."""


def make_plan(
    engine: Engine, *, job: str, target: str | None, num_points: int, max_rejected: int, exact: bool = True
) -> Plan:
    """The plan of an engine's candidates.

    Candidates are evaluated exactly before they are printed. As that can change the selection, it is repeated until
    the selection stays.

    Args:
        engine: Evaluates the candidates of a search, which has the limits and the goal.
        job: The job in words.
        target: The target of its training in words, None for a number of epochs.
        num_points: Number of candidates to list.
        max_rejected: Number of rejected candidates to list.
        exact: Whether to evaluate listed candidates exactly; otherwise their figures are those of the grid.
    """
    limits, goal = engine.search.limits, engine.search.goal
    choice = Choice(engine.all_candidates(), limits, goal)
    is_exact = np.full(len(choice.table), not exact)
    # An exact figure may push a candidate over a limit and another into the list, which is not exact yet. Every
    # round makes more rows exact; the bound keeps a plan full of near misses from making all of them so.
    for _ in range(_MOST_ROUNDS):
        shown = _shown_rows(choice, num_points)
        missing = shown[~is_exact[shown]]
        if not missing.size:
            break
        exactly = engine.exactly([choice.table.key(int(row)) for row in missing])
        choice = Choice(choice.table.with_rows(missing, exactly), limits, goal)
        is_exact[missing] = True
    return _plan(choice, engine.search.run.loader, num_points, max_rejected, job=job, target=target)


def _shown_rows(choice: Choice, num_points: int) -> Ints:
    """Every candidate that the plan will print."""
    rows = [
        *choice.best_first(num_points),
        *_front(choice),
        *choice.best_of_each_option(),
        *choice.unpriced(),
    ]
    rows += [row for _, row in choice.relaxations()[:_MOST_RELAXATIONS]]
    if choice.best is None:
        rows.append(choice.nearest_first()[0])
    else:
        rows += [choice.best, *choice.rivals()[0][:_MOST_RIVALS]]
    return np.unique(np.asarray(rows, dtype=np.int64))


def _front(choice: Choice) -> list[int]:
    """The front, without neighbours that differ by less than 1 % in everything, and at a readable length."""
    values = choice.table.values
    columns = [values[name][VALUE] for name in ("job_time_s", "cost_usd", "energy_j", "accuracy")]
    known = [column for column in columns if np.isfinite(column).any()]
    kept: list[int] = []
    for row in choice.front():
        if not any(_is_near(known, int(row), other) for other in kept):
            kept.append(int(row))
    if len(kept) <= _MOST_ON_FRONT:
        return kept
    return [kept[i] for i in np.unique(np.linspace(0, len(kept) - 1, _MOST_ON_FRONT).astype(int))]


def _is_near(columns: Sequence[Floats], row: int, other: int) -> bool:
    return all(abs(column[row] - column[other]) <= _DISTINCT * abs(column[other]) for column in columns)


def _plan(
    choice: Choice,
    loader: InputPipeline | None,
    num_points: int,
    max_rejected: int,
    *,
    job: str,
    target: str | None,
) -> Plan:
    table, best = choice.table, choice.best

    def points(rows: Iterable[int]) -> tuple[PlanPoint, ...]:
        return tuple(_point(table, int(row), loader) for row in rows)

    nearest = choice.nearest_first()
    rejected = nearest[~choice.kept[nearest]][:max_rejected]
    return Plan(
        minimize=choice.goal,
        limits=tuple(limit.text for limit in choice.limits),
        num_candidates=len(table),
        num_feasible=int(choice.kept.sum()),
        chosen=None if best is None else _point(table, best, loader),
        points=points(choice.best_first(num_points)),
        pareto=points(_front(choice)),
        best_by_device=points(choice.best_of_each_option()),
        unpriced=points(choice.unpriced()),
        candidates=_candidates(choice),
        nearest_miss=_rejection(choice, int(nearest[0])) if best is None else None,
        rejected=tuple(_rejection(choice, int(row)) for row in rejected),
        num_rejected_by_limit=_counts(choice),
        binding=choice.binding(),
        relaxations=tuple(
            _relaxation(choice, index, row, _point(table, row, loader))
            for index, row in choice.relaxations()[:_MOST_RELAXATIONS]
        ),
        sensitivity=None if best is None else _sensitivity(choice, loader),
        job=job,
        target=target,
        notes=_note_of_loader(table, best, loader),
    )


def _candidates(choice: Choice) -> tuple[PlanCandidate, ...]:
    """All candidates, thinned out evenly if there are too many to draw."""
    count = len(choice.table)
    rows = np.unique(np.linspace(0, count - 1, min(count, _MOST_DRAWN)).astype(int))
    return tuple(_candidate(choice.table, int(row), bool(choice.kept[row])) for row in rows)


def _candidate(table: CandidateTable, row: int, keeps_limits: bool) -> PlanCandidate:
    figures = {name: float(table.values[name][VALUE, row]) for name in _FIGURES}
    low, high = (float(table.values["step_time_s"][end, row]) for end in (LOW, HIGH))
    known: dict[str, Any] = {name: None if np.isnan(value) else value for name, value in figures.items()}
    return PlanCandidate(
        **_axes(table, row),
        **known,
        step_time_low_s=low,
        step_time_high_s=high,
        keeps_limits=keeps_limits,
    )


def _axes(table: CandidateTable, row: int) -> dict[str, Any]:
    """The fields that distinguish a candidate, by name."""
    change = table.configurations[table.configuration[row]]
    option = table.options[table.option[row]]
    own = ("model", "precision", "layout")
    return {
        "device": option.device.name,
        "num_devices": option.num_devices,
        "batch_size_per_device": int(table.batch_size[row]),
        "image_size": change.get("image_size"),
        **{name: change[name] for name in own},
        "settings": {
            name: value
            for name, value in change.items()
            if name not in (*own, "image_size") and (name != "strategy" or option.num_devices > 1)
        },
    }


def _relaxation(choice: Choice, index: int, row: int, point: PlanPoint) -> PlanRelaxation:
    limit = choice.limits[index]
    ratio = 1 + float(choice.excess[index, row])
    factor = ratio if limit.is_upper else 1 / ratio
    return PlanRelaxation(
        limit=limit.text,
        bound=limit.bound * factor,
        factor=factor,
        gain=None if choice.best is None else 1 - float(choice.goals[row] / choice.goals[choice.best]),
        point=point,
    )


def _counts(choice: Choice) -> tuple[tuple[str, int, int], ...]:
    broken = choice.excess > 0
    alone = broken & (broken.sum(axis=0) == 1)
    return tuple((name, int(broken[i].sum()), int(alone[i].sum())) for i, name in enumerate(choice.names))


def _sensitivity(choice: Choice, loader: InputPipeline | None) -> PlanSensitivity:
    broken = choice.broken_at_worst()
    rivals, regret = choice.rivals()
    return PlanSensitivity(
        keeps_limits=not broken,
        broken=broken,
        stays_best=not rivals.size,
        rivals=tuple(_point(choice.table, int(row), loader) for row in rivals[:_MOST_RIVALS]),
        regret=regret,
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
    low, high = table.values["peak_memory_bytes"][[LOW, HIGH], row]
    # A price without a rental behind it is the user's own.
    given = "given" if option.usd_per_hour is not None else None
    return PlanPoint(
        **_axes(table, row),
        **required,
        cost_usd=table.interval("cost_usd", row),
        energy_j=table.interval("energy_j", row),
        co2_g=table.interval("co2_g", row),
        accuracy=None if np.isnan(accuracy) else accuracy,
        fits=fits(low, high, table.device_memory_bytes[row]),
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
    """Note that the choice waits for its loader, in the words of ``predict``."""
    if loader is None or chosen is None:
        return ()
    device_rate, rate = (
        float(table.values[name][VALUE, chosen])
        for name in ("device_samples_per_s", "throughput_samples_per_s")
    )
    return (LOADER_BOUND_NOTE,) if is_loader_bound(1 / rate, 1 / device_rate, loader) else ()


def _rejection(choice: Choice, row: int) -> Rejection:
    table = choice.table
    bounds = (*(limit.bound for limit in choice.limits), float(table.device_memory_bytes[row]))
    quantities = (*(limit.quantity.field for limit in choice.limits), "peak_memory_bytes")
    excess = choice.excess[:, row]
    broken = []
    # Stable: limits missed by equally much stay in the order in which they were given.
    for index in (int(i) for i in np.argsort(-excess, kind="stable") if excess[i] > 0):
        value, share = float(table.values[quantities[index]][VALUE, row]), float(excess[index])
        broken.append(
            BrokenLimit(
                limit=choice.names[index],
                value=None if np.isnan(value) else value,
                bound=bounds[index],
                # JSON has no infinity, the excess of a quantity that is not known.
                excess=share if np.isfinite(share) else None,
            )
        )
    return Rejection(**_axes(table, row), broken=tuple(broken))
