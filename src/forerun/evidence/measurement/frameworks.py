"""Frameworks beside PyTorch whose steps are measured and traced: found by their entry points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.base.plugins import plugin, plugin_names
from forerun.evidence.measurement.settings import StepSettings
from forerun.evidence.records.measurement import Measurement, Scalar
from forerun.question.devices.device import Device
from forerun.question.setup import Precision, TrainingSetup

if TYPE_CHECKING:  # loads NumPy, which the process that starts the children does without
    from forerun.graph.graph import Graph

FRAMEWORKS = "forerun.frameworks"
"""Entry points of frameworks by name."""

PYTORCH = "pytorch"


class Framework(Protocol):
    """A framework that has a runner of its own, as measuring and fitting see it."""

    @property
    def run(self) -> str:
        """Function that runs a job in a child, as ``module:function``."""
        ...

    @property
    def preloaded(self) -> Sequence[str]:
        """Modules that the server of the children imports once."""
        ...

    def check_installed(self, purpose: str) -> None:
        """Refuses a machine without the framework."""
        ...

    def check_grid(self, network: str, optimizer: str) -> None:
        """Refuses a grid whose networks or optimizer it does not have."""
        ...

    def check_layers(self, optimizers: Sequence[str], precision: Precision) -> None:
        """Refuses layers with optimizers or a precision that it does not have."""
        ...

    def check_steps(self, settings: StepSettings) -> None:
        """Refuses steps of a model that it cannot run."""
        ...

    def check_model(self, model: str, setup: TrainingSetup) -> None:
        """Refuses a misspelt model or an impossible setup without loading the framework."""
        ...

    def server_parameters(self, settings: StepSettings, optimizer: str, device: str) -> Mapping[str, Scalar]:
        """Parameters of a job under parameter servers, checked."""
        ...

    def graphs(
        self, measurements: Sequence[Measurement], device: Device
    ) -> dict[str, tuple[Graph, TrainingSetup] | ForerunError]:
        """Graph and setup of each measured step or layer by its key, or why there is none."""
        ...


def framework_of(name: str) -> Framework | None:
    """The framework of a name; None for PyTorch, whose runners are those of this room.

    Raises:
        InvalidSetupError: No installed package brings it.
    """
    if name == PYTORCH:
        return None
    found: Any = plugin(FRAMEWORKS, name)
    if found is None:
        raise InvalidSetupError(
            f"expected framework {' or '.join([PYTORCH, *plugin_names(FRAMEWORKS)])}, got {name!r}"
        )
    chosen: Framework = found
    return chosen


def preloaded_by(run: str) -> list[str]:
    """Modules that the server of the children imports for a function that runs jobs; unknown ones bring their own."""
    # A runner is a text that travels to the child, so the framework is found by it and not the other way round.
    for found in (plugin(FRAMEWORKS, name) for name in plugin_names(FRAMEWORKS)):
        if found.run == run:
            return list(found.preloaded)
    return []
