"""Scenarios of a training: the script as it is, then its best resolution, hyperparameters and use of the hardware.

Each scenario starts from the best configuration of those before it. Its final run is measured alone on the device and
kept as JSON, so that a second call with the same settings does nothing again. All are printed as a table and drawn.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from forerun.base.errors import ForerunError, ScriptError, UsageError, near_matches
from forerun.base.units import format_bytes, format_duration_s, format_energy_j
from forerun.question.devices import describe_host
from forerun.question.devices.local import lock_device, only_device
from forerun.script.command_words import with_arguments
from forerun.script.profiling.launch import Launch, TreeSample, launch
from forerun.script.profiling.messages import HookSettings
from forerun.script.profiling.profile import Profile, summarise_run
from forerun.script.profiling.recorded import write_json
from forerun.script.tune import predictable_device, tune
from forerun.script.tuning.configuration import ScriptConfiguration
from forerun.script.tuning.space import space_of
from forerun.surface.report.figure import drawn, look_of
from forerun.surface.report.tables import table
from forerun.surface.report.wording import format_percent
from studies.scenarios.training import IMAGE_SIZE, MODEL, part_folder

_METRIC = "test_acc"
_LOCK_PATIENCE_S = 24 * 3600.0
_KAGGLE = "puneet6060/intel-image-classification"
_BATCHES = {"values": [16, 32, 64, 128], "map": "--batch-size"}

Run = dict[str, Any]
"""Final run of a scenario, as JSON holds it.

``scenario``; ``arguments`` and ``hooks`` of its configuration; ``image_size`` [pixels]; ``study``, the result of its
search, or None; the figures of ``run_figures``; ``history``, a row per epoch; and ``utilisation``, see ``usage_rows``.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One scenario.

    Attributes:
        name: Name of the scenario.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """All that the scenarios of a call share.

    Attributes:
        command: Training command, without the arguments that scenarios set.
        folder: Folder for all files, one inside for each scenario.
        device: Device of the runs, ``cpu`` or ``cuda:N``.
        budget: Budget of each scenario's study, such as ``30min``.
        trial_s: Time of a trial's steps [s]; None for that of ``tune``.
        seed: Seed of the sampler.
        say: Receives lines about the progress.
    """

    command: tuple[str, ...]
    folder: Path
    device: str
    budget: str | None
    trial_s: float | None
    seed: int | None
    say: Callable[[str], None]


def run_scenarios(job: Job, chosen: Sequence[Scenario]) -> list[Run]:
    """Trains with the best configuration of each scenario; runs that are in the folder already are not repeated.

    Raises:
        ScriptError: A run fails.
    """
    model = _predicted_model(job, chosen)
    found: list[Run] = []
    so_far = ScriptConfiguration(arguments={}, hooks={})
    for scenario in chosen:
        run = _kept_or_made(job, scenario, so_far, model)
        so_far = ScriptConfiguration(arguments=run["arguments"], hooks=run["hooks"])
        found.append(run)
        write_json(job.folder / "scenarios.json", {"scenarios": found})
    return found


def _predicted_model(job: Job, chosen: Sequence[Scenario]) -> str | None:
    """The network of the task, if its steps on the device can be predicted; reports the reason if they cannot."""
    try:
        predictable_device(job.device)
    except ForerunError as reason:
        if any(scenario.objective is not None for scenario in chosen):
            job.say(f"first trials come from profiles alone: {reason}")
        return None
    return MODEL


def _kept_or_made(job: Job, scenario: Scenario, so_far: ScriptConfiguration, model: str | None) -> Run:
    """The run of a scenario, taken from an earlier call with the same settings if its model is still there."""
    folder = job.folder / scenario.name
    command = list(with_arguments(so_far.command(job.command), scenario.settings))
    asked: dict[str, Any] = {"command": command, "hooks": so_far.hooks, "device": job.device}
    if scenario.objective is not None:
        asked |= {"budget": job.budget, "trial_s": job.trial_s, "seed": job.seed}
    kept: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        kept = json.loads((folder / "scenario.json").read_text(encoding="utf-8"))
    if kept.get("asked") == asked and (folder / "model.safetensors").is_file():
        job.say(f"scenario {scenario.name}: done before, taken from {folder}")
        return dict(kept["found"])
    job.say(f"scenario {scenario.name}: {scenario.words}")
    configuration, study = so_far, None
    if scenario.objective is not None:
        best, study = _searched(job, scenario, command, model)
        configuration = ScriptConfiguration(
            arguments={**so_far.arguments, **scenario.settings, **best.arguments},
            hooks={**so_far.hooks, **best.hooks},
        )
    found = _whole_run(job, scenario, configuration, study)
    write_json(folder / "scenario.json", {"asked": asked, "found": found})
    return found


