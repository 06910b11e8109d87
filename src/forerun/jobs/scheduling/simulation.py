"""The simulator: rounds of a fixed length, and inside them discrete events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf, isfinite, nan, nextafter

import numpy as np

from forerun.base.errors import FailureError, InvalidSetupError
from forerun.jobs.scheduling.job import Allocation, ScheduledJob, SharedCluster, check_jobs
from forerun.jobs.scheduling.outcome import (
    Decision,
    JobOutcome,
    SimulatedSchedule,
    Stretch,
    schedule_metrics,
)
from forerun.jobs.scheduling.placement import Placement, consolidate, pack
from forerun.jobs.scheduling.policy import JobView, Policy
from forerun.jobs.scheduling.preemption import decide, urgent_in_s
from forerun.jobs.scheduling.running_job import RunningJob, Standing
from forerun.jobs.scheduling.speed import ask_together

_MOST_ROUNDS = 5_000_000
_ROUNDS_BETWEEN_WORDS = 200
_QUIET_ROUNDS, _QUIET_SHARE = 400, 0.02
"""Rounds in which nothing comes, ends or changes, after which a policy that answers by the time is asked only after so
much of the quiet time again, up to the next event: a job of years would take millions of rounds."""

Progress = Callable[[int, int], None]
"""Told how many jobs are done, of how many."""


_SHORTEST_ROUND_S = 0.1
"""Shortest time between two decisions; shorter rounds would be millions."""


def simulate(
    jobs: Sequence[ScheduledJob],
    cluster: SharedCluster,
    policy: Policy,
    round_s: float = 60.0,
    actual: Mapping[str, ScheduledJob] | None = None,
    standing: Mapping[str, Standing] | None = None,
    say: Progress | None = None,
) -> SimulatedSchedule:
    """Simulated schedule of jobs on a cluster under a policy.

    At the start of each round the policy says who gets what; a job whose allocation or nodes change pays its restart
    time before its next step. Inside a round, when a job comes or ends, the policy shares out what is free among those
    that wait, and all that run keep what they have. Rounds in which nothing can change are passed over.

    Args:
        jobs: The jobs as the scheduler knows them.
        cluster: The cluster that they share.
        policy: The policy that decides.
        round_s: Time between two decisions [s].
        actual: True speeds and work by name, where they differ from what the scheduler believes.
        standing: What jobs have at the beginning, by name.
        say: Told now and then how many jobs are done, of how many.

    Raises:
        InvalidSetupError: There are no jobs, two have one name, one does not fit the cluster, or rounds are too
            short.
        FailureError: A job gets nothing although the cluster is empty.
    """
    check_jobs(tuple(jobs), {group.device: group.num_devices for group in cluster.groups})
    if not _SHORTEST_ROUND_S <= round_s < inf:
        raise InvalidSetupError(f"a round must last at least {_SHORTEST_ROUND_S:g} s, got {round_s:g}")
    return _Simulation(jobs, cluster, policy, round_s, actual or {}, standing or {}).run(say)


class _Simulation:
    """State of one run."""

    def __init__(
        self,
        jobs: Sequence[ScheduledJob],
        cluster: SharedCluster,
        policy: Policy,
        round_s: float,
        actual: Mapping[str, ScheduledJob],
        standing: Mapping[str, Standing],
    ) -> None:
        self.cluster, self.policy, self.round_s = cluster, policy, round_s
        ordered = sorted(jobs, key=lambda job: job.arrival_s)
        self.all = [
            RunningJob(job=job, actual=actual.get(job.name, job), order=i) for i, job in enumerate(ordered)
        ]
        self.by_name = {state.job.name: state for state in self.all}
        for name, found in standing.items():
            self.by_name[name].stand(found)
        self.jobs = {job.name: job for job in ordered}
        # The next to arrive is at the end, where it is taken off at no cost.
        self.coming = list(reversed(self.all))
        self.active: list[RunningJob] = []
        self.stretches: list[Stretch] = []
        self.decision_s: list[float] = []
        self.first_decisions: tuple[Decision, ...] = ()
        # (time, active jobs from then on), for finish-time fairness.
        self.crowd: list[tuple[float, int]] = []
        self._urgent_s, self._is_urgent = inf, False
        # Whether a job came, ended or changed since the last decision.
        self._quiet_from_s, self._has_happened = 0.0, False

    def run(self, say: Progress | None) -> SimulatedSchedule:
        """Rounds until all jobs are done."""
        now_s, round_s, is_changed = 0.0, 0.0, True
        for number in range(_MOST_ROUNDS):
            if say is not None and number % _ROUNDS_BETWEEN_WORDS == 0:
                say(len(self.all) - len(self.coming) - len(self.active), len(self.all))
            came = self._admit(now_s)
            is_changed |= came > 0
            if not self.active:
                if not self.coming:
                    return self._result()
                now_s = self.coming[-1].job.arrival_s
                round_s = self._round_from(now_s)
                continue
            if now_s >= round_s:
                # A stable policy would answer the same until something changes, so that most rounds are passed over.
                if is_changed or not self.policy.is_stable or self._is_urgent or now_s >= self._urgent_s:
                    self._decide(now_s)
                round_s, is_changed = self._next_round_s(now_s), False
            elif now_s >= self._urgent_s:
                self._decide(now_s)
            elif is_changed and self._can_start():
                self._decide(now_s, is_round=False)
            elif came:
                # One more job makes the shares of others smaller, and none of them urgent.
                begin = time.process_time()
                waits_s = self._until_urgent_s(self.active[-came:], now_s)
                self._urgent_s = min(self._urgent_s, now_s + min(waits_s, default=inf))
                self.decision_s[-1] += time.process_time() - begin
            end_s = min(round_s, self._next_event_s(now_s))
            is_changed |= self._advance(now_s, end_s)
            # A job that is held no longer may be moved at the next decision.
            is_changed |= any(now_s < state.held_until_s <= end_s for state in self.active)
            now_s = end_s
        raise FailureError(
            f"{len(self.active)} jobs were not done after {_MOST_ROUNDS:,} rounds; use longer rounds"
        )

    def _round_from(self, time_s: float) -> float:
        """Start of the first round at or after a time."""
        # A moment that rounding puts just behind the start of a round belongs to that round.
        return ceil(time_s / self.round_s - 1e-9) * self.round_s

    def _admit(self, now_s: float) -> int:
        """Lets jobs in that have come; the number of them, which are the last of the active ones."""
        came = 0
        # More than ``_round_from`` takes off, or a job a moment after a round would never be let in.
        until_s = now_s + 2e-9 * self.round_s
        while self.coming and self.coming[-1].job.arrival_s <= until_s:
            state = self.coming.pop()
            self.active.append(state)
            came += 1
        if came:
            self._has_happened = True
            self.crowd.append((now_s, len(self.active)))
        return came

    def _next_round_s(self, now_s: float) -> float:
        """End of this round, or of the last one in which nothing changes."""
        next_s = now_s + self.round_s
        if self._has_happened:
            self._quiet_from_s, self._has_happened = now_s, False
        # Other policies are asked in each round.
        quiet_s, latest_s = now_s - self._quiet_from_s, inf
        if not self.policy.is_stable or self._is_urgent:
            latest_s = now_s + quiet_s * _QUIET_SHARE * (quiet_s > _QUIET_ROUNDS * self.round_s)
        if latest_s <= next_s:
            return next_s
        times = [self.coming[-1].job.arrival_s] if self.coming else []
        times += [self._urgent_s] if self._urgent_s < inf else []
        for state in self.active:
            if state.is_held(now_s) and isfinite(state.held_until_s):
                times.append(state.held_until_s)
            if state.rate > 0:
                times.append(now_s + state.pause_s + state.next_phase_samples() / state.rate)
        return max(next_s, self._round_from(min(*times, latest_s))) if times else next_s

    def _next_event_s(self, now_s: float) -> float:
        """Next moment of a decision inside a round: a job comes, ends while others wait, or has waited too long."""
        times = [self._urgent_s, *([self.coming[-1].job.arrival_s] if self.coming else [])]
        if any(state.current is None for state in self.active):
            times += [
                now_s + state.pause_s + state.left_samples / state.rate
                for state in self.active
                if state.rate > 0 and state.next_phase_samples() >= state.left_samples
            ]
        # An end that rounding puts at this very moment would never come.
        return max(min(times), now_s + 1e-9 * self.round_s, nextafter(now_s, inf))

    def _until_urgent_s(self, waiting: Sequence[RunningJob], now_s: float) -> list[float]:
        """Time until each of those that wait has waited too long for a bound on fairness [s]; none without a bound."""
        bound = self.policy.worst_fairness
        views = [s.view(self.cluster, self.policy.adapts_batch, now_s) for s in waiting if bound < inf]
        return [urgent_in_s(view, self.cluster, len(self.active), now_s, bound) for view in views]

    def _can_start(self) -> bool:
        """True if there may be room for a job that waits."""
        held = [state.current.num_workers for state in self.active if state.current is not None]
        return len(held) < len(self.active) and sum(held) < self.cluster.num_devices

    def _decide(self, now_s: float, *, is_round: bool = True) -> None:
        """Carries out what the policy wants; inside a round all jobs that run are held."""
        begin = time.process_time()
        adapts = self.policy.adapts_batch
        views = [state.view(self.cluster, adapts, now_s) for state in self.active]
        ask_together(curve for view in views for curve in view.curves.values())
        for view in () if is_round else views:
            view.is_held |= view.current is not None
        held = [view.is_held for view in views]
        given = decide(self.policy, views, self.cluster, now_s, self.round_s)
        # A job whose share stays also keeps its nodes: elsewhere it would pay a restart for nothing.
        kept = {
            name: self.by_name[name].placement
            for name, allocation in given.items()
            if self.by_name[name].current == allocation
        }
        placed = pack(self.cluster, self.jobs, given, kept)
        if not self.policy.is_raw:
            # A job that keeps its share, as another does not pay, may still come together.
            for view, is_held in zip(views, held, strict=True):
                view.is_held = is_held
            consolidate(views, self.cluster, given, placed)
        waiting = [state for state in self.active if state.job.name not in given]
        waits_s = self._until_urgent_s(waiting, now_s)
        # Nothing else happens at that moment, so that the policy would not be asked in time.
        self._urgent_s = now_s + min((wait_s for wait_s in waits_s if wait_s > 0), default=inf)
        self._is_urgent = 0.0 in waits_s
        self.decision_s.append(time.process_time() - begin)
        for state in self.active:
            self._apply(state, given.get(state.job.name), placed.get(state.job.name, ()), now_s)
        # Only the first decision is explained: it is the one to carry out now.
        if not self.first_decisions:
            pairs = zip(views, self.active, strict=True)
            self.first_decisions = tuple(self._explain(view, state) for view, state in pairs)
        if not placed and all(state.current is None for state in self.active):
            raise FailureError(
                f"policy {self.policy.name} gave nothing to any of {len(self.active)} jobs, the first of them "
                f"'{self.active[0].job.name}'; correct the policy, or what a job asks for on one node"
            )

    def _explain(self, view: JobView, state: RunningJob) -> Decision:
        given = state.current
        curve = None if given is None else view.curves.get(given.device)
        batch = None if given is None or curve is None else curve.batch_size(given.num_workers)
        reason = self.policy.reason(view, given)
        return Decision(
            job=state.job.name, allocation=given, placement=state.placement, batch_size=batch, reason=reason
        )

    def _apply(self, state: RunningJob, given: Allocation | None, placement: Placement, now_s: float) -> None:
        if given is None or not placement:
            given, placement = None, ()
        if (given, placement) != (state.current, state.placement):
            self._close_stretch(state, now_s)
            self._has_happened = True
            if given is not None:
                state.pause_s = state.actual.restart_s
                state.num_restarts += isfinite(state.start_s)
                state.start_s = min(state.start_s, now_s)
            state.current, state.placement, state.since_s = given, placement, now_s
        state.set_rate(self.cluster, self.policy.adapts_batch)

    def _close_stretch(self, state: RunningJob, end_s: float) -> None:
        if state.current is not None:
            stretch = Stretch(state.job.name, state.since_s, end_s, state.current, state.placement)
            self.stretches.append(stretch)

    def _advance(self, now_s: float, end_s: float) -> bool:
        """Lets all jobs run to the end of the round; True if one ended or entered another phase."""
        is_changed = False
        for state in self.active:
            if state.current is None:
                continue
            phase = state.phase
            self._run(state, now_s, end_s)
            is_changed |= state.has_phases and state.phase != phase
        ended = [state for state in self.active if isfinite(state.end_s)]
        for state in sorted(ended, key=lambda s: (s.end_s, s.order)):
            self._close_stretch(state, state.end_s)
        if ended:
            self._has_happened = True
            self.active = [state for state in self.active if not isfinite(state.end_s)]
            self.crowd.append((end_s, len(self.active)))
        return is_changed or bool(ended)

    def _run(self, state: RunningJob, now_s: float, end_s: float) -> None:
        """One job until the end of the round or its own; its rate changes where a phase ends."""
        time_s = now_s
        while time_s < end_s:
            pause_s = min(state.pause_s, end_s - time_s)
            state.pause_s -= pause_s
            time_s += pause_s
            rate = state.rate
            if rate <= 0 or time_s >= end_s:
                break
            # The rate holds for one phase: the worth of a batch changes with the progress of the job.
            samples, total = state.next_phase_samples(), state.actual.work_samples
            until_s = time_s + samples / rate
            # A phase too short for the clock still ends, or the loop would not.
            if until_s > time_s:
                until_s = min(end_s, until_s)
                samples = rate * (until_s - time_s)
            done, time_s = state.done_samples + samples, until_s
            # A job may fall short of its work by rounding alone, and would never end.
            if done >= total * (1 - 1e-9):
                state.done_samples, state.end_s = total, time_s
                break
            state.done_samples = done
            state.set_rate(self.cluster, self.policy.adapts_batch)
        spent_s = min(end_s, state.end_s) - now_s
        assert state.current is not None
        state.attained_device_s += spent_s * state.current.num_workers

    def _result(self) -> SimulatedSchedule:
        outcomes = tuple(
            JobOutcome(
                job=state.job.name,
                arrival_s=state.job.arrival_s,
                start_s=state.start_s,
                end_s=state.end_s,
                device_s=state.attained_device_s,
                num_restarts=state.num_restarts,
                fair_share_s=self._fair_share_s(state),
                deadline_s=state.job.deadline_s,
            )
            for state in self.all
        )
        return SimulatedSchedule(
            policy=self.policy.name,
            outcomes=outcomes,
            stretches=tuple(self.stretches),
            first_decisions=self.first_decisions,
            metrics=schedule_metrics(outcomes, self.cluster.num_devices, self.decision_s),
        )

    def _fair_share_s(self, state: RunningJob) -> float:
        """Completion with its own 1/n of the cluster, n the jobs that were there on average during its life [s]."""
        training = state.actual.training
        share = max(1.0, self._average_crowd(state.job.arrival_s, state.end_s))
        believed = state.curves(self.cluster, self.policy.adapts_batch, 0.0)
        rates = []
        for group in self.cluster.groups:
            if group.device in believed:
                curve = believed[group.device]
                n = max(curve.best_within(max(1, int(group.num_devices / share))), curve.fewest)
                if not n:
                    continue
                batch, nodes = curve.batch_size(n) or training.batch_size, ceil(n / group.devices_per_node)
                # The middle of the job stands for the whole of it.
                worth = 1.0 if training.efficiency is None else training.efficiency(batch, 0.5)
                rates.append(training.speeds[group.device](n, nodes, batch) * worth)
        best = max(rates, default=0.0)
        return state.actual.work_samples / best if best > 0 else nan

    def _average_crowd(self, start_s: float, end_s: float) -> float:
        """Mean number of active jobs between two times."""
        times = np.asarray([time_s for time_s, _ in self.crowd])
        counts = np.asarray([count for _, count in self.crowd], dtype=float)
        first = max(0, int(np.searchsorted(times, start_s, side="right")) - 1)
        last = max(first + 1, int(np.searchsorted(times, end_s, side="left")))
        # Changes at one moment leave stretches of no length, which must not make all weights zero.
        edges = np.asarray([start_s, *times[first + 1 : last], max(end_s, start_s + 1e-9)])
        return float(np.average(counts[first:last], weights=np.maximum(np.diff(edges), 1e-12)))
