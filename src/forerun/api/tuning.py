"""Tunes a training command within a budget, compares two configurations, runs with one."""

from __future__ import annotations

import math
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from forerun.api.profiling import device_index as first_device
from forerun.api.profiling import profile
from forerun.errors import FailureError, ScriptError, UsageError
from forerun.hardware import describe_host
from forerun.profiling.files import write_json
from forerun.profiling.hooks.settings import HookSettings
from forerun.profiling.launch import Launch, check_command, launch
from forerun.profiling.profile import Profile
from forerun.profiling.recorded import read_processes
from forerun.tuning.budget import parse_budget
from forerun.tuning.comparison import non_inferiority, paired_ratio
from forerun.tuning.configuration import Configuration, configure, read_configuration, write_configuration
from forerun.tuning.objectives import parse_objectives
from forerun.tuning.space import Metric, Space, default_space, read_space
from forerun.tuning.study import TrialStore
from forerun.tuning.trial import TrialOrder, TrialResult, run_trial, say_nothing
from forerun.tuning.tuner import Task, TrialRunner, Tuner, base_values, check_arguments

__all__ = ["Comparison", "TuneResult", "apply", "compare", "tune"]

_PROFILE_STEPS = 40
_MOST_CHECKED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult:
    """What a study found.

    Attributes:
        folder: Of the study.
        objectives: What was looked for.
        ended_by: What of the budget was used up.
        best: Configuration of the best trial that keeps the accuracy; None if there is none.
        best_values: Its values by parameter.
        best_objectives: What it reached.
        command: The exact command of the best.
        trials: Every trial: ``number``, ``values``, ``outcome``, ``objectives``, ``source``.
        front: Numbers of the trials that no other beats in all objectives.
        num_rejected: Trials the memory model rejected before they started.
        num_out_of_memory: Trials that ran out of memory all the same.
        checked: Whole runs of the script as it is and of the best: ``baseline``, ``best`` and ``accuracy``.
        profile: Of the script as it is.
        is_resumed: Whether the study had trials before.
        notes: What is not known.
    """

    folder: Path
    objectives: tuple[str, ...]
    ended_by: str
    best: Configuration | None
    best_values: dict[str, Any]
    best_objectives: tuple[float, ...]
    command: str
    trials: tuple[dict[str, Any], ...]
    front: tuple[int, ...]
    num_rejected: int
    num_out_of_memory: int
    checked: dict[str, Any] | None
    profile: Profile | None
    is_resumed: bool
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Every field as types that JSON has."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        plain["folder"] = str(self.folder)
        plain["best"] = None if self.best is None else asdict(self.best)
        plain["profile"] = None if self.profile is None else self.profile.as_dict()
        return plain


