"""The answer of ``tune_scenarios``: the final run of each scenario, and the result of its search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from forerun.answers import Answer, fields_of
from forerun.tuning.configuration import ScriptConfiguration
from forerun.tuning.scenarios.figures import RunFigures, Usage

__all__ = ["ScenarioRun", "ScenarioRuns", "ScenarioStudy"]


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
