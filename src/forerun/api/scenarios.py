"""The scenarios of system D, run one after the other."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from forerun.api.profiling import device_index
from forerun.api.tuning import tune
from forerun.errors import ScriptError, UsageError
from forerun.hardware import describe_host
from forerun.measurement.device_lock import lock_device
from forerun.profiling.files import write_json
from forerun.profiling.hooks.settings import HookSettings
from forerun.profiling.launch import Launch, launch
from forerun.profiling.profile import Profile, summarise_run
from forerun.profiling.recorded import read_processes, training_process
from forerun.tuning.configuration import Configuration, with_arguments
from forerun.tuning.scenarios.plan import Scenario, chosen_scenarios, training_command
from forerun.tuning.trial import say_nothing

__all__ = ["tune_scenarios"]

_METRIC = "test_acc"


def tune_scenarios(
    scenario: str,
    *,
    data: Path | None,
    task: str = "squeezenet",
    weights: str = "imagenet",
    epochs: int = 10,
    budget: str = "15min",
    folder: Path = Path("forerun-study"),
    seed: int | None = None,
    say: Callable[[str], None] = say_nothing,
) -> list[dict[str, Any]]:
    """Trains the built-in task as it is, then as each scenario finds best; each final run is whole and measured.

    Args:
        scenario: ``baseline``, ``resolution``, ``hyperparameters``, ``hardware`` or ``all``.
        data: Folder with ``seg_train`` and ``seg_test``, a folder per class in each.
        task: ``squeezenet``.
        weights: ``imagenet`` or ``none``.
        epochs: Of a whole run.
        budget: Of each scenario's study.
        folder: Of all files that are written.
        seed: Of the sampler.
        say: Receives lines about the progress.

    Raises:
        UsageError: The folder or a name cannot be used.
        ScriptError: A run fails.
    """
    if task != "squeezenet":
        raise UsageError(f"expected the task squeezenet, got '{task}'")
    if data is None:
        raise UsageError(
            "a scenario needs images: --data FOLDER with seg_train and seg_test, a folder per class"
        )
    command = training_command(data, epochs=epochs, weights=weights)
    cores = int(describe_host().num_usable_cores)
    found: list[dict[str, Any]] = []
    configuration = Configuration(arguments={}, hooks={})
    for each in chosen_scenarios(scenario, num_cores=cores, epochs=epochs):
        say(f"scenario {each.name}: {each.words}")
        base = with_arguments(configuration.command(command), dict(each.settings or {}))
        study = _search(each, base, configuration, budget, folder / each.name, seed, say)
        if study is not None:
            configuration = Configuration(
                arguments={
                    **configuration.arguments,
                    **dict(each.settings or {}),
                    **study["best"]["arguments"],
                },
                hooks={**configuration.hooks, **study["best"]["hooks"]},
            )
        found.append(_whole_run(each, command, configuration, folder / each.name, study))
    write_json(folder / "scenarios.json", {"scenarios": found})
    return found


def _search(
    scenario: Scenario,
    base: tuple[str, ...],
    so_far: Configuration,
    budget: str,
    folder: Path,
    seed: int | None,
    say: Callable[[str], None],
) -> dict[str, Any] | None:
    if scenario.objective is None:
        return None
    result = tune(
        base,
        budget=budget,
        space=scenario.space(),
        objective=scenario.objective,
        study=folder / "study",
        metric=_METRIC,
        check=False,
        seed=seed,
        say=say,
    )
    if result.best is None:
        raise ScriptError(f"scenario {scenario.name}: {'; '.join(result.notes)}")
    return {
        "best": {"arguments": result.best.arguments, "hooks": result.best.hooks},
        "values": result.best_values,
        "num_trials": len(result.trials),
        "num_out_of_memory": result.num_out_of_memory,
        "num_rejected": result.num_rejected,
    }


def _whole_run(
    scenario: Scenario,
    command: tuple[str, ...],
    configuration: Configuration,
    folder: Path,
    study: dict[str, Any] | None,
) -> dict[str, Any]:
    words = (*configuration.command(command), "--out", str(folder))
    device = device_index()
    with tempfile.TemporaryDirectory(prefix="forerun-") as records, lock_device(device, wait_s=86400.0):
        settings = HookSettings(folder=records, parent_pid=0, knobs=configuration.hooks)
        run = launch(words, settings, device_index=device)
        if run.outcome == "interrupted":
            raise KeyboardInterrupt
        process = training_process(read_processes(Path(records)))
        if run.outcome != "done" or process is None:
            said = run.lines[-1].text if run.lines else "nothing"
            raise ScriptError(f"scenario {scenario.name} {run.outcome}: it said: {said}")
        profile = summarise_run(
            run, process, num_ranks=1, num_usable_cores=describe_host().num_usable_cores, epochs=None
        )
    history = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return {
        "scenario": scenario.name,
        "arguments": configuration.arguments,
        "hooks": configuration.hooks,
        "study": study,
        **_figures(history, run, profile),
        "history": history,
        "utilisation": _utilisation(run, profile.num_usable_cores),
    }


def _figures(history: list[dict[str, float]], run: Launch, profile: Profile) -> dict[str, Any]:
    last = history[-1]
    sensors = run.telemetry
    return {
        "train_accuracy": last["train_acc"],
        "test_accuracy": last["test_acc"],
        "train_loss": last["train_loss"],
        "test_loss": last["test_loss"],
        "best_test_accuracy": max(row["test_acc"] for row in history),
        "gpu_utilisation": sensors.get("gpu_busy_fraction_mean"),
        "cpu_utilisation": profile.cpu_utilisation,
        "cpu_time_s": max((sample.cpu_s for sample in run.samples), default=0.0),
        "step_time_s": profile.step_time_s,
        "images_per_s": profile.throughput_samples_per_s,
        "peak_memory_bytes": profile.device_peak_bytes or profile.peak_memory_bytes,
        "energy_j": sensors.get("gpu_energy_j"),
        "wall_s": profile.wall_s,
    }


def _utilisation(run: Launch, num_cores: float) -> list[list[float]]:
    """Time since the start [s], share of the cores and memory [bytes] between looks at the processes."""
    times = np.asarray([sample.time_s for sample in run.samples]) - run.begin_s
    used = np.asarray([sample.cpu_s for sample in run.samples])
    memory = np.asarray([float(sample.memory_bytes) for sample in run.samples])
    if len(times) < 2:
        return []
    shares = np.diff(used) / np.maximum(np.diff(times), 1e-3) / num_cores
    return [[float(t), float(s), float(m)] for t, s, m in zip(times[1:], shares, memory[1:], strict=True)]
