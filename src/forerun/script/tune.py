"""Tunes a training command within a budget, compares two configurations, runs with one.

With a model, the steps of all configurations are predicted first, by one call of the planner.
"""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, Unpack

from forerun.base.answers import Answer
from forerun.base.errors import ForerunError, InvalidSetupError, ScriptError, UsageError
from forerun.base.kept import temporary_folder
from forerun.cost.time.correction import find_calibration
from forerun.prediction.estimate import Provenance
from forerun.prediction.models import TracedModels
from forerun.question.devices import describe_host, find_device
from forerun.question.devices.catalogue import device_at
from forerun.question.devices.cluster import Cluster, cluster_of
from forerun.question.devices.device import Device, DeviceKind
from forerun.question.devices.local import check_device, first_device, gpu_index
from forerun.question.model import is_keras
from forerun.question.options import RunOptions
from forerun.question.run import HERE, Run
from forerun.question.settings import checked
from forerun.question.setup import Layout, Precision
from forerun.script.command_words import check_command
from forerun.script.profile import profile
from forerun.script.profiling.profile import Profile
from forerun.script.profiling.recorded import read_processes, write_json
from forerun.script.tuning.acceptance import Verdict, accept_best, is_script, repeat_winner, screen
from forerun.script.tuning.configuration import (
    ScriptConfiguration,
    base_values,
    check_arguments,
    configure,
    counts_steps,
    fitting_space,
    write_configuration,
)
from forerun.script.tuning.laws import DevicePoint, DeviceSteps, device_points, script_point
from forerun.script.tuning.options import (
    Objective,
    TuneOptions,
    TuneSettings,
    by_steps,
    parse_budget,
    parse_objectives,
)
from forerun.script.tuning.space import Metric, Space, default_space, read_space
from forerun.script.tuning.study import TrialStore, has_value, result_of, values_of
from forerun.script.tuning.trial import TrialOrder, say_nothing
from forerun.script.tuning.tuner import Task, Tuner, search_together
from forerun.search.choice import HIGH
from forerun.search.devices import DeviceOption
from forerun.search.engine import Engine
from forerun.search.search import SETTINGS, Search