def _searched(
    job: Job, scenario: Scenario, command: list[str], model: str | None
) -> tuple[ScriptConfiguration, dict[str, Any]]:
    """The best configuration of a scenario's study, and what is told of the study."""
    result = tune(
        command,
        budget=job.budget,
        space=space_of({"parameters": scenario.parameters}),
        objective=scenario.objective,
        study=job.folder / scenario.name / "study",
        metric=_METRIC,
        trial_s=job.trial_s,
        check=False,
        seed=job.seed,
        device_index=job.device,
        model=model,
        say=job.say,
    )
    if result.best is None:
        raise ScriptError(f"scenario {scenario.name}: {'; '.join(result.notes)}")
    return result.best, {
        "best": {"arguments": dict(result.best.arguments), "hooks": dict(result.best.hooks)},
        "values": result.best_values,
        "num_trials": len(result.trials),
        "num_out_of_memory": result.num_out_of_memory,
        "num_rejected": result.num_rejected,
    }


def _whole_run(
    job: Job, scenario: Scenario, configuration: ScriptConfiguration, study: dict[str, Any] | None
) -> Run:
    folder = job.folder / scenario.name
    run, profile = _measured(job, scenario, configuration)
    history = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    figures = run_figures(history, run, profile)
    job.say(
        f"scenario {scenario.name}: test accuracy {figures['test_accuracy']:.4f}, "
        f"{figures['images_per_s'] or 0:.1f} images/s, whole run {figures['wall_s']:.1f} s"
    )
    return {
        "scenario": scenario.name,
        "arguments": dict(configuration.arguments),
        "hooks": dict(configuration.hooks),
        "image_size": int(configuration.arguments.get("--image-size", IMAGE_SIZE)),
        "study": study,
        **figures,
        "history": history,
        "utilisation": usage_rows(
            run.samples, run.gpu_busy, begin_s=run.begin_s, num_cores=profile.num_usable_cores
        ),
    }


def _measured(job: Job, scenario: Scenario, configuration: ScriptConfiguration) -> tuple[Launch, Profile]:
    """A whole run, alone on the device as far as forerun knows."""
    words = (*configuration.command(job.command), "--out", str(job.folder / scenario.name))
    settings = HookSettings(window_steps=0, knobs=dict(configuration.hooks))
    with lock_device(job.device, wait_s=_LOCK_PATIENCE_S):
        run = launch(words, settings, device_index=job.device, environment=only_device(job.device))
    if run.outcome == "interrupted":
        raise KeyboardInterrupt
    process = run.training_process
    if run.outcome != "done" or process is None:
        raise ScriptError(f"scenario {scenario.name} {run.outcome}: it said: {run.said or 'nothing'}")
    cores = describe_host().num_usable_cores
    return run, summarise_run(run, process, num_usable_cores=cores)


_NO_GPU = "the run was on a processor, for which there are no GPU figures"
_REASONS = {
    "gpu_utilisation": "the driver does not report the utilisation of the GPU",
    "energy_j": "the GPU has no energy counter",
    **dict.fromkeys(("train_loss", "test_loss"), "the training diverged: its loss is not a number"),
    "images_per_s": "the number of images in a batch is not known",
}


