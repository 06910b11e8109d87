"""Compares the sum of measured layers with the measured whole network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from forerun.answers import Answer, fields_of
from forerun.errors import MeasurementError
from forerun.measurement.composition_jobs import EMPTY_NETWORK_LAYERS, CompositionJobs, LayerJobs
from forerun.measurement.jobs import MeasurementJob
from forerun.measurement.measured_job import job_of
from forerun.optime.composition import (
    host_costs,
    marginal_time_s,
    overlapped_step_time_s,
    serial_step_time_s,
)
from forerun.records.measurement import Measurement, Outcome

__all__ = ["Composition", "measured_compositions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition(Answer):
    """A network compared with the sum of its layers.

    Attributes:
        network: Name of the network.
        batch_size: Batch size of the step.
        num_layers: Calls of layers, repeated ones included.
        sum_of_layers_s: Sum of the layers timed alone [s].
        composed_s: Step composed from the layers [s].
        measured_s: Measured step [s].
        relative_noise: Half the 95 % interval of the measured step over it; None if not known.
        left_out: Kinds of modules that are in the step but not in the sum.
    """

    network: str
    batch_size: int
    num_layers: int
    sum_of_layers_s: float
    composed_s: float
    measured_s: float
    relative_noise: float | None = None
    left_out: tuple[str, ...] = ()

    @property
    def overshoot_before(self) -> float:
        """Sum of layers over the step, less one."""
        return self.sum_of_layers_s / self.measured_s - 1

    @property
    def overshoot_after(self) -> float:
        """Composed step over the step, less one."""
        return self.composed_s / self.measured_s - 1

    def json_fields(self) -> dict[str, Any]:
        """The fields, and the overshoots as fractions."""
        overshoots = {name: getattr(self, name) for name in ("overshoot_before", "overshoot_after")}
        return {**fields_of(self), **overshoots}


def measured_compositions(
    networks: Sequence[CompositionJobs], measurements: Iterable[Measurement], *, overlaps: bool
) -> list[Composition]:
    """Compares each network with its layers; costs of calls come from measurements without work.

    Args:
        networks: Jobs of the networks.
        measurements: Measurements that include those of the jobs.
        overlaps: Whether the device works beside its host.

    Raises:
        MeasurementError: A job has no finished measurement.
    """
    found = {job_of(m).to_json(): m for m in measurements if m.outcome is Outcome.DONE}
    return [_composition(jobs, found, overlaps=overlaps) for jobs in networks]


def _composition(jobs: CompositionJobs, found: Mapping[str, Measurement], *, overlaps: bool) -> Composition:
    def measurement(job: MeasurementJob) -> Measurement:
        if (one := found.get(job.to_json())) is None:
            raise MeasurementError(
                f"{job.subject} of {jobs.whole.subject} has no finished measurement; run the same command again, or "
                "look for its reason with: forerun records list"
            )
        return one

    def marginal_s(layer: LayerJobs) -> float:
        alone_s = _time_s(measurement(layer.alone))
        if layer.together is None:  # so large that neither calls nor caches matter
            return alone_s
        return marginal_time_s(alone_s, _time_s(measurement(layer.together)), layer.num_copies)

    alone_s = [_time_s(measurement(layer.alone)) for layer in jobs.layers]
    empty_s = _time_s(measurement(jobs.empty_layer.alone))
    if overlaps:
        few, many = (_time_s(measurement(job)) for job in jobs.empty_networks)
        costs = host_costs(empty_s, EMPTY_NETWORK_LAYERS, (few, many))
        composed_s = overlapped_step_time_s(alone_s, costs)
    else:
        per_step_s = max(0.0, empty_s - marginal_s(jobs.empty_layer))
        composed_s = serial_step_time_s([marginal_s(layer) for layer in jobs.layers], per_step_s)
    whole = measurement(jobs.whole)
    measured_s = _time_s(whole)
    noise = None if whole.summary is None else (whole.summary.high_s - whole.summary.low_s) / measured_s / 2
    return Composition(
        network=jobs.whole.subject,
        batch_size=int(float(str(jobs.whole.parameters["batch_size"]))),
        num_layers=len(jobs.layers),
        sum_of_layers_s=sum(alone_s),
        composed_s=composed_s,
        measured_s=measured_s,
        relative_noise=noise,
        left_out=jobs.left_out,
    )


def _time_s(measurement: Measurement) -> float:
    summary = measurement.summary
    return median(measurement.repetitions_s) if summary is None else summary.median_s