def tune(
    command: Sequence[str],
    *,
    budget: str,
    space: Space | Path | None = None,
    objective: str = "speed",
    study: Path = Path("forerun-study"),
    metric: str | None = None,
    target: float | None = None,
    trial_s: float = 8.0,
    timeout_s: float = 1800.0,
    memory_limit_bytes: float | None = None,
    with_memory_law: bool = True,
    with_priors: bool = True,
    with_pruning: bool = False,
    max_accuracy_loss: float = 0.01,
    check: bool = True,
    sampler: str = "tpe",
    seed: int | None = None,
    price_usd_per_hour: float | None = None,
    device_index: str | None = None,
    runner: TrialRunner | None = None,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
) -> TuneResult:
    """Searches for a better configuration of a training command, which is never edited.

    The command is profiled as it is, then tried in configurations that its arguments and the hooks can realise, each
    in processes of its own. Trials that would not fit in memory are rejected before they start. For the objective
    ``speed`` trials last some seconds; in the end the script as it is and the best trial run whole, and a best one
    whose metric is worse than allowed is given up for the next.

    Args:
        command: Words of the command.
        budget: Such as ``2h``, ``40 trials``, ``10usd``.
        space: What may be changed, or its file; settings that change no result if None.
        objective: One of ``objectives.OBJECTIVES``, or several parted by commas.
        study: Folder of the study; an existing one is resumed, also by several processes at once.
        metric: Name of the figure the script prints, if the space names none.
        target: Value to reach.
        trial_s: Time of steps of a short trial [s].
        timeout_s: Longest time of a trial [s].
        memory_limit_bytes: Most memory of a trial; that of the machine or the device if None [bytes].
        with_memory_law: Whether trials are rejected by predicted memory.
        with_priors: Whether the first trials come from the cost model.
        with_pruning: Whether trials for accuracy end when their forecast cannot win.
        max_accuracy_loss: Loss of the metric that is accepted for speed.
        check: Whether the best is run whole beside the script as it is.
        sampler: ``tpe`` or ``random``.
        seed: Of the sampler.
        price_usd_per_hour: Of the machine.
        device_index: ``cpu`` or ``cuda:N``; the first GPU if there is one.
        runner: Runs a trial; on this machine if None.
        say: Receives a line about each trial.
        echo: Where the script's output goes.

    Raises:
        UsageError: The command, the space or an option cannot be meant.
        ScriptError: The script fails as it is.
    """
    words = check_command(command)
    limits, objectives = parse_budget(budget), parse_objectives(objective)
    limits.seconds(price_usd_per_hour)
    host = describe_host()
    device = device_index or first_device()
    asked = read_space(space) if isinstance(space, Path) else space
    asked = asked or default_space(host.num_usable_cores, is_gpu=device != "cpu")
    wanted = _metric(asked.metric, metric, target)
    for item in objectives:
        if item.name == "time-to-target" and (wanted is None or wanted.target is None):
            raise UsageError("time-to-target needs a metric with a target: --metric val_acc --target 0.9")
        if item.name == "cost" and price_usd_per_hour is None:
            raise UsageError("the objective cost needs the price of this machine: --price 1.89/h")
        if item.needs_metric and wanted is None:
            raise UsageError(
                f"the objective {item.name} needs the name of a printed figure: --metric val_acc"
            )
    is_short = not any(item.needs_whole_run for item in objectives)
    if with_pruning and [item.name for item in objectives] != ["accuracy"]:
        raise UsageError(
            "a forecast ends trials of the objective accuracy alone: --prune --objective accuracy"
        )
    order = TrialOrder(
        command=words,
        metric=wanted,
        is_short=is_short,
        short_s=trial_s,
        timeout_s=timeout_s,
        memory_limit_bytes=memory_limit_bytes if device == "cpu" else None,
        device_index=device,
        stop_at_target=any(item.name == "time-to-target" for item in objectives) and len(objectives) == 1,
    )
    identity = {
        "command": list(words),
        "space": [asdict(parameter) for parameter in asked.parameters],
        "objectives": [item.name for item in objectives],
    }
    store = TrialStore(study, objectives, identity, sampler=sampler, seed=seed)
    base, optimizer, found, epochs = _look_at_script(words, asked, store, say=say, echo=echo)
    if with_pruning and epochs is None:
        say(
            "no trial is pruned: the script has no argument --epochs that tells how many values it will print"
        )
    task = Task(
        space=asked,
        order=order,
        objectives=objectives,
        budget=limits,
        price_usd_per_hour=price_usd_per_hour,
        memory_limit_bytes=memory_limit_bytes or _machine_limit(device, host.memory_usable_bytes),
        with_memory_law=with_memory_law,
        with_priors=with_priors,
        with_pruning=with_pruning,
        num_rounds=None if epochs is None else int(epochs),
    )
    tuner = Tuner(task=task, store=store, base=base, optimizer=optimizer, say=say, run=runner or run_trial)
    tuner.seed(found)
    ended_by = tuner.search()
    return _conclude(tuner, found, ended_by, study, max_accuracy_loss, check=check, echo=echo)


def _metric(of_space: Metric | None, name: str | None, target: float | None) -> Metric | None:
    if name is None and of_space is None:
        if target is not None:
            raise UsageError("a target needs the name of its metric: --metric val_acc")
        return None
    known = of_space if name is None else Metric(name=name, is_rising="loss" not in name)
    assert known is not None
    return known if target is None else replace(known, target=target)


