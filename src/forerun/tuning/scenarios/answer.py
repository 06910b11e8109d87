"""The answer of ``tune_scenarios``: the final run of each scenario, and what its search found."""

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
    """The search of a scenario.

    Attributes:
        best: The best configuration.
        values: Its values by parameter.
        num_trials: Trials in all.
        num_out_of_memory: Trials that ran out of memory.
        num_rejected: Trials the memory model rejected before they started.
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
        scenario: Its name.
        configuration: What the script was run with.
        image_size: Height and width of the images [pixels].
        study: The search; None for the script as it is.
        figures: The table of the run.
        history: A row per epoch, as the script writes them: ``epoch``, ``train_loss``, ``train_acc`` ...
        utilisation: What the run used over time.
    """

    scenario: str
    configuration: ScriptConfiguration
    image_size: int
    study: ScenarioStudy | None
    figures: RunFigures
    history: tuple[Mapping[str, float | None], ...]
    utilisation: tuple[Usage, ...]

    def json_fields(self) -> dict[str, Any]:
        """The fields; the configuration and the table stand beside the others."""
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
        """The run of which ``as_dict`` made this.

        Raises:
            KeyError, TypeError: It lacks a field, or one is of another kind.
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
    """The final runs of all scenarios asked for.

    Attributes:
        folder: Where the files are.
        scenarios: The runs, each from what those before it found.
    """

    folder: Path
    scenarios: tuple[ScenarioRun, ...]