def run_figures(history: Sequence[Mapping[str, Any]], run: Launch, profile: Profile) -> dict[str, Any]:
    """Figures of a run by name, None for one that is missing, and under ``reasons`` why it is.

    Accuracies and losses are those after the last epoch, and the best test accuracy of all; utilisations are means over
    the run, of the processor as a share of all usable cores; step and throughput are those of steady steps; the memory
    is that of the GPU, without one that of all processes [bytes].

    Args:
        history: A row per epoch, as the training writes them; a loss that is not a number is None.
        run: Run of the script.
        profile: Profile of that run.
    """
    last = history[-1]
    is_on_gpu = profile.device.startswith("cuda")
    found: dict[str, Any] = {
        "train_accuracy": last["train_acc"],
        "test_accuracy": last["test_acc"],
        "train_loss": last["train_loss"],
        "test_loss": last["test_loss"],
        "best_test_accuracy": max(row["test_acc"] for row in history),
        "gpu_utilisation": run.telemetry.get("gpu_busy_fraction_mean") if is_on_gpu else None,
        "cpu_utilisation": profile.cpu_utilisation,
        "cpu_time_s": max((sample.cpu_s for sample in run.samples), default=0.0),
        "step_time_s": profile.step_time_s,
        "images_per_s": profile.throughput_samples_per_s,
        "peak_memory_bytes": profile.device_peak_bytes or profile.peak_memory_bytes,
        "energy_j": run.telemetry.get("gpu_energy_j") if is_on_gpu else None,
        "wall_s": profile.wall_s,
    }
    reasons = {
        name: _NO_GPU if name in ("gpu_utilisation", "energy_j") and not is_on_gpu else words
        for name, words in _REASONS.items()
        if found[name] is None
    }
    return {**found, "reasons": reasons}


def usage_rows(
    samples: Sequence[TreeSample],
    gpu_busy: Sequence[tuple[float, float]],
    *,
    begin_s: float,
    num_cores: float,
) -> list[dict[str, float | None]]:
    """Use over time, a row between two samples of the processes: ``time_s``, ``cpu``, ``memory_bytes`` and ``gpu``.

    Args:
        samples: Samples of the processes, in order.
        gpu_busy: Times at which the GPU was sampled [s], with the busy share at each.
        begin_s: Start of the run, on the same clock as the samples [s].
        num_cores: Number of cores that the run may use.
    """
    return [
        {
            "time_s": after.time_s - begin_s,
            "cpu": max(0.0, after.cpu_s - before.cpu_s) / max(after.time_s - before.time_s, 1e-3) / num_cores,
            "memory_bytes": float(after.memory_bytes),
            "gpu": min(gpu_busy, key=lambda look: abs(look[0] - after.time_s))[1] if gpu_busy else None,
        }
        for before, after in pairwise(samples)
    ]


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


