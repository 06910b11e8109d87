"""The loop of a study: guess, try, judge, until the budget is used.

Several sessions may share a study, each a process with its own device or its own node of a cluster.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, ScriptError
from forerun.base.extras import plugin
from forerun.base.process_control import die_with_parent
from forerun.script.profiling.profile import Profile
from forerun.script.tuning.acceptance import num_reserved_runs
from forerun.script.tuning.configuration import ScriptConfiguration, configure
from forerun.script.tuning.laws import (
    DeviceSteps,
    MemoryPoint,
    expected_rate,
    first_guesses,
    predicted_memory_bytes,
)
from forerun.script.tuning.options import Budget, Objective, TuneSettings, time_left_s, value_of
from forerun.script.tuning.space import (
    Metric,
    Space,
    configuration_key,
    num_configurations,
    untried_neighbour,
)
from forerun.script.tuning.study import TrialStore, result_of, suggest, values_of
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial

if TYPE_CHECKING:
    from forerun.script.callbacks.pruner import TrialPruner

TrialRunner = Callable[..., TrialResult]

_MOST_REJECTED_IN_A_ROW = 200
"""The sampler learns of each; where so many in a row do not fit, hardly anything does."""
_LATEST_CRASHES = 5
_LEAST_TIMEOUT_S = 1.0
_LATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A study to make, in plain values so that it can be sent to the processes that search together.

    Attributes:
        space: Parameters that may be changed.
        order: Settings with which trials run.
        objectives: Objectives of the search.
        budget: Limits of time, trials and cost.
        settings: Settings of the search as the user gave them.
        base: The script's own values by parameter.
        optimizer: Name of the script's optimizer.
        identity: Values that must be equal for sessions to share the study.
        memory_limit_bytes: Largest memory of a trial; None rejects no trial [bytes].
        reserved_s: Time of the budget kept for whole runs that guard the metric [s].
        num_rounds: Number of values of the metric that a whole run prints, for pruning.
        spent_s: Time of the budget that went to no trial before: the profile, and the repeats of earlier sessions [s].
    """

    space: Space
    order: TrialOrder
    objectives: tuple[Objective, ...]
    budget: Budget
    settings: TuneSettings = field(default_factory=TuneSettings)
    base: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    memory_limit_bytes: float | None = None
    reserved_s: float = 0.0
    num_rounds: int | None = None
    spent_s: float = 0.0

    @property
    def budget_s(self) -> float | None:
        """Limit of time [s]; None without one."""
        return self.budget.seconds(self.settings.price_usd_per_hour)

    @property
    def is_single(self) -> bool:
        """True for one objective: there is a winner, which can be repeated, and no front."""
        return len(self.objectives) == 1

    def for_session(self, index: int, device_index: str) -> Task:
        """The task for a further session, with its own device and the next seed."""
        seed = None if self.settings.seed is None else self.settings.seed + index
        return replace(
            self,
            order=replace(self.order, device_index=device_index),
            settings=replace(self.settings, seed=seed),
        )

    def configuration(self, values: Mapping[str, Any]) -> ScriptConfiguration:
        """The command's arguments and the hooks that realise values."""
        return configure(self.space, values, self.base, self.optimizer)

    @contextlib.contextmanager
    def tuner(
        self, store: TrialStore, say: Callable[[str], None], echo: IO[str] | None = None
    ) -> Iterator[Tuner]:
        """A session of the study, with its connection to the cluster."""
        address = self.settings.ray_address
        with (
            contextlib.nullcontext(run_trial)
            if address is None
            else plugin("forerun.clusters", "ray").trial_runner(address) as run
        ):
            yield Tuner(task=self, store=store, say=say, run=run, echo=echo)