_PROFILE_STEPS = 40
_PROFILE_SHARE = 0.1
"""Most of a budget that goes to the profile, after its first step."""
_MOST_OF_BUDGET = 0.5
"""Most of a budget that goes to whole runs."""
_IMAGE_SIZE_NAMES = ("image_size", "img_size", "imgsz", "input_size", "resolution", "crop_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneResult(Answer):
    """Result of a study.

    Attributes:
        folder: Folder of the study.
        objectives: Objectives of the study.
        ended_by: The part of the budget that was used up.
        best: Configuration of the best trial that keeps the accuracy; None if there is none.
        best_values: Values of the best configuration by parameter.
        best_objectives: Objectives of the best configuration.
        command: Exact command of the best configuration.
        trials: Every trial: ``number``, ``values``, ``outcome``, ``objectives``, ``source``.
        front: Numbers of the trials that no other beats in all objectives.
        num_rejected: Trials that the memory model rejected before they started.
        num_out_of_memory: Trials that ran out of memory nevertheless.
        verdict: The winner beside the script as it is, repeated in turns: ``better``, ``no difference``, ``worse`` or
            ``not repeated``, with the ratio and its interval; None if no trial brought a value.
        checked: Whole runs of the unchanged script and the best configuration: ``baseline``, ``best``, ``accuracy``.
        profile: Profile of the unchanged script.
        is_resumed: Whether the study had trials before.
        notes: Unknown figures and the reasons.
    """

    folder: Path
    objectives: tuple[str, ...]
    ended_by: str
    best: ScriptConfiguration | None
    best_values: dict[str, Any]
    best_objectives: tuple[float, ...]
    command: str
    trials: tuple[dict[str, Any], ...]
    front: tuple[int, ...]
    num_rejected: int
    num_out_of_memory: int
    verdict: Verdict | None
    checked: dict[str, Any] | None
    profile: Profile | None
    is_resumed: bool
    notes: tuple[str, ...]


def tune(
    command: Sequence[str],
    *,
    space: Space | Path | None = None,
    say: Callable[[str], None] = say_nothing,
    echo: IO[str] | None = None,
    **options: Unpack[TuneOptions],
) -> TuneResult:
    """Searches for a better configuration of a training command, without editing it.

    The command is profiled unchanged, then tried in configurations that its arguments and the hooks can realise, each
    in separate processes. Trials that would not fit in memory are rejected before they start. For the objective
    ``speed`` trials last some seconds; if the best trial may change the trained model, it and the unchanged script run
    whole in the end, and if its metric is worse than allowed, the next best takes its place. The winner is then
    repeated in turns with the unchanged script, and called better only if the interval of the ratio says so. All of
    that is inside the budget.

    Args:
        command: Words of the command.
        space: What may be changed, or its file; settings that change no result if None.
        say: Receives a line about each trial.
        echo: Where the script's output goes.
        options: See ``forerun.script.tuning.options.TuneSettings``. More than one session needs
            ``if __name__ == "__main__":`` in a script that calls this.

    Raises:
        UsageError: The command, the space, the model or an option has an impossible value.
        FailureError: The model cannot be built or traced.
        ScriptError: The script fails as it is.
    """
    began_s = time.monotonic()
    settings = TuneSettings(**checked(options, TuneSettings))
    words = check_command(command)
    limits, objectives = parse_budget(settings.budget), parse_objectives(settings.objective)
    budget_s = limits.seconds(settings.price_usd_per_hour)
    host = describe_host()
    device = settings.device_index or first_device()
    if settings.ray_address is None:  # the nodes of a cluster may have devices that this machine has not
        device = check_device(device)
    asked = read_space(space) if isinstance(space, Path) else space
    is_own_space, asked = asked is None, asked or default_space(host.num_usable_cores, is_gpu=device != "cpu")
    wanted = _metric(asked.metric, settings.metric, settings.target)
    _check_objectives(objectives, wanted, settings)
    check_model(settings, asked)
    limit_bytes = settings.memory_limit_bytes
    order = TrialOrder(
        command=words,
        metric=wanted,
        is_short=not any(item.needs_whole_run for item in objectives),
        short_s=settings.trial_s,
        timeout_s=settings.timeout_s,
        memory_limit_bytes=limit_bytes if device == "cpu" else None,
        device_index=device,
        stop_at_target=any(item.name == "time-to-target" for item in objectives) and len(objectives) == 1,
    )
    identity = {
        "command": list(words),
        "space": [asdict(parameter) for parameter in asked.parameters],
        "objectives": [item.name for item in objectives],
    }
    store = TrialStore(settings.study, objectives, identity, sampler=settings.sampler, seed=settings.seed)
    script = _look_at_script(order, asked, store, budget_s=budget_s, say=say, echo=echo)
    if is_own_space:
        asked = fitting_space(asked, script.profile)
    if any(item.name == "speed" for item in objectives) and counts_steps(asked, script.profile, script.base):
        objectives = by_steps(objectives)
        say("speed is in steps a second: the samples of a step are not counted, and no setting changes them")
    epochs = script.profile.epochs
    if settings.with_pruning and epochs is None:
        say(
            "no trial is pruned: the script has no argument --epochs that tells how many values it will print"
        )
    task = Task(
        space=asked,
        order=order,
        objectives=objectives,
        budget=limits,
        settings=settings,
        base=script.base,
        optimizer=script.profile.optimizer.get("name"),
        identity=identity,
        memory_limit_bytes=limit_bytes or _machine_limit(device, host.memory_usable_bytes),
        reserved_s=_whole_runs_s(script.profile, asked, settings, order, budget_s),
        num_rounds=None if epochs is None else int(epochs),
        spent_s=script.spent_s + time.monotonic() - began_s,
    )
    with task.tuner(store, say, echo) as tuner:
        notes = _seed(tuner, script, device)
        where = settings.device_index or settings.ray_address
        ended_by = search_together(tuner, _devices(device, where, settings.num_sessions))
        return _conclude(tuner, script.profile, ended_by, notes)


def _check_objectives(objectives: Sequence[Objective], wanted: Metric | None, settings: TuneSettings) -> None:
    for item in objectives:
        if item.name == "time-to-target" and (wanted is None or wanted.target is None):
            raise UsageError("time-to-target needs a metric with a target: --metric val_acc --target 0.9")
        if item.name == "cost" and settings.price_usd_per_hour is None:
            raise UsageError("the objective cost needs the price of this machine: --price 1.89/h")
        if item.needs_metric and wanted is None:
            raise UsageError(
                f"the objective {item.name} needs the name of a printed figure: --metric val_acc"
            )
    if settings.with_pruning and [item.name for item in objectives] != ["accuracy"]:
        raise UsageError(
            "--prune ends trials by a forecast of their accuracy: give --objective accuracy as well"
        )


def _seed(tuner: Tuner, script: _Script, device: str) -> tuple[str, ...]:
    """Queues the first trials; tells why they do not come from the model, if it was given."""
    task, steps = tuner.task, None
    notes: tuple[str, ...] = ()
    if task.settings.model is not None:
        # A study goes on without predicted steps.
        try:
            steps = planned_steps(
                task.settings,
                predictable_device(device),
                task.space,
                task.base,
                script.profile,
                image_size=script.image_size,
                memory_bytes=task.memory_limit_bytes,
            )
        except ForerunError as error:
            notes = (f"the first trials come from the profile alone: {error}",)
            tuner.say(notes[0])
    tuner.seed(script.profile, steps)
    return notes


def _metric(of_space: Metric | None, name: str | None, target: float | None) -> Metric | None:
    if name is None and of_space is None:
        if target is not None:
            raise UsageError("a target needs the name of its metric: --metric val_acc")
        return None
    known = of_space if name is None else Metric.named(name)
    assert known is not None
    return known if target is None else replace(known, target=target)


def _machine_limit(device: str, memory_bytes: float) -> float | None:
    if device == "cpu":
        return memory_bytes
    from forerun.question.devices.here import visible_gpus

    gpus, index = visible_gpus(), gpu_index(device) or 0
    return float(gpus[index].memory_bytes) if index < len(gpus) else None


def _devices(first: str, asked: str | None, num_sessions: int) -> list[str]:
    """A device for each session: all on the one asked for, or the machine's GPUs in turn; a node's first with Ray."""
    if asked is not None or first == "cpu":
        return [first] * num_sessions
    from forerun.question.devices.here import visible_gpus

    num_gpus = max(1, len(visible_gpus()))
    return [f"cuda:{index % num_gpus}" for index in range(num_sessions)]


def _whole_runs_s(
    found: Profile, space: Space, settings: TuneSettings, order: TrialOrder, budget_s: float | None
) -> float:
    """Time of the budget kept for whole runs that guard the metric [s]; 0 if there are none, or they do not fit."""
    is_checked = settings.check and order.is_short and any(each.changes_result for each in space.parameters)
    if not is_checked or budget_s is None or found.job_time_s is None:
        return 0.0
    both_s = 2.0 * found.job_time_s
    return both_s if both_s <= _MOST_OF_BUDGET * budget_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Script:
    """A script: its profile, own values by parameter, size of images, and the time spent before now [s]."""

    profile: Profile
    base: dict[str, Any]
    image_size: int | None
    spent_s: float


def _look_at_script(
    order: TrialOrder,
    space: Space,
    store: TrialStore,
    *,
    budget_s: float | None,
    say: Callable[[str], None],
    echo: IO[str] | None,
) -> _Script:
    """Profiles the script as it is; once, then it is read from the study."""
    known, is_known = store.study.user_attrs.get("script"), True
    try:
        found = Profile.of(known["profile"])
    except (TypeError, KeyError, ValueError):  # a new study, or one whose profile an earlier version wrote
        say("profiling the script as it is")
        known, is_known = _profiled(order, space, budget_s, echo), False
        store.study.set_user_attr("script", known)
        found = Profile.of(known["profile"])
    options = tuple(known["options"])
    check_arguments(space, options)
    base = base_values(space, found, options, order.command)
    configure(space, {}, base, found.optimizer.get("name"))
    repeated = store.study.user_attrs.get("repeats") or {}
    return _Script(
        profile=found,
        base=base,
        image_size=_image_size(options),
        spent_s=found.wall_s + repeated.get("wall_s", 0.0) if is_known else 0.0,
    )


def _profiled(
    order: TrialOrder, space: Space, budget_s: float | None, echo: IO[str] | None
) -> dict[str, Any]:
    """The profile of the script as it is and the arguments that it knows, as plain values."""
    with temporary_folder() as folder:
        try:
            found = profile(
                order.command,
                num_steps=_PROFILE_STEPS,
                stop_after_s=None if budget_s is None else _PROFILE_SHARE * budget_s,
                timeout_s=order.timeout_s if budget_s is None else min(budget_s, order.timeout_s),
                folder=Path(folder),
                device_index=order.device_index,
                echo=echo,
            )
        except ScriptError:
            # An argument that the script does not know is told as such, not by its own usage message.
            check_arguments(space, _options(Path(folder)))
            raise
        options = _options(Path(folder))
    if found.outcome == "interrupted":
        raise KeyboardInterrupt
    if found.outcome not in ("done", "stopped"):
        ended = "reached the time limit" if found.outcome == "timeout" else found.outcome
        raise ScriptError(
            f"expected the script to run as it is, but it {ended} after {found.num_steps} steps"
            f" (exit status {found.status}); it said: {found.said or 'nothing'}"
        )
    return {"profile": found.as_dict(), "options": options}


def _image_size(options: tuple[dict[str, Any], ...]) -> int | None:
    """The script's argument for the size of its images, by its usual names; None without one."""
    values = {option["name"]: option["value"] for option in options}
    sizes = [values[name] for name in _IMAGE_SIZE_NAMES if isinstance(values.get(name), int)]
    return next((size for size in sizes if size > 0), None)


def _options(folder: Path) -> tuple[dict[str, Any], ...]:
    return tuple(option for process in read_processes(folder) for option in process.options)


def _conclude(tuner: Tuner, found: Profile, ended_by: str, known_notes: tuple[str, ...]) -> TuneResult:
    task, settings, front = tuner.task, tuner.task.settings, tuner.store.front()
    candidates = [t for t in tuner.store.trials() if has_value(t)] if task.is_single else front
    sign = -1.0 if task.objectives[0].is_rising else 1.0
    ranked = screen(tuner, sorted(candidates, key=lambda t: sign * t.values[0]))
    chosen, whole_runs, notes = accept_best(tuner, ranked)
    verdict = None if chosen is None else _verdict(tuner, chosen)
    best = None
    if verdict is not None:
        tuner.say(verdict.words)
        # Among many trials the best one is lucky: without a difference in a run of its own the script stays
        # as it is.
        if verdict.verdict in ("no difference", "worse"):
            chosen = next((trial for trial in ranked if is_script(tuner, trial)), None)
            best, notes = ScriptConfiguration(arguments={}, hooks={}), (*notes, "the script as it is stays")
    outcomes = [result_of(trial)["outcome"] for trial in tuner.store.trials()]
    if chosen is not None:
        best = task.configuration(values_of(chosen))
    result = TuneResult(
        folder=settings.study,
        objectives=tuple(objective.name for objective in task.objectives),
        ended_by=ended_by,
        best=best,
        best_values={} if chosen is None else values_of(chosen),
        best_objectives=() if chosen is None else tuple(chosen.values),
        command="" if best is None else shlex.join(best.command(task.order.command)),
        trials=tuple(_row(trial) for trial in tuner.store.trials()),
        front=tuple(trial.number for trial in front),
        num_rejected=outcomes.count("rejected"),
        num_out_of_memory=outcomes.count("out of memory"),
        verdict=verdict,
        checked=whole_runs,
        profile=found,
        is_resumed=tuner.store.is_resumed,
        notes=(*known_notes, *notes),
    )
    write_json(settings.study / "result.json", result.as_dict())
    if best is not None:
        about = {"objective": ", ".join(result.objectives), "value": list(result.best_objectives)}
        write_configuration(settings.study / "best.yaml", best, task.order.command, about)
    return result


def _verdict(tuner: Tuner, chosen: Any) -> Verdict:
    """The verdict on the winner; that of an earlier session, if it is about the same trial."""
    known = tuner.store.study.user_attrs.get("repeats")
    if known is not None and known["number"] == chosen.number and known["num_pairs"]:
        return Verdict(**known)
    found = repeat_winner(tuner, chosen)
    if found.num_pairs:
        tuner.store.study.set_user_attr("repeats", asdict(found))
    return found


def _row(trial: Any) -> dict[str, Any]:
    record, result = trial.user_attrs["record"], result_of(trial)
    return {
        "number": trial.number,
        "values": record["values"],
        "outcome": result["outcome"],
        "reason": result["reason"],
        "objectives": list(trial.values) if has_value(trial) else None,
        "source": record["source"],
        "rate_samples_per_s": result["rate_samples_per_s"],
        "wall_s": result["wall_s"],
        "peak_memory_bytes": result["peak_memory_bytes"],
        "expected_memory_bytes": record.get("expected_memory_bytes"),
        "curve": result["curve"],
        "hooks": result["hooks"],
    }


_PRECISIONS: Mapping[str, Precision] = {
    "off": Precision.FP32,
    "bf16": Precision.AMP_BF16,
    "fp16": Precision.AMP,
}
_LAYOUTS = {False: Layout.NCHW, True: Layout.NHWC}


def check_model(settings: TuneSettings, space: Space) -> None:
    """Traces the model that the script trains once, before anything runs; nothing without a model.

    Raises:
        UsageError: There is no such model, it is one of Keras, or its input does not fit the space.
        FailureError: It cannot be built or traced.
    """
    if settings.model is None:
        if any(
            size is not None for size in (settings.image_size, settings.input_shape, settings.sequence_length)
        ):
            raise UsageError("the input of a model was given without the model: --model torchvision:resnet18")
        return
    if not settings.with_priors:
        raise UsageError(
            "--model chooses the first trials by the cost model, which --no-priors turns off; leave one of them out"
        )
    if is_keras(settings.model):
        raise UsageError(
            f"expected a model of PyTorch, got '{settings.model}' of Keras: hooks reach PyTorch scripts only"
        )
    varied = space.parameter("image_size")
    if settings.input_shape is not None and varied is not None:
        raise UsageError(
            "the space varies image_size, which an input shape fixes; leave --input-shape out, the script's own "
            "size is read from its arguments or given as --image-size"
        )
    size = settings.image_size or (varied.values[0] if varied is not None and varied.values else None)
    # Tracing needs no particular device.
    TracedModels().of(_run_of(settings, cluster_of(find_device("cpu"), 1, 1), image_size=size))


def _run_of(settings: TuneSettings, cluster: Cluster, **options: Unpack[RunOptions]) -> Run:
    """A run of the model that the script trains."""
    options["input_shape"], options["sequence_length"] = settings.input_shape, settings.sequence_length
    return Run.of(settings.model, device=cluster, **options)


def predictable_device(device_index: str) -> Device:
    """The device of the trials on this machine, whose steps can be predicted.

    A GPU needs an entry in the catalogue, a processor a calibration, because datasheets of processors say too little.

    Raises:
        ForerunError: They cannot; the message is the reason.
    """
    device = device_at(gpu_index(device_index))
    if device.kind is DeviceKind.GPU or find_calibration(device) is not None:
        return device
    raise InvalidSetupError("this processor has no calibration; make one with: forerun calibrate")


def planned_steps(
    settings: TuneSettings,
    device: Device,
    space: Space,
    base: Mapping[str, Any],
    profile: Profile,
    *,
    image_size: int | None = None,
    memory_bytes: float | None,
) -> DeviceSteps:
    """Predicted steps and memory at every combination of batch size, precision, memory order and image size.

    Args:
        settings: Those of the search, with the model that the script trains and the shape of its input.
        device: From ``predictable_device``.
        space: Settings that may be changed.
        base: The script's own values.
        profile: Profile of the unchanged script.
        image_size: Size of images by the script's arguments, where the user gives none; None if they do not say it.
        memory_bytes: Memory of a GPU; None for no limit [bytes].

    Raises:
        InvalidSetupError: The batch size of the script is unknown, or its precision was never calibrated.
        UsageError, FailureError: The model cannot be built or traced at one of the image sizes.
    """
    is_given = settings.image_size is not None or settings.input_shape is not None
    own = script_point(profile, base, settings.image_size if is_given else image_size)
    if own is None:
        raise InvalidSetupError(
            "nothing tells the samples of a step; map batch_size to the script's argument"
        )
    axes = device_points(space, own)
    words = tuple(itertools.product(axes["image_size"], axes["channels_last"], axes["amp"]))
    cluster = cluster_of(device, 1, 1)
    run = _run_of(settings, cluster, optimizer=_optimizer(profile))
    search = Search(
        run=run,
        axes={
            SETTINGS: [
                {"precision": _PRECISIONS[amp], "layout": _LAYOUTS[last]}
                | ({} if size is None else {"image_size": size})
                for size, last, amp in words
            ],
            "device": [DeviceOption(cluster=cluster, name=HERE)],
            "batch_size": sorted({round(size) for size in axes["batch_size"]}),
        },
    )
    table = Engine(search, TracedModels()).all_candidates()
    points = [
        DevicePoint(batch_size=int(size), amp=amp, channels_last=last, image_size=pixels)
        for (pixels, last, amp), size in zip(
            (words[index] for index in table.configuration), table.batch_size, strict=True
        )
    ]
    # Without instructions for it, half precision is slower than single precision, so a processor is believed only in a
    # precision that its calibration measured; the GPUs behind the cost model all have such instructions.
    known = (table.provenance == Provenance.CALIBRATED.value) | (device.kind is DeviceKind.GPU)
    if not known[points.index(own)]:
        raise InvalidSetupError(
            f"the calibration of this processor says nothing of {own.amp}, in which the script runs"
        )
    steps_s = table.batch_size / table.values["device_samples_per_s"][0]
    # The high end of the interval: a trial that may run out of memory costs the study a trial.
    peaks = table.values["peak_memory_bytes"][HIGH]
    tiers = ", ".join(dict.fromkeys(table.provenance[known].tolist()))
    return DeviceSteps(
        source=f"{settings.model} on {device.title} ({tiers})",
        own=own,
        step_s={
            point: float(s) for point, s, is_known in zip(points, steps_s, known, strict=True) if is_known
        },
        peak_bytes={point: float(peak) for point, peak in zip(points, peaks, strict=True)},
        memory_bytes=memory_bytes if device.kind is DeviceKind.GPU else None,
    )


def _optimizer(profile: Profile) -> str:
    """The script's optimizer if the tracer knows it, else one with a typical amount of work."""
    from forerun.tracing.optimizers import OPTIMIZERS

    name = str(profile.optimizer.get("name") or "").lower()
    return name if name in OPTIMIZERS else "adam"
