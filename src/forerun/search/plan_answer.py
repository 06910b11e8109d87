"""A plan: the chosen candidate, the front, the others with the limits they broke, and the certainty of the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.base.answers import Answer, fields_of
from forerun.prediction.estimate import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateAxes:
    """The fields that distinguish a candidate.

    Attributes:
        model: Name of the model.
        device, num_devices: Catalogue name and number of devices.
        batch_size_per_device: Batch size of one device.
        precision, layout: As in the training setup.
        image_size: Height and width of images, None for the model's own [pixels].
        settings: The settings that were searched beside precision and layout, by their names in a run.
    """

    model: str
    device: str
    num_devices: int
    batch_size_per_device: int
    precision: str
    layout: str
    image_size: int | None
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def device_words(self) -> str:
        """The devices in words: ``t4`` or ``t4 x4``."""
        return f"{self.device} x{self.num_devices}" if self.num_devices > 1 else self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanPoint(CandidateAxes):
    """One candidate with all its known quantities.

    A quantity that is not known is None. Names and units are those of ``Estimate``.

    Attributes:
        step_time_s, throughput_samples_per_s, epoch_time_s, job_time_s: Times, over all devices.
        num_epochs: Epochs of the job, or epochs to the target if there is one.
        peak_memory_bytes: Peak memory of one device.
        cost_usd, energy_j, co2_g: Cost, energy and CO2 of the job.
        accuracy: Known accuracy of the model, None if it was not given.
        fits: "yes", "no" or "close".
        price_usd_per_hour: Price of all devices.
        price_source: Provider, instance, way of paying and date; "given" for a price of the user's own.
        provenance: Basis of the step time.
        workers_needed: Loader workers that keep a device busy, None without a loader or where none would do.
    """

    step_time_s: Interval
    throughput_samples_per_s: Interval
    epoch_time_s: Interval
    job_time_s: Interval
    num_epochs: Interval
    peak_memory_bytes: Interval
    cost_usd: Interval | None
    energy_j: Interval | None
    co2_g: Interval | None
    accuracy: float | None
    fits: str
    price_usd_per_hour: float | None
    price_source: str | None
    provenance: str
    workers_needed: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCandidate(CandidateAxes):
    """A candidate as one row of figures, for plots; an unknown quantity is None."""

    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    throughput_samples_per_s: float
    job_time_s: float
    num_epochs: float
    cost_usd: float | None
    energy_j: float | None
    peak_memory_bytes: float
    keeps_limits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenLimit:
    """A limit that a candidate breaks: ``excess`` is the share beyond it, ``value`` is None where it is unknown."""

    limit: str
    value: float | None
    bound: float
    excess: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection(CandidateAxes):
    """A rejected candidate with every limit that it breaks, the worst first."""

    broken: tuple[BrokenLimit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRelaxation:
    """The smallest change of one limit that admits a better candidate.

    Attributes:
        limit: The limit as it was written.
        bound: Needed bound, in the unit used inside.
        factor: Needed bound over the present one.
        gain: Share by which the objective falls, None if no candidate kept the limits before.
        point: The candidate that the change admits.
    """

    limit: str
    bound: float
    factor: float
    gain: float | None
    point: PlanPoint


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSensitivity:
    """True if the choice holds if its estimate is off by its interval.

    Attributes:
        keeps_limits: Whether the choice keeps all limits at the bad end of its intervals.
        broken: Limits that it would break there.
        stays_best: Whether the choice would still be the best, the others being as predicted.
        rivals: Candidates that would be better in that case, best first.
        regret: Share by which the choice would be worse than the first rival.
    """

    keeps_limits: bool
    broken: tuple[str, ...]
    stays_best: bool
    rivals: tuple[PlanPoint, ...]
    regret: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Answer):
    """Answer of ``forerun.plan``.

    Attributes:
        minimize: The objective: time, cost, energy or co2.
        limits: The limits as they were written.
        num_candidates: Number of candidates compared.
        num_feasible: Number of candidates that keep all limits.
        chosen: Best candidate that keeps all limits, None if there is none.
        points: The best candidates by the objective; the nearest misses if no candidate keeps the limits.
        pareto: The front of time and cost (or energy, without prices; and accuracy, where known), fastest first.
        best_by_device: The best candidate of each device that has one.
        unpriced: Where cost is asked about, the fastest candidate of each device whose price is not known and that
            keeps all other limits.
        candidates: All candidates, thinned out evenly if there are too many to draw.
        nearest_miss: Candidate with the smallest worst excess, None if one keeps the limits.
        rejected: Rejected candidates, nearest misses first; at most as many as the question asks for.
        num_rejected_by_limit: By limit, the number of candidates that break it, and that break only it.
        binding: Limit whose removal would improve the objective most, None if none would.
        relaxations: The smallest change of each limit that would help, smallest first.
        sensitivity: Certainty of the choice, None without a choice.
        job: Dataset and epochs in words.
        target: Target of the training, None where the number of epochs is given.
        notes: Remarks for the reader.
    """

    minimize: str
    limits: tuple[str, ...]
    num_candidates: int
    num_feasible: int
    chosen: PlanPoint | None
    points: tuple[PlanPoint, ...]
    pareto: tuple[PlanPoint, ...]
    best_by_device: tuple[PlanPoint, ...]
    unpriced: tuple[PlanPoint, ...] = ()
    candidates: tuple[PlanCandidate, ...]
    nearest_miss: Rejection | None
    rejected: tuple[Rejection, ...]
    num_rejected_by_limit: tuple[tuple[str, int, int], ...]
    binding: str | None
    relaxations: tuple[PlanRelaxation, ...]
    sensitivity: PlanSensitivity | None
    job: str
    target: str | None
    notes: tuple[str, ...]

    def json_fields(self) -> dict[str, Any]:
        """The plan's fields, with the counts of rejections by name."""
        counts = [
            {"limit": limit, "num_rejected": rejected, "num_rejected_by_it_alone": alone}
            for limit, rejected, alone in self.num_rejected_by_limit
        ]
        return {**fields_of(self), "num_rejected_by_limit": counts}