@dataclass(slots=True)
class Tuner:
    """Runs a study.

    Attributes:
        task: Task to tune.
        store: Store of the trials.
        say: Receives a line about each trial.
        run: Runs a configuration; ``run_trial``, or its remote form.
        echo: Stream for the script's output in whole runs and repeats; None for no copy.
        began_s: Start of the session, from which its budget counts, monotonic clock [s].
        num_repeats: Number of runs of this session that repeated a configuration.
    """

    task: Task
    store: TrialStore
    say: Callable[[str], None]
    run: TrialRunner = run_trial
    echo: IO[str] | None = None
    began_s: float = field(default_factory=time.monotonic)
    num_repeats: int = 0
    _began_at: float = field(default_factory=time.time)

    def seed(self, profile: Profile | None, steps: DeviceSteps | None = None) -> None:
        """Queues the script as it is, then configurations that the cost model expects to be fast.

        Args:
            profile: Profile of the script as it is; None for no guesses.
            steps: Predicted steps of the script's model on the device; None to use the profile alone.
        """
        own = self._own_values()
        if own is not None:
            self.store.enqueue(own, "script")
        if profile is None or not self.task.settings.with_priors:
            return
        guesses = first_guesses(self.task.space, profile, self.task.base, steps)
        # A guess says nothing of the parameters with a range.
        starts = {p.name: p.start(self.task.base.get(p.name)) for p in self.task.space.drawn}
        for guess in guesses:
            self.store.enqueue({**starts, **(own or {}), **guess}, "cost model" if steps is None else "plan")
        if steps is not None and guesses:
            best, now = (expected_rate(profile, values, self.task.base, steps) for values in (guesses[0], {}))
            self.say(
                f"first trials by the predicted steps of {steps.source}: the best is expected to be "
                f"{best / now:.2g} times as fast as the script"
            )

    def search(self) -> str:
        """Tries configurations until the budget is used; returns the reason to end."""
        while True:
            self.store.claim_lost_trials()
            if reason := self._spent() or self._try_one():
                return reason

    def _try_one(self) -> str:
        """Runs the next configuration that is new and fits; returns the reason if there is none."""
        for _ in range(_MOST_REJECTED_IN_A_ROW):
            trial = self.store.ask()
            values = suggest(trial, self.task.space)
            # Another run of a configuration is worth less than a run of a new one.
            tried = {configuration_key(values_of(one)) for one in self.run_trials()}
            if configuration_key(values) in tried:
                # Samplers repeat themselves in small spaces: what lies nearest is worth more than another run.
                other = untried_neighbour(self.task.space, values, tried, seed=trial.number)
                if other is not None:
                    self.store.replace(trial, other, "neighbour")
                    continue
                if num_configurations(self.task.space) is not None:
                    self.store.fail(trial)
                    return "the space: every configuration has been tried"
            expected = self._expected_memory(values)
            limit = self.task.memory_limit_bytes
            if (
                expected is not None
                and limit is not None
                and self.task.settings.with_memory_law
                and expected > limit
            ):
                # The sampler learns of a violated constraint with its excess; that costs no time.
                rejected = TrialResult(outcome="rejected", reason="it would not fit in memory")
                lost = [None] * len(self.task.objectives)
                self._tell(trial, values, rejected, expected, lost, violation=expected / limit - 1)
            elif self._is_beyond_the_budget(trial):
                # Sessions ask at the same time; the later of two that took the last place gives it back.
                self.store.drop(trial)
                return ""
            else:
                self._run(trial, values, expected)
                return ""
        return "the space: nothing is left that would fit in memory"

    def _run(self, trial: Any, values: dict[str, Any], expected_bytes: float | None) -> None:
        configuration = self.task.configuration(values)
        num_rounds = self.task.num_rounds if self.task.settings.with_pruning else None
        if num_rounds is not None:  # values of the metric that a whole run with these parameters prints
            num_rounds = int(values.get("epochs", num_rounds))
        # A trial that is left open would count as running for all other sessions.
        try:
            result = self.run(
                self.order, configuration, on_value=self._pruner(trial, num_rounds), say=self.say
            )
        except BaseException:
            self.store.drop(trial)
            raise
        if result.outcome == "interrupted":
            self.store.drop(trial)
            raise KeyboardInterrupt
        if result.outcome == "pruned" and num_rounds and len(result.curve) >= num_rounds:
            # The trial had printed its last value before an earlier one was judged.
            result = replace(result, outcome="done", reason="")
        self._judge(trial, values, result, expected_bytes)

    def _judge(
        self, trial: Any, values: dict[str, Any], result: TrialResult, expected_bytes: float | None
    ) -> None:
        is_usable = result.outcome in ("done", "timeout", "pruned")
        metric = self.metric(result)
        found = [
            value_of(objective, result, metric, self.task.settings.price_usd_per_hour) if is_usable else None
            for objective in self.task.objectives
        ]
        self._tell(trial, values, result, expected_bytes, found)
        self.say(self._line(trial.number, values, result, found))
        self._stop_in_vain(result)

    def _tell(
        self,
        trial: Any,
        values: dict[str, Any],
        result: TrialResult,
        expected_bytes: float | None,
        found: list[Any],
        **more: Any,
    ) -> None:
        """Writes a trial with its objectives; one that it did not reach is None."""
        record = {
            "values": values,
            "result": result.as_dict(),
            "is_feasible": all(value is not None for value in found),
            "expected_memory_bytes": expected_bytes,
            "source": trial.user_attrs.get("source", "sampler"),
            **more,
        }
        if result.outcome == "pruned":
            self.store.prune(trial, record)
        else:
            self.store.tell(trial, found, record)

    def metric(self, result: TrialResult) -> Metric | None:
        """The study's metric, or the metric found in the script's output."""
        if self.task.order.metric is not None or result.metric is None:
            return self.task.order.metric
        return Metric.named(result.metric)

    def _pruner(self, trial: Any, num_rounds: int | None) -> TrialPruner | None:
        if num_rounds is None or num_rounds < 2:
            return None
        metric = self.task.order.metric
        is_rising = metric is None or metric.is_rising
        # Only a process with a study loads Optuna; nodes of a cluster may lack it.
        from forerun.script.callbacks.pruner import TrialPruner

        return TrialPruner(self.store.study, trial, num_rounds, is_rising=is_rising)

    def _expected_memory(self, values: Mapping[str, Any]) -> float | None:
        points = [
            MemoryPoint(
                values=values_of(trial),
                start_bytes=result["start_memory_bytes"],
                peak_bytes=result["peak_memory_bytes"],
            )
            for trial in self.store.trials()
            if (result := result_of(trial))["num_steps"] and result["peak_memory_bytes"]
        ]
        return predicted_memory_bytes(points, values, self.task.base)

    def run_trials(self) -> list[Any]:
        """Trials that ran, without the rejected ones."""
        return [t for t in self.store.trials() if result_of(t)["outcome"] != "rejected"]

    @property
    def order(self) -> TrialOrder:
        """The order of the next run, which ends with the budget at the latest."""
        left_s = self.left_s
        if left_s is None:
            return self.task.order
        # Runs were planned by their mean time: the last one may take a little longer.
        late_s = left_s + _LATE * (left_s + self._used_s())
        timeout_s = min(self.task.order.timeout_s, max(_LEAST_TIMEOUT_S, late_s))
        return replace(self.task.order, timeout_s=timeout_s)

    @property
    def left_s(self) -> float | None:
        """Time of the budget that is left [s]; None without a limit of time."""
        seconds = self.task.budget_s
        return None if seconds is None else seconds - self._used_s()

    def usual_run_s(self) -> float:
        """Mean time of the trials so far [s]; 0 before the first."""
        times = [result_of(trial)["wall_s"] for trial in self.run_trials()]
        return sum(times) / len(times) if times else 0.0

    def _spent(self) -> str:
        """The part of the budget that is used up, less what is kept back for repeating the winner; empty if none is."""
        limit = self.task.budget.num_trials
        is_repeated = self.task.is_single
        if limit is not None:
            kept = num_reserved_runs(limit) if is_repeated else 0
            if len(self.run_trials()) + self.store.num_running_elsewhere() >= limit - kept:
                return f"{limit} trials"
        seconds, usual_s = self.task.budget_s, self.usual_run_s()
        if seconds is None:
            return ""
        used_s = self._used_s()
        if not usual_s:
            return "" if used_s < seconds else f"{seconds:.0f} s"
        kept_s = self.task.reserved_s
        if is_repeated:
            kept_s += usual_s * num_reserved_runs((seconds - self.task.reserved_s) / usual_s)
        # A run that begins now should end in time: half of it late, half early.
        return "" if used_s + 0.5 * usual_s < seconds - kept_s else f"{seconds:.0f} s"

    def num_repeats_left(self) -> int:
        """Runs that the budget has left for repeating the winner."""
        counts = []
        if (limit := self.task.budget.num_trials) is not None:
            counts.append(min(limit - len(self.run_trials()), num_reserved_runs(limit)) - self.num_repeats)
        if (left_s := self.left_s) is not None:
            counts.append(int(left_s / max(1.1 * self.usual_run_s(), 1e-3)))
        return max(0, min(counts, default=0))

    def _is_beyond_the_budget(self, trial: Any) -> bool:
        """True if other sessions have taken the last trials since this session looked."""
        limit = self.task.budget.num_trials
        num_earlier = self.store.num_running_elsewhere(before=trial.number)
        return limit is not None and len(self.run_trials()) + num_earlier >= limit

    def _used_s(self) -> float:
        """Time of this session, and what earlier sessions used [s]."""
        earlier_s = sum(
            result_of(trial)["wall_s"]
            for trial in self.run_trials()
            if trial.user_attrs.get("ended", 0.0) < self._began_at
        )
        return time.monotonic() - self.began_s + self.task.spent_s + float(earlier_s)

    def _line(self, number: int, values: Mapping[str, Any], result: TrialResult, found: list[Any]) -> str:
        runs = self.run_trials()
        durations = [result_of(t)["wall_s"] for t in runs]
        limit, seconds = self.task.budget.num_trials, self.task.budget_s
        left_s = time_left_s(
            durations,
            num_left=None if limit is None else limit - len(runs),
            budget_left_s=None if seconds is None else seconds - self._used_s(),
            num_workers=self.task.settings.num_sessions,
        )
        worth = ", ".join(
            f"{o.name} {'-' if v is None else format(v, '.4g')} {o.unit}".rstrip()
            for o, v in zip(self.task.objectives, found, strict=True)
        )
        what = ", ".join(f"{name}={value}" for name, value in values.items())
        eta = "" if left_s is None else f"; about {left_s:.0f} s left"
        reason = f" ({result.reason})" if result.outcome in ("crashed", "out of memory") else ""
        return f"trial {number} [{what}]: {result.outcome}{reason}, {worth}{eta}"

    def _own_values(self) -> dict[str, Any] | None:
        """Values of the script as it is, if all of them are inside the space."""
        drawn, base = self.task.space.drawn, self.task.base
        is_inside = all(parameter.holds(base.get(parameter.name)) for parameter in drawn)
        return {parameter.name: base[parameter.name] for parameter in drawn} if is_inside else None

    def _stop_in_vain(self, result: TrialResult) -> None:
        """Raise an error where the latest trials crashed, or the script never prints its metric."""
        latest = [result_of(t) for t in self.run_trials()[-_LATEST_CRASHES:]]
        if len(latest) == _LATEST_CRASHES and all(result["outcome"] == "crashed" for result in latest):
            raise ScriptError(
                f"the last {_LATEST_CRASHES} trials crashed; the last one: {latest[-1]['reason']}"
            )

        is_needed = any(objective.needs_metric for objective in self.task.objectives)
        seen = any(result_of(trial)["curve"] for trial in self.run_trials())
        if is_needed and result.outcome == "done" and not seen:
            raise ScriptError(result.reason)


