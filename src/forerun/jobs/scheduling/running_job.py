"""A job inside the simulator: its true progress, and the view that a policy gets of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

import numpy as np

from forerun.jobs.forecasting.laws import fit_optimus
from forerun.jobs.scheduling.job import Allocation, NodeGroup, ScheduledJob, SharedCluster
from forerun.jobs.scheduling.placement import Placement
from forerun.jobs.scheduling.policy import JobView
from forerun.jobs.scheduling.speed import BatchEfficiency, RateCurve, offered_sizes, rate_curve

FEWEST_POINTS = 4
"""Epochs below which a curve says nothing, and the stated epochs stand."""


def epochs_to_loss(losses: Sequence[float], target: float, stated_epochs: float) -> float:
    """All epochs of a job that runs until a target, those done included, by the curve of its losses.

    Below ``FEWEST_POINTS`` epochs the stated epochs count; from then on the fitted curve, at least a tenth of an
    epoch more and at most the stated epochs.

    Args:
        losses: After epochs 1, 2 ..., lower is better, above zero.
        target: Loss at which the job is done.
        stated_epochs: Epochs its owner thinks it needs at most.
    """
    if len(losses) < FEWEST_POINTS:
        return float(stated_epochs)
    least, so_far = len(losses) + 0.1, np.minimum.accumulate(np.asarray(losses, dtype=float))
    reached = so_far[-1] <= target
    wanted = 0.0 if reached else fit_optimus(np.arange(1.0, len(losses) + 1), so_far).steps_to(target)
    return float(min(max(wanted, least), max(stated_epochs, least)))


NUM_PHASES = 20
"""Pieces of a job in which the worth of a batch is taken as constant."""


MOST_DEVICES_OF_A_JOB = 4096
"""Devices up to which more are considered for a job that asks for fewer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The share and progress of a job when a simulation begins.

    Attributes:
        allocation, placement: Its devices.
        done_samples: Work done.
        ran_s: Time since it got these devices [s].
    """

    allocation: Allocation
    placement: Placement
    done_samples: float = 0.0
    ran_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class RunningJob:
    """State of one job.

    Attributes:
        job: The job as the scheduler believes it to be.
        actual: The job as it truly is; the same where the forecasts are right.
        order: Number in the order of arrival.
        done_samples: Work done.
        pause_s: Time until its next step [s].
        rate: Useful samples per second, now.
    """

    job: ScheduledJob
    actual: ScheduledJob
    order: int
    done_samples: float = 0.0
    pause_s: float = 0.0
    rate: float = 0.0
    attained_device_s: float = 0.0
    num_restarts: int = 0
    start_s: float = inf
    end_s: float = inf
    current: Allocation | None = None
    placement: Placement = ()
    since_s: float = 0.0
    _waiting: JobView | None = None
    _curves: dict[tuple[bool, float], dict[str, RateCurve]] = field(default_factory=dict)

    def stand(self, standing: Standing) -> None:
        """Takes up what the job has already."""
        self.current, self.placement = standing.allocation, standing.placement
        self.since_s, self.start_s = -standing.ran_s, 0.0
        # A job that runs is not done, whatever its speed says of the time that it ran.
        self.done_samples = min(standing.done_samples, 0.999 * self.actual.work_samples)
        self.attained_device_s = standing.ran_s * standing.allocation.num_workers

    @property
    def left_samples(self) -> float:
        """Work really left."""
        return self.actual.work_samples - self.done_samples

    @property
    def phase(self) -> float:
        """Share of the work done, rounded down to a phase."""
        return int(NUM_PHASES * self.done_samples / self.actual.work_samples + 1e-9) / NUM_PHASES

    @property
    def held_until_s(self) -> float:
        """Time until which it keeps what it has, whatever a policy would like [s]."""
        if self.current is None:
            return -inf
        return self.since_s + self.job.min_run_s if self.job.is_preemptible else inf

    def is_held(self, now_s: float) -> bool:
        """True while it keeps its share."""
        return now_s < self.held_until_s

    def view(self, cluster: SharedCluster, adapts_batch: bool, now_s: float) -> JobView:
        """The view that a policy gets; the same object as long as the job waits."""
        if self.current is not None:
            self._waiting = None
            return self._view(cluster, adapts_batch, now_s)
        if self._waiting is None:
            self._waiting = self._view(cluster, adapts_batch, now_s)
        return self._waiting

    def _view(self, cluster: SharedCluster, adapts_batch: bool, now_s: float) -> JobView:
        left, progress = self._forecast()
        return JobView(
            job=self.job,
            order=self.order,
            remaining_samples=left,
            progress=progress,
            attained_device_s=self.attained_device_s,
            curves=self.curves(cluster, adapts_batch, progress),
            current=self.current,
            is_held=self.is_held(now_s),
        )

    def _forecast(self) -> tuple[float, float]:
        """Forecast of the work left, and the share that is done by it."""
        if self.job.forecast is not None:
            left = self.job.forecast(self.done_samples)
        else:
            left = self.job.work_samples - self.done_samples
        # A job that outlives its forecast is told to be nearly done, never done.
        left = max(left, 0.01 * self.job.work_samples)
        return left, self.done_samples / (self.done_samples + left)

    def curves(self, cluster: SharedCluster, adapts_batch: bool, progress: float) -> dict[str, RateCurve]:
        """Forecast rates by kind of device."""
        # Curves are kept by phase, or each round would make them anew for every job; most are the same in every phase.
        is_changing = not isinstance(self.job.training.efficiency, BatchEfficiency | None)
        phase = int(NUM_PHASES * progress) / NUM_PHASES if is_changing else 0.0
        found = self._curves.get((adapts_batch, phase))
        if found is None:
            found = self._curves[adapts_batch, phase] = {
                group.device: self._curve(group, adapts_batch, phase)
                for group in cluster.groups
                if group.device in self.job.training.speeds
            }
        return found

    def _curve(self, group: NodeGroup, adapts_batch: bool, phase: float) -> RateCurve:
        training = self.job.training
        most = self.job.max_workers if self.job.is_elastic else self.job.num_workers
        most = min(group.num_devices, most, max(self.job.num_workers, MOST_DEVICES_OF_A_JOB))
        fixed = (training.batch_size, training.batch_size)
        return rate_curve(
            training.speeds[group.device],
            training.efficiency,
            training.batch_range or fixed if adapts_batch else fixed,
            group.devices_per_node,
            offered_sizes(group.devices_per_node, most, self.job.num_workers),
            phase,
        )

    def set_rate(self, cluster: SharedCluster, adapts_batch: bool) -> None:
        """Takes up the true rate of what it has now."""
        self.rate = 0.0 if self.current is None else self._actual_rate(cluster, adapts_batch, self.current)

    def _actual_rate(self, cluster: SharedCluster, adapts_batch: bool, given: Allocation) -> float:
        training = self.actual.training
        believed = self.curves(cluster, adapts_batch, self._forecast()[1])[given.device]
        batch = believed.batch_size(given.num_workers) or training.batch_size
        # The batch is chosen by what is believed, and the speed is that which is true of it.
        speed = training.speeds[given.device](given.num_workers, len(self.placement), batch)
        return speed if training.efficiency is None else speed * training.efficiency(batch, self.phase)

    @property
    def has_phases(self) -> bool:
        """True if the view of it changes with its progress other than by the work done."""
        both = (self.job.training, self.actual.training)
        is_changing = any(training.efficiency is not None for training in both)
        return is_changing or self.job.forecast is not None

    def next_phase_samples(self) -> float:
        """Work until the next phase or the end."""
        if not self.has_phases:
            return self.left_samples
        phase_samples = self.actual.work_samples / NUM_PHASES
        into_phase = self.done_samples - self.phase * self.actual.work_samples
        return min(self.left_samples, phase_samples - into_phase)
