"""``forerun.predict``: one run on one device or several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack

from forerun.api.layout_search import resolved
from forerun.api.models import TracedModels
from forerun.errors import InvalidSetupError
from forerun.hardware.cluster import Cluster
from forerun.hardware.device import Device
from forerun.optime.weights import CostModel
from forerun.prediction.cost_model import cost_model_of
from forerun.prediction.estimate import Estimate
from forerun.prediction.estimate_run import RunEstimate, estimate_run
from forerun.run.options import RunOptions
from forerun.run.run import Run
from forerun.run.settings import setting_names

if TYPE_CHECKING:
    import torch

__all__ = ["estimates_of", "predict", "run_from"]


def predict(
    model: str | torch.nn.Module | Run,
    *,
    device: str | Device | Cluster | None = None,
    cost_model: CostModel | None = None,
    use_cache: bool = True,
    **options: Unpack[RunOptions],
) -> Estimate:
    """Predicts time, memory, energy and cost of training a model, without the devices.

    Args:
        model: An ``nn.Module``, a ``keras.Model``, a specification such as ``torchvision:resnet50`` (see
            docs/models.md), or a whole ``Run``.
        device: Catalogue name, driver name, TOML file, ``here``, a ``Device``, or ``4x8xh100-sxm``: nodes x devices x
            name. None with a ``Run``.
        cost_model: The cost model to predict with; the shipped one, or a calibration of the device, if None.
        use_cache: Whether to use the cache of traced graphs.
        options: The settings of the run, see ``forerun.RunOptions`` and docs/commands.md.

    Raises:
        UsageError: The question must be changed.
        FailureError: The model could not be built or traced, or the cost model could not be read.

    Examples:
        >>> import forerun
        >>> forerun.predict("torchvision:resnet18", device="a100-sxm4-40gb").fits
        'yes'
    """
    run = run_from(model, device, options)
    return estimates_of([run], TracedModels(use_cache=use_cache), cost_model)[0].estimate


def run_from(model: Any, device: str | Device | Cluster | None, options: Any) -> Run:
    """The run of a call.

    Raises:
        UsageError: A whole run and parts of another are given, or no device is given, or a setting is not known.
    """
    if isinstance(model, Run):
        given = [name for name, value in {"device": device, **options}.items() if value is not None]
        if given:
            raise InvalidSetupError(
                f"a Run is a whole question, got {', '.join(given)} beside it; change the run, or leave them out"
            )
        return model
    if device is None:
        unknown = ", ".join(repr(name) for name in options if name not in setting_names(RunOptions))
        raise InvalidSetupError(
            f"expected the device of the run, got {f'the unknown setting {unknown}' if unknown else 'none'}; "
            "give device='a100-sxm4-40gb' or another"
        )
    return Run.of(model, device=device, **options)


def estimates_of(
    runs: list[Run], models: TracedModels, cost_model: CostModel | None = None
) -> list[RunEstimate]:
    """Estimates of runs, with the steps behind them, for every verb that answers about whole runs.

    Raises:
        UsageError, FailureError: As in ``predict``.
    """
    runs = [resolved(run, models, cost_model) for run in runs]
    return [
        estimate_run(models.of(run), models.validation_of(run), run, cost_model or cost_model_of(run))
        for run in runs
    ]