def search_together(tuner: Tuner, devices: Sequence[str]) -> str:
    """Searches here and in a process for each further device, until the budget is used; returns the reason to end.

    Args:
        tuner: Session of this process.
        devices: Device of each session, that of this process first.
    """
    # Do not fork: this process has threads of the storage and of the samplers.
    context = multiprocessing.get_context("spawn")
    others = [
        context.Process(target=_work, args=(tuner.task.for_session(index, device), os.getpid()))
        for index, device in enumerate(devices[1:], start=1)
    ]
    try:
        for process in others:
            process.start()
        reason = tuner.search()
        for process in others:
            process.join()
    finally:
        for process in others:
            if process.is_alive():
                process.terminate()
                process.join()
    failed = sum(process.exitcode != 0 for process in others)
    return f"{reason}; {failed} of {len(devices)} sessions failed" if failed else reason


def _work(task: Task, parent_pid: int) -> None:
    die_with_parent(parent_pid)
    settings = task.settings
    store = TrialStore(
        settings.study, task.objectives, task.identity, sampler=settings.sampler, seed=settings.seed
    )
    try:
        with task.tuner(store, _tell) as tuner:
            tuner.search()
    except (ForerunError, KeyboardInterrupt) as error:
        _tell(f"a session ended: {error or 'interrupted'}")
        sys.exit(1)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
