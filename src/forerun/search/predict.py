"""``forerun.predict``: one run, a search without axes; and the estimates of the runs of a search, one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

from forerun.base.answers import fields_of
from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.base.extras import loaded, needing
from forerun.cost.time.weights import CostModel
from forerun.prediction.estimate import Estimate
from forerun.prediction.estimate_run import RunEstimate, estimate_run
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import Device
from forerun.question.model import is_keras
from forerun.question.options import RunOptions, with_common_settings
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.question.sharing import Strategy

if TYPE_CHECKING:
    import torch

    from forerun.search.advise import Way
    from forerun.search.search import Search


@dataclass(frozen=True, kw_only=True)
class Prediction(Estimate):
    """The answer of ``predict``: an estimate that also says what would make its run fit."""

    @cached_property
    def ways_to_fit(self) -> tuple[Way, ...]:
        """Changes that let the run fit, where it does not; they are predicted when first asked for."""
        if self.fits != "no":
            return ()
        from forerun.base.stages import stage

        # By its name: advice rests on the estimates of this module.
        ways: tuple[Way, ...]
        with stage("looking for what would make it fit"):
            ways = loaded("forerun.search.advise:ways_to_fit")(self)
        return ways

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
        unknown = ", ".join(repr(name) for name in options if name not in declared(RunOptions))
        raise InvalidSetupError(
            f"expected the device of the run, got {f'the unknown setting {unknown}' if unknown else 'none'}; "
            "give device='a100-sxm4-40gb' or another"
        )
    return Run.of(model, device=device, **options)


def estimates(
    search: Search, models: TracedModels, cost_model: CostModel | None = None, *, skips_refused: bool = False
) -> Iterator[RunEstimate | None]:
    """Estimates of the candidates of a search as ``predict`` makes them.

    Args:
        search: The run and its changes.
        models: Traced models.
        cost_model: The cost model of the run's device; of other devices the shipped one is taken.
        skips_refused: Whether a change that its model or device does not allow is None, not an error; what is only
            tried is not asked for its largest batch.

    Raises:
        UsageError, FailureError: As in ``predict``.
    """
    from forerun.question.recipes import with_captured_settings

    for change in search.changes():
        try:
            # Refuses what a captured script has decided; other models keep all open.
            with_captured_settings(search.run.model.model, change, one_device=True)
            run = search.run.with_(**change)
            # A calibration was measured on one device; what it corrects there says nothing of another.
            own = cost_model if run.cluster.device == search.run.cluster.device else None
            found = estimate_of(run, models, own, with_largest=not skips_refused)
        except ForerunError:
            if not skips_refused:
                raise
            yield None
        else:
            yield found


def estimate_of(
    run: Run, models: TracedModels, cost_model: CostModel | None = None, *, with_largest: bool = True
) -> RunEstimate:
    """The estimate of a run, with the step behind it, for every verb that answers about whole runs.

    With the strategy ``auto`` it is that of the best layout. ``with_largest`` asks for the largest batch as well, which
    of a large model takes longer than all else.

    Raises:
        UsageError, FailureError: As in ``predict``.
    """
    if run.sharing.strategy is Strategy.AUTO:
        # Others do without the modules of the search: a cached prediction is mostly imports.
        from forerun.search.layout_search import resolved

        run = resolved(run, models, cost_model)
    if run.samples.lengths is not None:
        from forerun.prediction.uneven_samples import epoch_estimate

        found: list[RunEstimate] = []

        def estimate_at(each: Run) -> Estimate:
            found.append(estimate_of(each, models, cost_model))
            return found[-1].estimate

        epoch = epoch_estimate(run, estimate_at)
        return replace(found[-1], estimate=epoch)
    setup = run.validation_setup
    return estimate_run(
        models.of(run),
        None if setup is None else models.of(run, setup),
        run,
        cost_model or cost_model_of(run),
        with_largest=with_largest,
    )
