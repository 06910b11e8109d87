"""The scenarios of the built-in task, run one after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

from forerun.base.answers import plain
from forerun.base.errors import ForerunError, ScriptError, UsageError, near_matches
from forerun.base.extras import require
from forerun.question.devices import describe_host
from forerun.question.devices.local import check_device, first_device, lock_device, only_device
from forerun.question.settings import checked
from forerun.script.command_words import with_arguments
from forerun.script.planned_steps import predictable_device
from forerun.script.profiling.launch import Launch, launch
from forerun.script.profiling.messages import HookSettings
from forerun.script.profiling.profile import Profile, summarise_run
from forerun.script.profiling.recorded import write_json
from forerun.script.tune import tune
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.options import ScenarioOptions, ScenarioSettings
from forerun.script.tuning.scenario_answer import (
    ScenarioRun,
    ScenarioRuns,
    ScenarioStudy,
    run_figures,
    usage_rows,
)
from forerun.script.tuning.space import Space, space_of
from forerun.script.tuning.squeezenet_training import IMAGE_SIZE, MODEL, generate_images, part_folder
from forerun.script.tuning.trial import say_nothing

_METRIC = "test_acc"
_LOCK_PATIENCE_S = 24 * 3600.0


def tune_scenarios(
    scenario: str,
    *,
    data: Path | None,
    folder: Path = Path("forerun-study"),
    say: Callable[[str], None] = say_nothing,
    **options: Unpack[ScenarioOptions],
) -> ScenarioRuns:
    """Trains the built-in task unchanged, then with the best configuration of each scenario, and measures these runs.

    Each scenario starts from the best configuration of those before it. Runs that are in the folder already are not
    repeated.

    Args:
        scenario: ``baseline``, ``resolution``, ``hyperparameters``, ``hardware`` or ``all``.
        data: Folder with ``seg_train`` and ``seg_test``, a folder per class in each.
        folder: Folder for all files.
        say: Receives lines about the progress.
        options: See ``forerun.script.tuning.options.ScenarioSettings``; the budget is that of each scenario's study.

    Raises:
        InvalidSetupError: An option has an impossible value.
        UsageError: The folder or a name cannot be used.
        ScriptError: A run fails.
    """
    settings = ScenarioSettings(**checked({**options, "data": data, "study": folder}, ScenarioSettings))
    require("the task squeezenet", "torch", "torchvision")
    if settings.task != "squeezenet":
        raise UsageError(f"expected the task squeezenet, got '{settings.task}'")
    if data is None:
        raise UsageError(
            "a scenario needs images: --data FOLDER with seg_train and seg_test, a folder per class"
        )
    device = first_device() if settings.device_index is None else check_device(settings.device_index)
    cores = int(describe_host().num_usable_cores)
    chosen = chosen_scenarios(scenario, num_cores=cores, epochs=settings.epochs, is_gpu=device != "cpu")
    if settings.num_generated is not None and not (data / "seg_train").exists():
        say(f"generating {settings.num_generated} images of six classes in {data}")
        generate_images(data, num_images=settings.num_generated)
    command = training_command(data, epochs=settings.epochs, weights=settings.weights)
    model = _predicted_model(device, chosen, say)
    job = _Call(command=command, settings=settings, device=device, model=model, say=say)
    found = ScenarioRuns(folder=folder, scenarios=())
    so_far = ScriptConfiguration(arguments={}, hooks={})
    for each in chosen:
        run = _kept_or_made(job, each, so_far)
        so_far = run.configuration
        found = ScenarioRuns(folder=folder, scenarios=(*found.scenarios, run))
        write_json(folder / "scenarios.json", {"scenarios": plain(found.scenarios)})
    return found


def _predicted_model(device: str, chosen: Sequence[Scenario], say: Callable[[str], None]) -> str | None:
    """The network of the task, if its steps on the device can be predicted; reports the reason if they cannot."""
    try:
        predictable_device(device)
    except ForerunError as reason:
        if any(scenario.objective is not None for scenario in chosen):
            say(f"first trials come from profiles alone: {reason}")
        return None
    return MODEL


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """All that the scenarios of a call share, with the model if it can be predicted."""

    command: tuple[str, ...]
    settings: ScenarioSettings
    device: str
    model: str | None
    say: Callable[[str], None]


def _kept_or_made(job: _Call, scenario: Scenario, so_far: ScriptConfiguration) -> ScenarioRun:
    """The run of a scenario, taken from an earlier call with the same settings if its model is still there."""
    folder = job.settings.study / scenario.name
    asked: dict[str, Any] = {
        "command": list(with_arguments(so_far.command(job.command), scenario.settings)),
        "hooks": so_far.hooks,
        "device": job.device,
    }
    if scenario.objective is not None:
        asked |= {name: getattr(job.settings, name) for name in ("budget", "trial_s", "seed")}
    kept = _read(folder / "scenario.json")
    if kept.get("asked") == asked and (folder / "model.safetensors").is_file():
        job.say(f"scenario {scenario.name}: done before, taken from {folder}")
        return ScenarioRun.from_dict(kept["found"])
    job.say(f"scenario {scenario.name}: {scenario.words}")
    study = _search(job, scenario, asked["command"], so_far)
    configuration = so_far if study is None else _chosen(scenario, so_far, study)
    found = _whole_run(job, scenario, configuration, study)
    write_json(folder / "scenario.json", {"asked": asked, "found": found.as_dict()})
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, json.JSONDecodeError):
        return {}


def _search(
    job: _Call, scenario: Scenario, command: list[str], so_far: ScriptConfiguration
) -> ScenarioStudy | None:
    if scenario.objective is None:
        return None
    result = tune(
        command,
        budget=job.settings.budget,
        space=scenario.space(),
        objective=scenario.objective,
        study=job.settings.study / scenario.name / "study",
        metric=_METRIC,
        trial_s=job.settings.trial_s,
        check=False,
        seed=job.settings.seed,
        device_index=job.device,
        model=job.model,
        say=job.say,
    )
    if result.best is None:
        raise ScriptError(f"scenario {scenario.name}: {'; '.join(result.notes)}")
    return ScenarioStudy(
        best=result.best,
        values=result.best_values,
        num_trials=len(result.trials),
        num_out_of_memory=result.num_out_of_memory,
        num_rejected=result.num_rejected,
    )


def _chosen(scenario: Scenario, so_far: ScriptConfiguration, study: ScenarioStudy) -> ScriptConfiguration:
    return ScriptConfiguration(
        arguments={**so_far.arguments, **scenario.settings, **study.best.arguments},
        hooks={**so_far.hooks, **study.best.hooks},
    )


def _whole_run(
    job: _Call, scenario: Scenario, configuration: ScriptConfiguration, study: ScenarioStudy | None
) -> ScenarioRun:
    folder = job.settings.study / scenario.name
    words = (*configuration.command(job.command), "--out", str(folder))
    run, profile = _measured(job.device, scenario, words, configuration.hooks)
    history = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    figures = run_figures(history, run, profile)
    job.say(
        f"scenario {scenario.name}: test accuracy {figures.test_accuracy:.4f}, "
        f"{figures.images_per_s or 0:.1f} images/s, whole run {figures.wall_s:.1f} s"
    )
    return ScenarioRun(
        scenario=scenario.name,
        configuration=configuration,
        image_size=int(configuration.arguments.get("--image-size", IMAGE_SIZE)),
        study=study,
        figures=figures,
        history=tuple(history),
        utilisation=usage_rows(
            run.samples, run.gpu_busy, begin_s=run.begin_s, num_cores=profile.num_usable_cores
        ),
    )


def _measured(
    device: str, scenario: Scenario, words: tuple[str, ...], hooks: dict[str, Any]
) -> tuple[Launch, Profile]:
    """A whole run, alone on the device as far as forerun knows."""
    with lock_device(device, wait_s=_LOCK_PATIENCE_S):
        settings = HookSettings(window_steps=0, knobs=hooks)
        run = launch(words, settings, device_index=device, environment=only_device(device))
    if run.outcome == "interrupted":
        raise KeyboardInterrupt
    process = run.training_process
    if run.outcome != "done" or process is None:
        raise ScriptError(f"scenario {scenario.name} {run.outcome}: it said: {run.said or 'nothing'}")
    cores = describe_host().num_usable_cores
    return run, summarise_run(run, process, num_ranks=1, num_usable_cores=cores, epochs=None)


_KAGGLE = "puneet6060/intel-image-classification"
_MODULE = "forerun.script.tuning.squeezenet_training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario.

    Attributes:
        name: Name of the scenario on the command line.
        words: Description of the scenario in a few words.
        objective: Objective of the scenario's study; None without a search.
        parameters: Parameters that the study searches, as a file of a space has them.
        settings: Arguments that the scenario sets.
    """

    name: str
    words: str
    objective: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)

    def space(self) -> Space:
        """The scenario's search space."""
        return space_of({"parameters": self.parameters})


