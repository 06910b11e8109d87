"""Candidates as columns: every quantity of every candidate, with its interval, by arithmetic on arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.cost.time.power import device_power
from forerun.prediction.estimate import Interval
from forerun.prediction.figures import epoch_time_s
from forerun.question.job import Job
from forerun.search.devices import DeviceOption

__all__ = ["HIGH", "LOW", "VALUE", "CandidateTable", "JobArrays", "joined", "quantities"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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
        return replace(
            self,
            configuration=self.configuration[order],
            option=self.option[order],
            batch_size=self.batch_size[order],
            values={name: values[:, order] for name, values in self.values.items()},
            device_memory_bytes=self.device_memory_bytes[order],
            provenance=self.provenance[order],
        )

    def with_rows(self, rows: Ints, others: CandidateTable) -> CandidateTable:
        """The table with the values of other candidates in place of those of some rows."""
        values = {name: column.copy() for name, column in self.values.items()}
        for name, column in values.items():
            column[:, rows] = others.values[name]
        return replace(self, values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobArrays:
    """Times of all kinds of steps in an epoch, by candidate; arrays of intervals are (3, n) [s].

    Attributes:
        step_s: A full step over all devices.
        last_s: The step with the samples left over, 0 where none are.
        validation_s: A forward step of the validation, 0 without.
        num_epochs: Epochs, (3, n).
    """

    step_s: Floats
    last_s: Floats
    validation_s: Floats
    num_epochs: Floats


def quantities(
    job: Job | None,
    arrays: JobArrays,
    option: DeviceOption,
    batch_size: Ints,
    activity: Floats,
    compute_fraction: Floats,
    *,
    num_replicas: int,
    num_micro_steps: int = 1,
    power_limit_w: float | None,
    co2_g_per_kwh: float | None,
) -> dict[str, Floats]:
    """Every quantity but memory and accuracy of n candidates on one device option, (3, n) each.

    job = start-up + epochs * epoch; cost = hours of the job * price; energy = devices * power * time; CO2 = energy *
    intensity of the grid. The intervals of epochs, time and power are taken as independent: relative half-widths add in
    squares.

    Args:
        job: The job; without one only the step is known.
        arrays: Its times.
        option: The devices.
        batch_size: Samples of a replica and micro-step, (n,).
        activity: Ideal time of a device's work and traffic over the step, (n,).
        compute_fraction: Share of the work in it, (n,).
        num_replicas: Groups of devices that take samples of their own.
        num_micro_steps: Micro-steps of a step.
        power_limit_w: Power limit set on every device, None for that of the board [W].
        co2_g_per_kwh: Carbon intensity of the grid, None if not asked [g/kWh].
    """
    # A power limit below the draw slows the whole step down, and the slower step draws what the limit allows.
    power = device_power(option.device, activity, compute_fraction, power_limit_w)
    slowdown = 1.0 if power is None else power.slowdown
    times_s = (arrays.step_s, arrays.last_s, arrays.validation_s)
    step_s, last_s, validation_s = (each * slowdown for each in times_s)
    global_batch = batch_size * num_replicas * num_micro_steps
    found = {
        "step_time_s": step_s,
        "throughput_samples_per_s": global_batch / step_s[[VALUE, HIGH, LOW]],
    }
    if job is None:
        return found
    validation_batch = batch_size * num_replicas
    epoch = epoch_time_s(
        job, global_batch, step_s, last_s, validation_s, validation_batch_size=validation_batch
    )
    whole = job.startup_s + product(arrays.num_epochs, epoch)
    unknown = np.full_like(whole, np.nan)
    hourly_usd = option.usd_per_hour
    energy = unknown
    if power is not None:
        watts = np.stack([power.value_w, power.low_w, power.high_w]) * option.num_devices
        energy = product(watts, whole)
    return found | {
        "epoch_time_s": epoch,
        "job_time_s": whole,
        "num_epochs": arrays.num_epochs,
        "cost_usd": whole * hourly_usd / 3600 if hourly_usd is not None else unknown,
        "energy_j": energy,
        "co2_g": energy / 3.6e6 * co2_g_per_kwh if co2_g_per_kwh is not None else unknown,
    }


def product(first: Floats, second: Floats) -> Floats:
    """Product of two independent quantities, (3, n) each."""
    value = first[VALUE] * second[VALUE]
    safe = [np.where(part[VALUE] > 0, part[VALUE], 1.0) for part in (first, second)]

    def width(end: int) -> Floats:
        squares = [
            ((part[end] - part[VALUE]) / own) ** 2 for part, own in zip((first, second), safe, strict=True)
        ]
        return np.asarray(np.sqrt(sum(squares)))

    return np.stack([value, value * np.maximum(0.0, 1 - width(LOW)), value * (1 + width(HIGH))])


def joined(tables: Sequence[CandidateTable]) -> CandidateTable:
    """Tables with the same configurations and options, one after the other."""
    first = tables[0]
    return CandidateTable(
        configurations=first.configurations,
        options=first.options,
        configuration=np.concatenate([table.configuration for table in tables]),
        option=np.concatenate([table.option for table in tables]),
        batch_size=np.concatenate([table.batch_size for table in tables]),
        values={
            name: np.concatenate([table.values[name] for table in tables], axis=1) for name in first.values
        },
        device_memory_bytes=np.concatenate([table.device_memory_bytes for table in tables]),
        provenance=np.concatenate([table.provenance for table in tables]),
    )
