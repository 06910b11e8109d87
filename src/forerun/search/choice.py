"""Candidates of a search as columns of numbers, and the choice among them.

The choice names limits, the best one, the front, the binding limit, and the effect of uncertainty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.cost.time.power import device_power
from forerun.graph.graph import Bools, Floats, Ints
from forerun.prediction.estimate import Interval
from forerun.prediction.estimate_run import epoch_time_s
from forerun.question.job import Job
from forerun.search.devices import DeviceOption
from forerun.search.search import Limit

GOALS = {"time": "job_time_s", "cost": "cost_usd", "energy": "energy_j", "co2": "co2_g"}
"""Goals that can be minimised, with their quantities."""

DEVICE_MEMORY = "memory of the device"
"""The limit that is always there."""

# A limit that is met exactly must not be broken by rounding.
_TOLERANCE = 1e-9
_FRONT = ("job_time_s", "cost_usd", "energy_j")
_BETTER = 1 - 1e-6
"""Share of a goal below which a candidate is better by more than rounding."""


class Choice:
    """Candidates under limits and a goal.

    Attributes:
        table: The candidates, n of them.
        limits: The limits to keep, beside the memory of the device.
        goal: What is minimised, a key of ``GOALS``.
        names: The limits as they were written, ``DEVICE_MEMORY`` last.
        excess: Share by which each candidate breaks each limit, (limits + 1, n); zero or below where it keeps it.
        kept: True for candidates that keep all limits, (n,).
        sure: True for those of them that fit their device at the upper end of their memory, or all of them where none
            does, (n,).
        goals: The goal of each candidate, infinite where it is not known, (n,).
        best: The candidate with the least goal among the sure ones, None if there is none. Of equals the faster is
            taken, then the cheaper.
    """

    def __init__(self, table: CandidateTable, limits: Sequence[Limit], goal: str) -> None:
        self.table, self.limits, self.goal = table, tuple(limits), goal
        self.names = (*(limit.text for limit in limits), DEVICE_MEMORY)
        self.excess = self.excess_at(VALUE)
        self.kept = _keeps(self.excess)
        self._fits = self.excess_at(HIGH)[-1] <= _TOLERANCE
        self.sure = self._surely(self.kept)
        self.goals = self._goals_at(VALUE)
        self.best = self._best_of(self.sure)

    def excess_at(self, end: int) -> Floats:
        """The excess at ``VALUE``, or at ``HIGH``, the bad end of every interval, (limits + 1, n).

        A quantity that is not known breaks every limit on it, with infinity.
        """
        rows = [self._excess(limit, end) for limit in self.limits]
        rows.append(self.table.values["peak_memory_bytes"][end] / self.table.device_memory_bytes - 1)
        return np.stack(rows)

    def _surely(self, allowed: Bools) -> Bools:
        # A run that may end out of memory comes after every one that cannot, however fast it would be.
        certain = allowed & self._fits
        return certain if certain.any() else allowed

    def _excess(self, limit: Limit, end: int) -> Floats:
        # The bad end of a quantity that should be large is its low end.
        bad = end if limit.is_upper or end == VALUE else LOW
        value = self.table.values[limit.quantity.field][bad]
        ratio = value / limit.bound if limit.is_upper else limit.bound / np.maximum(value, 1e-300)
        return np.where(np.isnan(value), np.inf, ratio - 1)

    def _goals_at(self, end: int) -> Floats:
        # Infinity loses every comparison, so an unknown goal needs no case of its own below.
        values = self.table.values[GOALS[self.goal]][end]
        return np.where(np.isnan(values), np.inf, values)

    def _best_of(self, allowed: Bools) -> int | None:
        rows = np.flatnonzero(allowed & np.isfinite(self.goals))
        if not rows.size:
            return None
        ties = [
            np.nan_to_num(self.table.values[name][VALUE, rows], nan=np.inf)
            for name in ("cost_usd", "job_time_s")
        ]
        # The last key counts first: the goal, then the time of the job, then its cost.
        return int(rows[np.lexsort([*ties, self.goals[rows]])[0]])

    def _without(self, index: int) -> Bools:
        """Candidates that keep all limits but one, the sure ones where that one is not their memory."""
        kept = _keeps(np.delete(self.excess, index, axis=0))
        return kept if self.names[index] == DEVICE_MEMORY else self._surely(kept)

    def nearest_first(self) -> Ints:
        """All candidates, those whose worst excess is the smallest first; if none is kept, first those that can run."""
        cannot_run = (self.excess[-1] > 0) & ~self.kept.any()
        return np.lexsort([self.excess.max(axis=0), cannot_run])

    def best_first(self, num_points: int) -> Ints:
        """The best candidates by the goal, the sure ones first; the nearest misses if nothing keeps the limits."""
        allowed = np.flatnonzero(self.kept)
        if not allowed.size:
            return self.nearest_first()[:num_points]
        return allowed[np.lexsort([self.goals[allowed], ~self._fits[allowed]])][:num_points]

    def front(self) -> Ints:
        """Candidates on the front of time and cost, of time and energy where no price is known, fastest first.

        Where accuracies are known they are a third side. If nothing keeps the limits, all that fit are compared.
        """
        values = self.table.values
        second = _FRONT[1] if np.isfinite(values[_FRONT[1]][VALUE]).any() else _FRONT[2]
        columns = [values[name][VALUE] for name in (_FRONT[0], second)]
        accuracy = values["accuracy"][VALUE]
        if np.isfinite(accuracy).any():
            columns.append(-accuracy)
        # If no candidate keeps all limits, the front is of those that fit the memory: nothing else can run.
        rows = np.flatnonzero(self.kept if self.kept.any() else self.excess[-1] <= 0)
        front = rows[pareto_front(np.stack([column[rows] for column in columns], axis=1))]
        return np.asarray(front[np.argsort(values[_FRONT[0]][VALUE, front], kind="stable")])

    def best_of_each_option(self) -> list[int]:
        """The best candidate of each device that has one, in the order of the devices."""
        found = []
        for number in range(len(self.table.options)):
            of_option = self.table.option == number
            found += self._least_of_each(
                np.where(self._surely(self.kept & of_option), self.goals, np.inf), [number]
            )
        return found

    def unpriced(self) -> list[int]:
        """Where cost is asked about: the fastest of each device without a price that keeps all other limits."""
        of_cost = [row for row, limit in enumerate(self.limits) if limit.quantity.name == "cost"]
        if not of_cost and self.goal != "cost":
            return []
        allowed = _keeps(np.delete(self.excess, of_cost, axis=0))
        job_s = np.where(allowed, self.table.values["job_time_s"][VALUE], np.inf)
        options = [number for number, option in enumerate(self.table.options) if option.usd_per_hour is None]
        return self._least_of_each(job_s, options)

    def _least_of_each(self, values: Floats, options: Sequence[int]) -> list[int]:
        """The candidate with the least value of each option that has a finite one."""
        found = []
        for number in options:
            rows = np.flatnonzero(self.table.option == number)
            least = int(rows[np.argmin(values[rows])])
            if np.isfinite(values[least]):
                found.append(least)
        return found

    def binding(self) -> str | None:
        """The limit that costs most; without a choice, the worst one of the nearest miss.

        A limit whose quantity is not known of a candidate, such as the cost of a device without a price, does not
        bind it.
        """
        if self.best is None:
            return self.names[int(np.argmax(self.excess[:, self.nearest_first()[0]]))]
        best = float(self.goals[self.best])
        losses = []
        for index in range(len(self.names)):
            # Without a limit, what it says nothing about is still no candidate: infinity stays.
            others = self._without(index) & np.isfinite(self.excess[index])
            row = self._best_of(others) if len(self.names) > 1 else None
            losses.append(best if row is None else float(self.goals[row]))
        least = int(np.argmin(losses))
        return self.names[least] if losses[least] < best * _BETTER else None

    def relaxations(self) -> list[tuple[int, int]]:
        """Limits with the candidate that the smallest change of each alone admits, smallest change first.

        Only limits whose change admits something better than the choice are named.
        """
        before = np.inf if self.best is None else self.goals[self.best]
        found = []
        for index in range(len(self.limits)):
            own = self.excess[index]
            # An unknown quantity has no bound that would admit it: its infinite excess is no relaxation.
            better = self._without(index) & (self.goals < before * _BETTER) & np.isfinite(own)
            rows = np.flatnonzero(better & (own > _TOLERANCE))
            if rows.size:
                # The least change; of equal ones the best goal.
                found.append((index, int(rows[np.lexsort([self.goals[rows], own[rows]])[0]])))
        return sorted(found, key=lambda pair: float(self.excess[pair]))

    def broken_at_worst(self) -> tuple[str, ...]:
        """Limits that the choice breaks at the bad end of its intervals."""
        assert self.best is not None
        worst = self.excess_at(HIGH)[:, self.best]
        return tuple(name for name, excess in zip(self.names, worst, strict=True) if excess > _TOLERANCE)

    def rivals(self) -> tuple[Ints, float]:
        """Candidates better than the choice at the bad end of its goal, best first, and its share above the first.

        The others are taken as predicted. A candidate that differs in batch size only is off by the same factor, so
        it is no rival.
        """
        assert self.best is not None
        table, chosen = self.table, self.best
        worst = float(self._goals_at(HIGH)[chosen])
        is_same = (table.option == table.option[chosen]) & (
            table.configuration == table.configuration[chosen]
        )
        rows = np.flatnonzero(self.sure & (self.goals < worst) & ~is_same)
        rows = rows[np.argsort(self.goals[rows], kind="stable")]
        return rows, worst / float(self.goals[rows[0]]) - 1 if rows.size else 0.0


def _keeps(excess: Floats) -> Bools:
    return np.asarray((excess <= _TOLERANCE).all(axis=0))


def pareto_front(costs: Floats) -> Bools:
    """True if each point is on the front, that is not dominated by another, (n,).

    A point dominates another if it is nowhere larger and somewhere smaller. Of equal points the first is kept.
    Points with a value that is not finite are never on the front.

    Args:
        costs: One row per point, each column to be small, (n, k).
    """
    on_front = np.zeros(len(costs), dtype=bool)
    usable = np.flatnonzero(np.isfinite(costs).all(axis=1))
    if not usable.size:
        return on_front
    # In lexicographic order a later point never dominates an earlier one.
    order = usable[np.lexsort(costs[usable].T[::-1])]
    chosen = _front_of_two(costs[order]) if costs.shape[1] == 2 else _front_of_many(costs[order])
    on_front[order[chosen]] = True
    return on_front


def _front_of_two(ordered: Floats) -> Bools:
    second = ordered[:, 1]
    best_before = np.concatenate([[np.inf], np.minimum.accumulate(second)[:-1]])
    return np.asarray(second < best_before)


def _front_of_many(ordered: Floats) -> Bools:
    chosen = np.zeros(len(ordered), dtype=bool)
    front = np.empty((0, ordered.shape[1]))
    for index, point in enumerate(ordered):
        if not (front <= point).all(axis=1).any():
            chosen[index] = True
            front = np.vstack([front, point])
    return chosen


VALUE, LOW, HIGH = 0, 1, 2
"""Rows of an array of intervals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateTable:
    """Candidates, n of them.

    Attributes:
        configurations: The distinct changes of the run, but for devices and batch size: each needs one graph.
        options: The distinct devices.
        configuration: Index into ``configurations``, (n,).
        option: Index into ``options``, (n,).
        batch_size: Samples of one step on one device, (n,).
        values: Quantity -> value, low and high, (3, n); NaN where it is not known.
        device_memory_bytes: Memory that a process finds on a device, (n,) [bytes].
        provenance: Basis of the step time, (n,).
    """

    configurations: tuple[Mapping[str, Any], ...]
    options: tuple[DeviceOption, ...]
    configuration: Ints
    option: Ints
    batch_size: Ints
    values: Mapping[str, Floats]
    device_memory_bytes: Floats
    provenance: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.batch_size)

    def interval(self, quantity: str, row: int) -> Interval | None:
        """A quantity of one candidate, None where it is not known."""
        value, low, high = (float(part) for part in self.values[quantity][:, row])
        return None if math.isnan(value) else Interval(value, min(low, value), max(high, value))

    def key(self, row: int) -> tuple[int, int, int]:
        """The fields that distinguish a candidate."""
        return int(self.configuration[row]), int(self.option[row]), int(self.batch_size[row])

    def ordered(self, order: Ints) -> CandidateTable:
        """The candidates of these rows, in this order."""
        columns = {name: getattr(self, name)[order] for name in _PER_CANDIDATE}
        return replace(
            self, **columns, values={name: values[:, order] for name, values in self.values.items()}
        )

    def with_rows(self, rows: Ints, others: CandidateTable) -> CandidateTable:
        """The table with the values of other candidates in place of those of some rows."""
        values = {name: column.copy() for name, column in self.values.items()}
        for name, column in values.items():
            column[:, rows] = others.values[name]
        return replace(self, values=values)


