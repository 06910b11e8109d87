"""``forerun.predict``: one run, a search without axes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from forerun.base.answers import fields_of
from forerun.base.errors import InvalidSetupError
from forerun.base.extras import needing
from forerun.cost.time.weights import CostModel
from forerun.prediction.estimate import Estimate
from forerun.prediction.models import TracedModels
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import Device
from forerun.question.model import is_keras
from forerun.question.options import RunOptions, with_common_settings
from forerun.question.run import Run
from forerun.search.estimates import estimate_of, run_from

if TYPE_CHECKING:
    import torch

    from forerun.search.advise import Way


@dataclass(frozen=True, kw_only=True)
class Prediction(Estimate):
    """The answer of ``predict``: an estimate that also says what would make its run fit."""

    @cached_property
    def ways_to_fit(self) -> tuple[Way, ...]:
        """Changes that let the run fit, where it does not; they are predicted when first asked for."""
        if self.fits != "no":
            return ()
        from forerun.base.stages import stage
        from forerun.search.advise import ways_to_fit

        with stage("looking for what would make it fit"):
            return ways_to_fit(self)

    def json_fields(self) -> dict[str, Any]:
        """The fields of an estimate, and the ways to fit where it does not."""
        found = fields_of(self)
        return {**found, "ways_to_fit": self.ways_to_fit} if self.fits == "no" else found


@with_common_settings(RunOptions)
def predict(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    inputs: Any = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> Prediction:
    """Predicts time, memory, energy and cost of training a model, without the devices.

    Args:
        model: An ``nn.Module``, a ``LightningModule``, a ``Trainer`` of Transformers, a ``keras.Model``, a
            specification such as ``torchvision:resnet50`` (see docs/models.md), or a whole ``Run``.
        device: Catalogue name, driver name, TOML file, ``here``, a ``Device``, or ``4x8xh100-sxm``: nodes x devices x
            name. None with a ``Run``.
        inputs: One batch for a module, of tensors in any structure, or the ``DataLoader`` that gives it. Its first axis
            is the batch size unless you give another.
        cost_model: The cost model to predict with; the shipped one, or a calibration of the device, if None.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run, see ``forerun.RunOptions`` and ``forerun predict --help``.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced, or the cost model could not be read.

    Examples:
        >>> import forerun
        >>> forerun.predict("torchvision:resnet18", device="a100-sxm4-40gb").fits
        'yes'
    """
    given: Any = options
    if not isinstance(model, (str, Run)) and not is_keras(model):
        with needing("a model that is an object"):
            from forerun.tracing.models.training_objects import as_module
        model, found = as_module(model, inputs, options)
        # What the user says goes before what an object says of itself.
        given = {**found, **{name: value for name, value in options.items() if value is not None}}
    elif inputs is not None:
        raise InvalidSetupError(
            "inputs belong to a module; give input_shape, image_size or sequence_length instead"
        )
    run = run_from(model, device, given)
    estimate = estimate_of(run, TracedModels(use_cache=use_cache), cost_model).estimate
    return Prediction(**fields_of(estimate))