_BATCHES = {"values": [16, 32, 64, 128], "map": "--batch-size"}


def _hardware_parameters(num_cores: int, *, is_gpu: bool) -> dict[str, Any]:
    counts = [n for n in (1, 2, 4, 8) if n <= max(1, num_cores)]
    # On a processor the workers and the kernels share the cores; fp16 needs the scaled loss of a GPU.
    own = {"cudnn_benchmark": [False, True]} if is_gpu else {"num_threads": counts}
    return {
        "num_workers": {"values": [0, *counts], "map": "--workers"},
        "amp": {"values": ["off", "bf16", "fp16"] if is_gpu else ["off", "bf16"], "map": "--amp"},
        **own,
        "batch_size": _BATCHES,
        "lr": {"scale_with": "batch_size", "map": "--lr"},
        "channels_last": [False, True],
        "persistent_workers": [False, True],
        "optimizer_implementation": ["foreach", "fused"],
    }


def _scenarios(*, num_cores: int, epochs: int, is_gpu: bool) -> tuple[Scenario, ...]:
    return (
        Scenario(name="baseline", words="the script as it is"),
        Scenario(
            name="resolution",
            words="image sizes of 144 to 192 pixels",
            objective="accuracy",
            parameters={"image_size": {"values": [144, 160, 176, 192], "map": "--image-size"}},
        ),
        Scenario(
            name="hyperparameters",
            words="learning rate, batch size and epochs by TPE, with cosine annealing",
            objective="accuracy",
            parameters={
                "lr": {"min": 1e-5, "max": 3e-3, "log": True, "map": "--lr"},
                "batch_size": _BATCHES,
                "epochs": {"values": sorted({max(1, epochs // 2), epochs}), "map": "--epochs"},
            },
            settings={"--cosine": True},
        ),
        Scenario(
            name="hardware",
            words="workers, precision, memory order, optimizer and batch for speed",
            objective="speed",
            parameters=_hardware_parameters(num_cores, is_gpu=is_gpu),
        ),
    )


SCENARIOS = ("baseline", "resolution", "hyperparameters", "hardware")
"""All scenarios in the order of ``all``: each starts from the results of those before it."""


def chosen_scenarios(name: str, *, num_cores: int, epochs: int, is_gpu: bool = False) -> tuple[Scenario, ...]:
    """The scenarios with this name, after the baseline, with which they are compared.

    Args:
        name: One of ``SCENARIOS``, or ``all``.
        num_cores: Number of cores that workers may use.
        epochs: Number of epochs of a whole run; half as many are tried as well.
        is_gpu: True if the scenarios run on a GPU.

    Raises:
        UsageError: No scenario has this name.
    """
    if name not in ("all", *SCENARIOS):
        raise UsageError(
            f"expected a scenario ({', '.join(SCENARIOS)} or all), got '{name}'{near_matches(name, SCENARIOS)}"
        )
    names = SCENARIOS if name == "all" else ("baseline", name)
    known = _scenarios(num_cores=num_cores, epochs=epochs, is_gpu=is_gpu)
    return tuple(each for each in known if each.name in names)


def training_command(data: Path, *, epochs: int, weights: str) -> tuple[str, ...]:
    """The command of the built-in task.

    Args:
        data: Folder with ``seg_train`` and ``seg_test``, each with a folder per class.
        epochs: Number of epochs of a whole run.
        weights: Initial weights, ``imagenet`` or ``none``.

    Raises:
        UsageError: The folder does not have the layout of Intel's images.
    """
    for part in ("seg_train", "seg_test"):
        classes = [folder for folder in part_folder(data, part).glob("*") if folder.is_dir()]
        if not classes:
            raise UsageError(
                f"expected a folder per class in '{data / part}', got none; the layout is "
                "DATA/seg_train/CLASS/*.jpg and DATA/seg_test/CLASS/*.jpg, as it comes from: "
                f"kaggle datasets download {_KAGGLE} --unzip --path {data}; or generate images with --generate 1500"
            )
    if weights not in ("imagenet", "none"):
        raise UsageError(f"expected the weights imagenet or none, got '{weights}'")
    fixed = ("--data", str(data), "--epochs", str(epochs), "--weights", weights)
    return (sys.executable, "-m", _MODULE, *fixed)