_PER_CANDIDATE = ("configuration", "option", "batch_size", "device_memory_bytes", "provenance")
"""Columns of one value a candidate, beside the quantities."""


def quantities(
    job: Job | None,
    option: DeviceOption,
    batch_size: Ints,
    activity: Floats,
    compute_fraction: Floats,
    *,
    step_s: Floats,
    last_s: Floats,
    validation_s: Floats,
    num_epochs: Floats,
    num_micro_steps: int,
    power_limit_w: float | None,
    co2_g_per_kwh: float | None,
) -> dict[str, Floats]:
    """Every quantity but memory and accuracy of n candidates on one device option, (3, n) each.

    job = start-up + epochs * epoch; cost = hours of the job * price; energy = devices * power * time; CO2 = energy *
    intensity of the grid. The intervals of epochs, time and power are taken as independent: relative half-widths add in
    squares.

    Args:
        job: The job; without one only the step is known.
        option: The devices.
        batch_size: Samples of a micro-step over all devices, (n,).
        activity: Ideal time of a device's work and traffic over the step, (n,).
        compute_fraction: Share of the work in it, (n,).
        step_s: Full steps over all devices, (3, n) [s].
        last_s: Steps with the samples left over, 0 where none are, (3, n) [s].
        validation_s: Forward steps of the validation, 0 without, (3, n) [s].
        num_epochs: Epochs, (3, n).
        num_micro_steps: Micro-steps of a step.
        power_limit_w: Power limit set on every device, None for that of the board [W].
        co2_g_per_kwh: Carbon intensity of the grid, None if not asked [g/kWh].
    """
    # A power limit below the draw slows the whole step down, and the slower step draws what the limit allows.
    power = device_power(option.device, activity, compute_fraction, power_limit_w)
    slowdown = 1.0 if power is None else power.slowdown
    step_s, last_s, validation_s = (each * slowdown for each in (step_s, last_s, validation_s))
    global_batch = batch_size * num_micro_steps
    found = {"step_time_s": step_s, "throughput_samples_per_s": global_batch / step_s[[VALUE, HIGH, LOW]]}
    if job is None:
        return found
    epoch = epoch_time_s(job, global_batch, step_s, last_s, validation_s, validation_batch_size=batch_size)
    whole = job.startup_s + product(num_epochs, epoch)
    unknown = np.full_like(whole, np.nan)
    hourly_usd = option.usd_per_hour
    energy = unknown
    if power is not None:
        watts = np.stack([power.value_w, power.low_w, power.high_w]) * option.num_devices
        energy = product(watts, whole)
    return found | {
        "epoch_time_s": epoch,
        "job_time_s": whole,
        "num_epochs": num_epochs,
        "cost_usd": whole * hourly_usd / 3600 if hourly_usd is not None else unknown,
        "energy_j": energy,
        "co2_g": energy / 3.6e6 * co2_g_per_kwh if co2_g_per_kwh is not None else unknown,
    }


def product(first: Floats, second: Floats) -> Floats:
    """Product of two independent quantities, (3, n) each."""
    value = first[VALUE] * second[VALUE]
    # Relative widths of independent factors add as squares; a value of zero has none.
    safe = [np.where(part[VALUE] > 0, part[VALUE], 1.0) for part in (first, second)]

    def width(end: int) -> Floats:
        squares = [
            ((part[end] - part[VALUE]) / own) ** 2 for part, own in zip((first, second), safe, strict=True)
        ]
        return np.asarray(np.sqrt(sum(squares)))

    return np.stack([value, value * np.maximum(0.0, 1 - width(LOW)), value * (1 + width(HIGH))])


def joined(tables: Sequence[CandidateTable]) -> CandidateTable:
    """Tables with the same configurations and options, one after the other."""
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(table, name) for table in tables]) for name in _PER_CANDIDATE
    }
    values = {
        name: np.concatenate([table.values[name] for table in tables], axis=1) for name in tables[0].values
    }
    return replace(tables[0], **columns, values=values)
