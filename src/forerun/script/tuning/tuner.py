"""The loop of a study: profile the script as it is, guess, try, judge, until the budget is used."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forerun.base.errors import ScriptError, UsageError, near_matches
from forerun.script.command_words import command_arguments
from forerun.script.profiling.profile import Profile
from forerun.script.tuning.comparison import num_reserved_runs
from forerun.script.tuning.configuration import configure
from forerun.script.tuning.knobs import KNOBS
from forerun.script.tuning.laws import (
    DeviceSteps,
    MemoryPoint,
    expected_rate,
    first_guesses,
    predicted_memory_bytes,
)
from forerun.script.tuning.options import Budget, Objective, time_left_s, value_of
from forerun.script.tuning.space import (
    Metric,
    Space,
    configuration_key,
    num_configurations,
    untried_neighbour,
)
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialOrder, TrialResult, run_trial

__all__ = ["Task", "TrialPruner", "TrialRunner", "Tuner", "base_values", "check_arguments"]

TrialRunner = Callable[..., TrialResult]

_MOST_REJECTED_IN_A_ROW = 200
_LATEST_CRASHES = 5
_LEAST_TIMEOUT_S = 1.0
_LATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A tuning task.

    Attributes:
        space: Parameters that may be changed.
        order: Settings with which trials run.
        objectives: Objectives of the search.
        budget: Limits of time, trials and cost.
        price_usd_per_hour: Price of the machine [USD/h].
        memory_limit_bytes: Largest memory of a trial; None rejects no trial [bytes].
        with_memory_law: True rejects trials that would not fit before they start.
        with_priors: True takes the first trials from the cost model.
        reserved_s: Time of the budget kept for whole runs that guard the metric [s].
        with_pruning: True ends trials whose forecast cannot win.
        num_rounds: Number of values of the metric that a whole run prints, for pruning.
        num_sessions: Number of processes that search at once, for the estimate of the time left.
    """

    space: Space
    order: TrialOrder
    objectives: tuple[Objective, ...]
    budget: Budget
    price_usd_per_hour: float | None = None
    memory_limit_bytes: float | None = None
    with_memory_law: bool = True
    with_priors: bool = True
    reserved_s: float = 0.0
    with_pruning: bool = False
    num_rounds: int | None = None
    num_sessions: int = 1