def _machine_limit(device: str, memory_bytes: float) -> float | None:
    if device == "cpu":
        return memory_bytes
    from forerun.hardware.host_gpus import list_gpus, visible_gpus

    gpus = visible_gpus(list_gpus())
    return float(gpus[0].memory_bytes) if gpus else None


def _look_at_script(
    words: tuple[str, ...],
    space: Space,
    store: TrialStore,
    *,
    say: Callable[[str], None],
    echo: IO[str] | None,
) -> tuple[dict[str, Any], str | None, Profile | None, float | None]:
    """The script's own values, its optimizer, its profile and its epochs: seen once, then kept with the study."""
    known = store.study.user_attrs.get("script")
    if known is not None:
        return known["base"], known["optimizer"], None, known["epochs"]
    say("profiling the script as it is")
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        try:
            found = profile(words, num_steps=_PROFILE_STEPS, folder=Path(folder), echo=echo)
        except ScriptError:
            # An argument that the script does not know is told as such, not by its own usage message.
            check_arguments(space, _options(Path(folder)))
            raise
        options = _options(Path(folder))
    if found.outcome not in ("done", "stopped"):
        raise ScriptError(
            f"expected the script to run as it is, but it {found.outcome} after {found.num_steps} steps"
            f" (exit status {found.status}); it said: {found.said or 'nothing'}"
        )
    check_arguments(space, options)
    base = base_values(space, found, options)
    optimizer = found.optimizer.get("name")
    configure(space, {}, base, optimizer)
    store.study.set_user_attr("script", {"base": base, "optimizer": optimizer, "epochs": found.epochs})
    return base, optimizer, found, found.epochs


