"""Traced models and cost models of a plan: each model is traced once for everything that is asked about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from forerun.api.models import is_fixed, prepared_model
from forerun.errors import InvalidSetupError
from forerun.optime.correction_files import find_calibration
from forerun.optime.weights import OpTimeWeights, load_weights, shipped_weights_path
from forerun.planner.candidates import Configuration
from forerun.planner.devices import DeviceOption
from forerun.prediction.step import PreparedModel, prepare
from forerun.run.model import ModelRequest
from forerun.run.setup import TrainingSetup
from forerun.tracing.trace import trace

__all__ = ["PlannedModels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedModels:
    """Where the planner's engine gets models from, see ``planner.engine.ModelSource``.

    Attributes:
        sequence_length: Tokens of one sample; None for the model's own.
        input_shape: Shape of one sample; None for the model's own, or that of a configuration's image size.
        use_cache: Whether to use the cache of traced graphs.
        stacks: Frameworks of the models, ``pytorch`` and ``keras``.
    """

    sequence_length: int | None = None
    input_shape: tuple[int, ...] | None = None
    use_cache: bool = True
    stacks: frozenset[str]
    _own: dict[tuple[ModelRequest, TrainingSetup], PreparedModel] = field(default_factory=dict)

    def prepared(self, configuration: Configuration, setup: TrainingSetup) -> PreparedModel:
        """The traced step of a configuration, for any batch size if the model allows.

        Raises:
            InvalidSetupError: The model runs at another batch size only.
            UsageError, FailureError: It cannot be built or traced.
        """
        request = ModelRequest(
            model=configuration.model,
            image_size=configuration.image_size,
            input_shape=self.input_shape,
            sequence_length=self.sequence_length,
        )
        general = self._traced(request, replace(setup, batch_size_per_device=32))
        if general.graph.only_batch_size in (None, setup.batch_size_per_device):
            return general
        exact = self._traced(request, setup)
        if exact.graph.only_batch_size not in (None, setup.batch_size_per_device):
            raise InvalidSetupError(
                f"{configuration.model} runs at batch size {exact.graph.only_batch_size} only, got "
                f"{setup.batch_size_per_device}; plan with that batch size alone"
            )
        return exact

    def _traced(self, request: ModelRequest, setup: TrainingSetup) -> PreparedModel:
        if self.use_cache and is_fixed(request.model):
            return prepared_model(request, setup)
        key = (request, setup)
        if key not in self._own:
            self._own[key] = prepare(trace(request, setup, use_cache=self.use_cache))
        return self._own[key]

    def weights(self, option: DeviceOption) -> OpTimeWeights:
        """The cost model of a device: for ``here`` its calibration, if all models are of one framework."""
        own = None
        # No calibration is good for models of both frameworks.
        if option.name == "here" and len(self.stacks) == 1:
            own = find_calibration(option.device, *self.stacks)
        return own or load_weights(shipped_weights_path())
