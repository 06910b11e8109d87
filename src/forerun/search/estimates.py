"""Estimates of whole runs, one at a time: what every verb of the search asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from forerun.base.errors import ForerunError, InvalidSetupError
from forerun.cost.time.weights import CostModel
from forerun.prediction.estimate import Estimate
from forerun.prediction.estimate_run import RunEstimate, estimate_run
from forerun.prediction.models import TracedModels, cost_model_of
from forerun.question.devices.cluster import Cluster
from forerun.question.devices.device import Device
from forerun.question.options import RunOptions
from forerun.question.run import Run
from forerun.question.settings import declared
from forerun.question.sharing import Strategy

if TYPE_CHECKING:
    from forerun.search.search import Search


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