def _options(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(option for process in read_processes(folder) for option in process.options)


def _conclude(
    tuner: Tuner,
    found: Profile | None,
    ended_by: str,
    study: Path,
    max_loss: float,
    *,
    check: bool,
    echo: IO[str] | None,
) -> TuneResult:
    front = tuner.store.front()
    ranked = sorted(front, key=lambda t: -t.values[0] if tuner.task.objectives[0].is_rising else t.values[0])
    if len(tuner.task.objectives) == 1:
        complete = [t for t in tuner.store.trials() if t.state.name == "COMPLETE" and _is_feasible(t)]
        sign = -1.0 if tuner.task.objectives[0].is_rising else 1.0
        ranked = sorted(complete, key=lambda t: sign * t.values[0])
    chosen, checked, notes = _check(tuner, ranked, max_loss, check=check, echo=echo)
    outcomes = [t.user_attrs["record"]["result"]["outcome"] for t in tuner.store.trials()]
    best = None
    if chosen is not None:
        values = chosen.user_attrs["record"]["values"]
        best = configure(tuner.task.space, values, tuner.base, tuner.optimizer)
    result = TuneResult(
        folder=study,
        objectives=tuple(o.name for o in tuner.task.objectives),
        ended_by=ended_by,
        best=best,
        best_values={} if chosen is None else chosen.user_attrs["record"]["values"],
        best_objectives=() if chosen is None else tuple(chosen.values),
        command="" if best is None else shlex.join(best.command(tuner.task.order.command)),
        trials=tuple(_row(trial) for trial in tuner.store.trials()),
        front=tuple(trial.number for trial in front),
        num_rejected=outcomes.count("rejected"),
        num_out_of_memory=outcomes.count("out of memory"),
        checked=checked,
        profile=found,
        is_resumed=tuner.store.is_resumed,
        notes=notes,
    )
    write_json(study / "result.json", result.as_dict())
    if best is not None:
        about = {"objective": ", ".join(result.objectives), "value": list(result.best_objectives)}
        write_configuration(study / "best.yaml", best, tuner.task.order.command, about)
    return result


def _is_feasible(trial: Any) -> bool:
    return bool(trial.user_attrs["record"].get("is_feasible"))


def _row(trial: Any) -> dict[str, Any]:
    record = trial.user_attrs["record"]
    result = record["result"]
    is_told = trial.state.name == "COMPLETE" and record.get("is_feasible")
    return {
        "number": trial.number,
        "values": record["values"],
        "outcome": result["outcome"],
        "reason": result["reason"],
        "objectives": list(trial.values) if is_told else None,
        "source": record["source"],
        "rate_samples_per_s": result["rate_samples_per_s"],
        "wall_s": result["wall_s"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "expected_memory_bytes": record.get("expected_memory_bytes"),
        "curve": result["curve"],
        "hooks": result["hooks"],
    }


def _check(
    tuner: Tuner, ranked: Sequence[Any], max_loss: float, *, check: bool, echo: IO[str] | None
) -> tuple[Any, dict[str, Any] | None, tuple[str, ...]]:
    """Runs the script as it is and the best trials whole, until one keeps the metric."""
    if not ranked:
        return None, None, ("no trial brought a value",)
    order = tuner.task.order
    if not check or not order.is_short:
        note = () if not order.is_short else ("accuracy was not checked: --no-check",)
        return ranked[0], None, note
    whole = replace(order, is_short=False)
    before = run_trial(whole, Configuration(arguments={}, hooks={}), echo=echo)
    if before.outcome != "done":
        return (
            ranked[0],
            None,
            (f"accuracy was not checked: the script as it is {before.outcome}: {before.reason}",),
        )
    tried: list[dict[str, Any]] = []
    for trial in ranked[:_MOST_CHECKED]:
        configuration = configure(
            tuner.task.space, trial.user_attrs["record"]["values"], tuner.base, tuner.optimizer
        )
        after = run_trial(whole, configuration, echo=echo)
        verdict = _verdict(before, after, tuner.metric(before), max_loss)
        tuner.say(f"whole run of trial {trial.number}: {after.outcome}, {verdict['words']}")
        tried.append({"number": trial.number, **verdict})
        if verdict["is_accepted"]:
            checked = {"baseline": before.as_dict(), "best": after.as_dict(), **verdict, "tried": tried}
            return trial, checked, ()
    lost = f"none of the {len(tried)} fastest trials keeps the metric within {max_loss:g}: the script as it is stays"
    return None, {"baseline": before.as_dict(), "best": None, "tried": tried}, (lost,)


def _verdict(
    before: TrialResult, after: TrialResult, metric: Metric | None, max_loss: float
) -> dict[str, Any]:
    if after.outcome != "done":
        return {"is_accepted": False, "words": after.reason}
    speedup = (
        None
        if not before.rate_samples_per_s or not after.rate_samples_per_s
        else after.rate_samples_per_s / before.rate_samples_per_s
    )
    if metric is None or not before.curve or not after.curve:
        return {"is_accepted": True, "speedup": speedup, "words": "the script prints no metric: not compared"}
    first, second = before.curve[-1][1], after.curve[-1][1]
    loss = first - second if metric.is_rising else second - first
    return {
        "is_accepted": bool(loss <= max_loss and math.isfinite(second)),
        "speedup": speedup,
        "metric": metric.name,
        "metric_before": first,
        "metric_after": second,
        "words": f"{metric.name} {first:.4f} before, {second:.4f} after",
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two configurations, run in turns.

    Attributes:
        speed: Ratio of samples a second, B over A.
        time: Ratio of the whole time, A over B.
        accuracy: Non-inferiority of B; None without a metric.
        metric: Its name.
        runs: Every run: ``which``, ``rate_samples_per_s``, ``wall_s``, ``metric``.
    """

    speed: dict[str, Any] | None
    time: dict[str, Any]
    accuracy: dict[str, Any] | None
    metric: str | None
    runs: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Every field as types that JSON has."""
        return asdict(self)


def compare(
    command: Sequence[str],
    first: Configuration | Path | None,
    second: Configuration | Path | None,
    *,
    repetitions: int = 3,
    metric: str | None = None,
    margin: float = 0.01,
    timeout_s: float = 3600.0,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
) -> Comparison:
    """Runs a command in two configurations in turns, A-B-A-B, and compares speed and metric in pairs.

    Args:
        command: Words of the command.
        first: A: a configuration or its file; the command as it is if None.
        second: B.
        repetitions: Runs of each.
        metric: Figure the script prints; a usual one if None.
        margin: Loss of the metric that counts as none.
        timeout_s: Longest time of a run [s].
        say: Receives a line about each run.
        echo: Where the script's output goes.

    Raises:
        UsageError: The command or a file cannot be used.
        ScriptError: A run fails.
    """
    words = check_command(command)
    if repetitions < 1:
        raise UsageError(f"expected one repetition or more, got {repetitions}")
    wanted = None if metric is None else Metric(name=metric, is_rising="loss" not in metric)
    order = TrialOrder(
        command=words, metric=wanted, is_short=False, timeout_s=timeout_s, device_index=first_device()
    )
    configurations = {"A": _read(first), "B": _read(second)}
    results: dict[str, list[TrialResult]] = {"A": [], "B": []}
    for index in range(repetitions):
        # Who goes first changes from pair to pair.
        for which in ("AB", "BA")[index % 2]:
            result = run_trial(order, configurations[which], echo=echo)
            if result.outcome == "interrupted":
                raise KeyboardInterrupt
            if result.outcome != "done":
                raise ScriptError(
                    f"expected {which} to run to its end, but it {result.outcome}: {result.reason}"
                )
            results[which].append(result)
            say(f"{which}: {result.wall_s:.1f} s, {result.rate_samples_per_s or 0:.1f} samples/s")
    return _compared(results, wanted, margin)


def _read(found: Configuration | Path | None) -> Configuration:
    if found is None:
        return Configuration(arguments={}, hooks={})
    return read_configuration(found) if isinstance(found, Path) else found


def _compared(results: Mapping[str, list[TrialResult]], wanted: Metric | None, margin: float) -> Comparison:
    rates = {w: [r.rate_samples_per_s for r in runs if r.rate_samples_per_s] for w, runs in results.items()}
    has_rates = all(len(rates[w]) == len(results[w]) for w in "AB")
    last = {w: [r.curve[-1][1] for r in runs if r.curve] for w, runs in results.items()}
    name = results["A"][0].metric
    metric = wanted or (None if name is None else Metric(name=name, is_rising="loss" not in name))
    has_metric = metric is not None and all(len(last[w]) == len(results[w]) for w in "AB")
    return Comparison(
        speed=paired_ratio(rates["A"], rates["B"]).as_dict() if has_rates else None,
        time=paired_ratio([r.wall_s for r in results["B"]], [r.wall_s for r in results["A"]]).as_dict(),
        accuracy=non_inferiority(last["A"], last["B"], margin=margin, is_rising=metric.is_rising)
        if has_metric and metric is not None
        else None,
        metric=metric.name if has_metric and metric is not None else None,
        runs=tuple(
            {
                "which": which,
                "rate_samples_per_s": result.rate_samples_per_s,
                "wall_s": result.wall_s,
                "metric": result.curve[-1][1] if result.curve else None,
            }
            for which in "AB"
            for result in results[which]
        ),
    )


def apply(
    command: Sequence[str],
    configuration: Configuration | Path,
    *,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
) -> Launch:
    """Runs a command with a configuration that ``tune`` found.

    Raises:
        UsageError: The command or the file cannot be used.
        ScriptError: The command fails.
    """
    words = check_command(command)
    found = _read(configuration)
    exact = found.command(words)
    say(f"command: {shlex.join(exact)}")
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        settings = HookSettings(folder=folder, parent_pid=0, window_steps=0, knobs=found.hooks)
        environment = (
            {"OMP_NUM_THREADS": str(found.hooks["num_threads"])} if "num_threads" in found.hooks else {}
        )
        run = launch(exact, settings, echo=echo, environment=environment)
        seen = {hook["what"]: hook for process in read_processes(Path(folder)) for hook in process.hooks}
        for hook in seen.values():
            say(f"hook: {hook['knob']}: {hook['what']}")
        for knob in set(found.hooks) - {hook["knob"] for hook in seen.values()}:
            say(f"hook: {knob}: not applied, the script never came to it")
    if run.outcome == "interrupted":
        raise KeyboardInterrupt
    if run.outcome != "done":
        raise FailureError(f"the command {run.outcome} with status {run.status}")
    return run