@dataclass(slots=True)
class Tuner:
    """Runs a study.

    Attributes:
        task: Task to tune.
        store: Store of the trials.
        base: The script's own values by parameter.
        optimizer: Name of the script's optimizer.
        say: Receives a line about each trial.
        run: Runs a configuration; ``run_trial``, or its remote form.
        began_s: Start of the session, from which its budget counts, monotonic clock [s].
        num_repeats: Number of runs of this session that repeated a configuration.
        spent_s: Time of the budget that went to no trial in earlier sessions: the profile and the repeats [s].
    """

    task: Task
    store: TrialStore
    base: Mapping[str, Any]
    optimizer: str | None
    say: Callable[[str], None]
    run: TrialRunner = run_trial
    began_s: float = field(default_factory=time.monotonic)
    spent_s: float = 0.0
    num_repeats: int = 0
    num_rejected: int = 0
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
        if profile is None or not self.task.with_priors:
            return
        guesses = first_guesses(self.task.space, profile, self.base, steps)
        for guess in guesses:
            source = "cost model" if steps is None else "plan"
            self.store.enqueue({**self._filled(own), **guess}, source)
        if steps is not None and guesses:
            best, now = (expected_rate(profile, values, self.base, steps) for values in (guesses[0], {}))
            self.say(
                f"first trials by the predicted steps of {steps.source}: the best is expected to be "
                f"{best / now:.2g} times as fast as the script"
            )

    def search(self) -> str:
        """Tries configurations until the budget is used; returns the reason to end."""
        while True:
            self.store.claim_lost_trials()
            if reason := self._spent():
                return reason
            if reason := self._try_one():
                return reason

    def _try_one(self) -> str:
        """Runs the next configuration that is new and fits; returns the reason if there is none."""
        for _ in range(_MOST_REJECTED_IN_A_ROW):
            trial = self.store.ask()
            values = suggest(trial, self.task.space)
            if configuration_key(values) in (tried := self._tried()):
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
            if expected is not None and limit is not None and self.task.with_memory_law and expected > limit:
                self._reject(trial, values, expected, limit)
            elif self._is_beyond_the_budget(trial):
                # Sessions ask at the same time; the later of two that took the last place gives it back.
                self.store.drop(trial)
                return ""
            else:
                self._run(trial, values, expected)
                return ""
        return "the space: nothing is left that would fit in memory"

    def _tried(self) -> set[str]:
        """Configurations that ran: another run of one is worth less than a run of a new one."""
        return {configuration_key(trial.user_attrs["record"]["values"]) for trial in self.run_trials()}

    def _run(self, trial: Any, values: dict[str, Any], expected_bytes: float | None) -> None:
        configuration = configure(self.task.space, values, self.base, self.optimizer)
        num_rounds = self._num_rounds(values)
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
        is_usable = result.outcome in ("done", "timeout") or (result.outcome == "pruned")
        metric = self.metric(result)
        found = [
            value_of(objective, result, metric, self.task.price_usd_per_hour) if is_usable else None
            for objective in self.task.objectives
        ]
        is_feasible = all(value is not None for value in found)
        record = {
            "values": values,
            "result": result.as_dict(),
            "is_feasible": is_feasible,
            "expected_memory_bytes": expected_bytes,
            "source": trial.user_attrs.get("source", "sampler"),
        }
        if result.outcome == "pruned":
            self.store.prune(trial, record)
        else:
            self.store.tell(trial, found, record)
        self.say(self._line(trial.number, values, result, found))
        self._stop_if_all_crash()
        self._stop_without_metric(result)

    def _reject(self, trial: Any, values: dict[str, Any], expected: float, limit: float) -> None:
        """Reports a configuration to the sampler as a violated constraint with the excess; costs no time."""
        self.num_rejected += 1
        record = {
            "values": values,
            "result": TrialResult(outcome="rejected", reason="it would not fit in memory").as_dict(),
            "is_feasible": False,
            "expected_memory_bytes": expected,
            "violation": expected / limit - 1,
            "source": trial.user_attrs.get("source", "sampler"),
        }
        self.store.tell(trial, [None] * len(self.task.objectives), record)

    def metric(self, result: TrialResult) -> Metric | None:
        """The study's metric, or the metric found in the script's output."""
        if self.task.order.metric is not None or result.metric is None:
            return self.task.order.metric
        return Metric.named(result.metric)

    def _num_rounds(self, values: Mapping[str, Any]) -> int | None:
        """Number of metric values that a whole run with these parameters prints."""
        if not self.task.with_pruning or self.task.num_rounds is None:
            return None
        return int(values.get("epochs", self.task.num_rounds))

    def _pruner(self, trial: Any, num_rounds: int | None) -> TrialPruner | None:
        if num_rounds is None or num_rounds < 2:
            return None
        metric = self.task.order.metric
        is_rising = metric is None or metric.is_rising
        return TrialPruner(self.store.study, trial, num_rounds, is_rising=is_rising)

    def _expected_memory(self, values: Mapping[str, Any]) -> float | None:
        points = []
        for trial in self.store.trials():
            record = trial.user_attrs["record"]
            result = record["result"]
            if result["num_steps"] and result["peak_memory_bytes"]:
                points.append(
                    MemoryPoint(
                        values=record["values"],
                        start_bytes=result["start_memory_bytes"],
                        peak_bytes=result["peak_memory_bytes"],
                    )
                )
        return predicted_memory_bytes(points, values, self.base)

    def run_trials(self) -> list[Any]:
        """Trials that ran, without the rejected ones."""
        return [t for t in self.store.trials() if t.user_attrs["record"]["result"]["outcome"] != "rejected"]

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
        seconds = self.task.budget.seconds(self.task.price_usd_per_hour)
        return None if seconds is None else seconds - self._used_s()

    def usual_run_s(self) -> float:
        """Mean time of the trials so far [s]; 0 before the first."""
        times = [trial.user_attrs["record"]["result"]["wall_s"] for trial in self.run_trials()]
        return sum(times) / len(times) if times else 0.0

    def _spent(self) -> str:
        """The part of the budget that is used up, less what is kept back for repeating the winner; empty if none is."""
        limit = self.task.budget.num_trials
        is_repeated = len(self.task.objectives) == 1
        if limit is not None:
            kept = num_reserved_runs(limit) if is_repeated else 0
            if len(self.run_trials()) + self.store.num_running_elsewhere() >= limit - kept:
                return f"{limit} trials"
        seconds, usual_s = self.task.budget.seconds(self.task.price_usd_per_hour), self.usual_run_s()
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
            trial.user_attrs["record"]["result"]["wall_s"]
            for trial in self.run_trials()
            if trial.user_attrs.get("ended", 0.0) < self._began_at
        )
        return time.monotonic() - self.began_s + self.spent_s + float(earlier_s)

    def _line(self, number: int, values: Mapping[str, Any], result: TrialResult, found: list[Any]) -> str:
        runs = self.run_trials()
        durations = [t.user_attrs["record"]["result"]["wall_s"] for t in runs]
        limit, seconds = self.task.budget.num_trials, self.task.budget.seconds(self.task.price_usd_per_hour)
        left_s = time_left_s(
            durations,
            num_left=None if limit is None else limit - len(runs),
            budget_left_s=None if seconds is None else seconds - self._used_s(),
            num_workers=self.task.num_sessions,
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
        found = {}
        for parameter in self.task.space.parameters:
            if parameter.scale_with is not None:
                continue
            own = self.base.get(parameter.name)
            if not parameter.holds(own):
                return None
            found[parameter.name] = own
        return found

    def _filled(self, own: Mapping[str, Any] | None) -> dict[str, Any]:
        """A guess completed by a value for each parameter with a range."""
        filled = dict(own or {})
        for parameter in self.task.space.parameters:
            if parameter.scale_with is None and parameter.name not in filled:
                own_value = self.base.get(parameter.name)
                if parameter.holds(own_value):
                    filled[parameter.name] = own_value
                elif parameter.values:
                    filled[parameter.name] = parameter.values[0]
                else:
                    middle = (
                        (parameter.low * parameter.high) ** 0.5
                        if parameter.is_log
                        else 0.5 * (parameter.low + parameter.high)
                    )
                    filled[parameter.name] = round(middle) if parameter.is_whole else middle
        return filled

    def _stop_if_all_crash(self) -> None:
        latest = [t.user_attrs["record"]["result"] for t in self.run_trials()[-_LATEST_CRASHES:]]
        if len(latest) == _LATEST_CRASHES and all(result["outcome"] == "crashed" for result in latest):
            raise ScriptError(
                f"the last {_LATEST_CRASHES} trials crashed; the last one: {latest[-1]['reason']}"
            )

    def _stop_without_metric(self, result: TrialResult) -> None:
        """Raise an error for a script that never prints its metric, before it uses up the budget."""
        is_needed = any(objective.needs_metric for objective in self.task.objectives)
        seen = any(trial.user_attrs["record"]["result"]["curve"] for trial in self.run_trials())
        if is_needed and result.outcome == "done" and not seen:
            raise ScriptError(result.reason)


class TrialPruner:
    """Judges a trial by each value it prints: a trial ends when its forecast cannot win.

    A trial that runs again because its node died prints its values again. A value with a number seen before changes
    nothing: the known values stay, and the trial is judged again when a later value comes.

    Args:
        study: Optuna's study, whose finished trials are to be beaten.
        trial: Running trial of that study.
        num_rounds: Number of values that a whole run prints, two or more.
        is_rising: True if a larger value is better.
    """

    def __init__(self, study: Any, trial: Any, num_rounds: int, *, is_rising: bool) -> None:
        # Only a process with a study loads Optuna; nodes of a cluster may lack it.
        from forerun.script.callbacks import ForecastPruner

        self._study, self._trial, self._num_rounds = study, trial, num_rounds
        # As in the objective, the sign of a falling metric is turned.
        self._sign = 1.0 if is_rising else -1.0
        self._pruner = ForecastPruner(num_rounds)
        self._num_told = 0
        self._is_lost = False

    def __call__(self, number: int, value: float) -> bool:
        """Takes a value and its number, counted from one; True if the trial should end."""
        if number > self._num_told:
            self._num_told = number
            self._trial.report(self._sign * value, number)
            # Nothing is left to save by ending a trial that printed its last value.
            if number < self._num_rounds:
                frozen = self._study.get_trials(deepcopy=False)[self._trial.number]
                self._is_lost = bool(self._pruner.prune(self._study, frozen))
        return self._is_lost


def base_values(
    space: Space, profile: Profile | None, options: tuple[dict[str, Any], ...], command: Sequence[str] = ()
) -> dict[str, Any]:
    """The script's own value of each parameter: from the space, its arguments, its loader, or the knob's usual one.

    Arguments are those that argparse has seen, and, for scripts that read them otherwise, those in the command.
    """
    by_flag = {each.flag.removesuffix("="): _plain(each.value) for each in command_arguments(command)}
    by_flag.update({flag: option["value"] for option in options for flag in option["flags"]})
    usual = {name: knob.usual for name, knob in KNOBS.items()}
    if profile is not None:
        usual |= {
            name: value for name, value in profile.loader.items() if name in KNOBS and value is not None
        }
        usual["batch_size"] = profile.loader.get("batch_size") or _whole(profile)
        usual |= {name: profile.optimizer.get(name) for name in ("num_threads", "lr")}
    found = {}
    for parameter in space.parameters:
        value = parameter.default
        if value is None and parameter.flag is not None:
            value = by_flag.get(parameter.flag.removesuffix("="))
        if value is None:
            value = usual.get(parameter.name)
        if value is not None:
            found[parameter.name] = value
    return found


def _whole(profile: Profile) -> int | None:
    """Samples of a batch of a loader that has a batch sampler instead of a batch size."""
    samples = profile.samples_per_batch if profile.loader else None
    return round(samples) if samples else None


def _plain(word: Any) -> Any:
    """The value that a word of a command means: a number, true or false, or the word."""
    import yaml

    try:
        found = yaml.safe_load(word) if isinstance(word, str) else word
        return float(found) if isinstance(found, str) else found
    except (yaml.YAMLError, ValueError):
        return word


def check_arguments(space: Space, options: tuple[dict[str, Any], ...]) -> None:
    """Refuse arguments that the script's parser does not know, if forerun saw the parser.

    Raises:
        UsageError: The script's parser knows other arguments, but not this one.
    """
    known = [flag for option in options for flag in option["flags"]]
    for parameter in space.parameters:
        # Scripts that take key=value read them without argparse.
        if parameter.flag is None or not parameter.flag.startswith("-"):
            continue
        if known and parameter.flag.removesuffix("=") not in known:
            raise UsageError(
                f"the script has no argument '{parameter.flag}' (map of '{parameter.name}'); it has {', '.join(known)}"
                f"{near_matches(parameter.flag, known)}"
            )
