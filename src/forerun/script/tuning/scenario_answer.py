"""The answer of ``tune_scenarios``: the final run of each scenario, and the result of its search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from forerun.base.answers import Answer, fields_of
from forerun.script.profiling.launch import Launch, TreeSample
from forerun.script.profiling.profile import Profile
from forerun.script.tuning.configuration import ScriptConfiguration


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioStudy:
    """Result of the search of a scenario.

    Attributes:
        best: Best configuration.
        values: Values of the best configuration by parameter.
        num_trials: Number of all trials.
        num_out_of_memory: Number of trials that ran out of memory.
        num_rejected: Number of trials that the memory model rejected before they started.
    """

    best: ScriptConfiguration
    values: Mapping[str, Any]
    num_trials: int
    num_out_of_memory: int
    num_rejected: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRun(Answer):
    """The final run of a scenario.

    Attributes:
        scenario: Name of the scenario.
        configuration: Arguments and hooks of the run.
        image_size: Height and width of the images [pixels].
        study: Result of the search; None for the script as it is.
        figures: Table of the run's figures.
        history: A row per epoch, as the script writes them: ``epoch``, ``train_loss``, ``train_acc`` ...
        utilisation: Use of processor, memory and GPU over time.
    """

    scenario: str
    configuration: ScriptConfiguration
    image_size: int
    study: ScenarioStudy | None
    figures: RunFigures
    history: tuple[Mapping[str, float | None], ...]
    utilisation: tuple[Usage, ...]

    def json_fields(self) -> dict[str, Any]:
        """The fields as JSON; those of the configuration and the table stand at the same level as the others."""
        return {
            "scenario": self.scenario,
            **fields_of(self.configuration),
            "image_size": self.image_size,
            "study": self.study,
            **fields_of(self.figures),
            "history": self.history,
            "utilisation": self.utilisation,
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        """The run from the output of ``as_dict``.

        Raises:
            KeyError, TypeError: A field is missing or has another type.
        """
        study = found["study"]
        return cls(
            scenario=found["scenario"],
            configuration=ScriptConfiguration(arguments=found["arguments"], hooks=found["hooks"]),
            image_size=found["image_size"],
            study=None
            if study is None
            else ScenarioStudy(**{**study, "best": ScriptConfiguration(**study["best"])}),
            figures=RunFigures(**{field.name: found[field.name] for field in fields(RunFigures)}),
            history=tuple(found["history"]),
            utilisation=tuple(Usage(**row) for row in found["utilisation"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioRuns(Answer):
    """The final runs of all requested scenarios.

    Attributes:
        folder: Folder of the files.
        scenarios: Final runs in order; each scenario starts from the result of those before it.
    """

    folder: Path
    scenarios: tuple[ScenarioRun, ...]


_NO_GPU = "the run was on a processor, for which there are no GPU figures"
_REASONS = {
    "gpu_utilisation": "the driver does not report the utilisation of the GPU",
    "energy_j": "the GPU has no energy counter",
    "train_loss": "the training diverged: its loss is not a number",
    "test_loss": "the training diverged: its loss is not a number",
    "images_per_s": "the number of images in a batch is not known",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Table of a run's figures; a missing figure is None.

    Attributes:
        train_accuracy, test_accuracy, train_loss, test_loss: Accuracies and losses after the last epoch.
        best_test_accuracy: Best test accuracy of all epochs.
        gpu_utilisation: Mean share of the run's time in which kernels ran, as the driver reports it.
        cpu_utilisation: Used share of all usable cores between the first and the last step.
        cpu_time_s: Processor time of all processes of the run [s].
        step_time_s, images_per_s: Mean time [s] and throughput of steady steps.
        peak_memory_bytes: Peak memory of the GPU; without a GPU, of all processes [bytes].
        energy_j: Energy of the GPU [J].
        wall_s: Time of the whole run [s].
        reasons: Reason for each missing figure, by its name.
    """

    train_accuracy: float
    test_accuracy: float
    train_loss: float | None
    test_loss: float | None
    best_test_accuracy: float
    gpu_utilisation: float | None
    cpu_utilisation: float
    cpu_time_s: float
    step_time_s: float
    images_per_s: float | None
    peak_memory_bytes: float
    energy_j: float | None
    wall_s: float
    reasons: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that a run used between two samples of its processes.

    Attributes:
        time_s: Time since the start [s].
        cpu: Used share of the cores.
        memory_bytes: Memory of all processes [bytes].
        gpu: Share of time with kernels at the nearest sample; None without a GPU.
    """

    time_s: float
    cpu: float
    memory_bytes: float
    gpu: float | None


def run_figures(history: Sequence[Mapping[str, Any]], run: Launch, profile: Profile) -> RunFigures:
    """The table of a run's figures.

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
    return RunFigures(**found, reasons=reasons)


def usage_rows(
    samples: Sequence[TreeSample],
    gpu_busy: Sequence[tuple[float, float]],
    *,
    begin_s: float,
    num_cores: float,
) -> tuple[Usage, ...]:
    """Resources that a run used over time; a row lies between two samples of its processes.

    Args:
        samples: Samples of the processes, in order.
        gpu_busy: Times at which the GPU was sampled [s], with the busy share at each.
        begin_s: Start of the run, on the same clock as the samples [s].
        num_cores: Number of cores that the run may use.
    """
    return tuple(
        Usage(
            time_s=after.time_s - begin_s,
            cpu=max(0.0, after.cpu_s - before.cpu_s) / max(after.time_s - before.time_s, 1e-3) / num_cores,
            memory_bytes=float(after.memory_bytes),
            gpu=_nearest(gpu_busy, after.time_s),
        )
        for before, after in pairwise(samples)
    )


def _nearest(gpu_busy: Sequence[tuple[float, float]], time_s: float) -> float | None:
    return min(gpu_busy, key=lambda look: abs(look[0] - time_s))[1] if gpu_busy else None