def chosen_scenarios(name: str, *, num_cores: int, epochs: int, is_gpu: bool = False) -> tuple[Scenario, ...]:
    """The scenarios with this name, after the baseline, with which they are compared; each starts from those before it.

    Args:
        name: Name of a scenario, or ``all``.
        num_cores: Number of cores that workers may use.
        epochs: Number of epochs of a whole run; half as many are tried as well.
        is_gpu: True if the scenarios run on a GPU.

    Raises:
        UsageError: No scenario has this name.
    """
    known = (
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
    names = ["all", *(each.name for each in known)]
    if name not in names:
        raise UsageError(f"expected a scenario ({', '.join(names)}), got '{name}'{near_matches(name, names)}")
    return tuple(each for each in known if name == "all" or each.name in ("baseline", name))


def training_command(data: Path, *, epochs: int, weights: str) -> tuple[str, ...]:
    """The command of the training.

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
    return (sys.executable, "-m", "studies.scenarios.training", *fixed)


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("train accuracy", "train_accuracy", format_percent),
    ("test accuracy", "test_accuracy", format_percent),
    ("train loss", "train_loss", lambda v: f"{v:.4f}"),
    ("test loss", "test_loss", lambda v: f"{v:.4f}"),
    ("GPU utilisation", "gpu_utilisation", format_percent),
    ("CPU utilisation", "cpu_utilisation", format_percent),
    ("CPU time", "cpu_time_s", format_duration_s),
    ("step", "step_time_s", format_duration_s),
    ("images/s", "images_per_s", lambda v: f"{v:,.1f}"),
    ("memory", "peak_memory_bytes", format_bytes),
    ("energy of the GPU", "energy_j", format_energy_j),
    ("whole run", "wall_s", format_duration_s),
)
_TITLES = {name: title for title, name, _ in _ROWS}


def page(folder: Path, runs: Sequence[Run]) -> RenderableType:
    """One column per scenario."""
    names = [run["scenario"] for run in runs]
    made = table(("", *names), left=("",), fold=("", *names))
    for title, name, form in _ROWS:
        made.add_row(title, *("-" if run[name] is None else form(run[name]) for run in runs))
    made.add_row("resolution", *(f"{run['image_size']} x {run['image_size']}" for run in runs))
    lines = [Text(f"{run['scenario']}: {_changes(run)}") for run in runs]
    reasons = {f"{_TITLES[name]}: {words}" for run in runs for name, words in run["reasons"].items()}
    notes = [Text(f"note: {reason}", style="dim") for reason in sorted(reasons)]
    return Group(made, Text(""), *lines, Text(f"files: {folder}"), *notes)


def _changes(run: Run) -> str:
    arguments = [f"{flag} {value}" for flag, value in run["arguments"].items()]
    hooks = [f"{name}={value}" for name, value in run["hooks"].items()]
    return ", ".join([*arguments, *hooks]) or "the script as it is"


_SMOOTHED = 5


def write_plots(folder: Path, runs: Sequence[Run]) -> None:
    """Writes ``training_loss_comparison.png``, ``training_accuracy_comparison.png`` and ``utilisation.png``.

    Raises:
        FailureError: A file cannot be written.
    """
    _curves(folder / "training_loss_comparison.png", runs, "loss", "loss", 1.0)
    _curves(folder / "training_accuracy_comparison.png", runs, "acc", "accuracy [%]", 100.0)
    _utilisation(folder / "utilisation.png", runs)


def _curves(path: Path, runs: Sequence[Run], name: str, label: str, factor: float) -> None:
    with drawn(path, width_in=9.6, height_in=4.6) as figure:
        for axes, part in zip(figure.subplots(1, 2, sharey=True), ("train", "test"), strict=True):
            for index, run in enumerate(runs):
                epochs, values = ([row[key] for row in run["history"]] for key in ("epoch", f"{part}_{name}"))
                # Later curves are thinner: where they meet, those below can be seen.
                look = {"linewidth": max(1.2, 3.6 - 0.8 * index), "markersize": 9 - 1.5 * index}
                axes.plot(epochs, _curve(values, factor), label=run["scenario"], **look_of(index), **look)
            axes.set(title=part, xlabel="epoch")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.grid(visible=True, alpha=0.3)
        # Both panels share the axis; a limit that is set before the last curve would not follow it.
        axes.set_ylim(bottom=0, top=102 if name == "acc" else 1.05 * axes.get_ylim()[1])
        figure.supylabel(label)
        _legend(figure, axes)


def _curve(values: Sequence[float | None], factor: float) -> list[float]:
    """Values of a curve with a gap where one is missing."""
    return [math.nan if value is None else factor * value for value in values]


def _utilisation(path: Path, runs: Sequence[Run]) -> None:
    """CPU, memory and, where there is one, GPU over the time of each final run."""
    panels = [("cpu", "CPU [% of all cores]", 100.0), ("memory_bytes", "memory [GiB]", 1 / 1024**3)]
    if any(row["gpu"] is not None for run in runs for row in run["utilisation"]):
        panels.insert(0, ("gpu", "GPU busy [%]", 100.0))
    with drawn(path, width_in=9.6, height_in=1.0 + 2.0 * len(panels)) as figure:
        grid = figure.subplots(len(panels), 1, sharex=True)
        for axes, (name, label, factor) in zip(grid, panels, strict=True):
            for index, run in enumerate(runs):
                times_s, values = ([row[key] for row in run["utilisation"]] for key in ("time_s", name))
                look = {"label": run["scenario"], "color": look_of(index)["color"], "linewidth": 1.4}
                axes.plot(times_s, _smoothed(_curve(values, factor)), **look)
            axes.set(ylabel=label)
            axes.set_ylim(bottom=0, top=1.05 * axes.get_ylim()[1])
            axes.grid(visible=True, alpha=0.3)
        axes.set(xlabel=f"time since the start of the run [s]; means of {_SMOOTHED} looks")
        _legend(figure, axes)


def _smoothed(values: Sequence[float]) -> list[float]:
    """Mean of each reading with its neighbours, because a quarter of a second alone is mostly noise."""
    reach = _SMOOTHED // 2
    return [float(np.mean(values[max(0, i - reach) : i + reach + 1])) for i in range(len(values))]


def _legend(figure: Any, axes: Any) -> None:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize="small")
