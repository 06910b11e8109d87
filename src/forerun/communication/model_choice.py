"""Choice of a speed model by cross-validation on the measured points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from forerun.communication.all_reduce_models import ALL_REDUCE_MODELS, AveragedModel
from forerun.communication.log_quadratic import LogQuadraticModel
from forerun.communication.server_models import OptimusModel
from forerun.communication.smoothing import SmoothedModel
from forerun.communication.speed_models import FittedSpeed, SpeedModel
from forerun.communication.speed_points import SpeedPoint, refuse_too_few
from forerun.errors import InvalidSetupError

__all__ = ["SERVER_MODELS", "SpeedChoice", "choose_speed_model", "left_out_errors", "models_for"]

SERVER_MODELS: dict[str, Callable[[], SpeedModel]] = {
    "optimus-synchronous": OptimusModel,
    "optimus-asynchronous": partial(OptimusModel, synchronous=False),
    "log-quadratic": LogQuadraticModel,
    "server-average": lambda: AveragedModel((OptimusModel(), LogQuadraticModel()), "server-average"),
}
"""Models of parameter-server training by name."""

_MOST_FOLDS = 10
_LEAST_POINTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChoice:
    """The chosen model and the errors of all.

    Attributes:
        fitted: The chosen model, fitted to all points.
        errors: Mean |predicted / measured - 1| of left-out points by model; infinite where it could not be fitted.
    """

    fitted: FittedSpeed
    errors: Mapping[str, float]


def models_for(points: Sequence[SpeedPoint]) -> dict[str, Callable[[], SpeedModel]]:
    """Models that suit the points: those of parameter servers if all have servers, else those of all-reduce.

    Raises:
        InvalidSetupError: Some have servers and some do not.
    """
    with_servers = [point.num_servers > 0 for point in points]
    if any(with_servers) and not all(with_servers):
        raise InvalidSetupError(
            "expected parameter servers at every point or at none, got both; split the points into two files"
        )
    forms = SERVER_MODELS if all(with_servers) and points else ALL_REDUCE_MODELS
    return forms | {
        f"{name}-smoothed": partial(SmoothedModel, make, f"{name}-smoothed") for name, make in forms.items()
    }


def choose_speed_model(points: Sequence[SpeedPoint], name: str | None = None) -> SpeedChoice:
    """Fits the model that predicts left-out points best, or the named one.

    Args:
        points: Measured points.
        name: Name of a model; None for a choice.

    Raises:
        InvalidSetupError: The points do not suffice for any model, or the name is not known.
    """
    refuse_too_few(points, _LEAST_POINTS, "a speed model")
    models = models_for(points)
    if name is not None:
        if name not in models:
            raise InvalidSetupError(f"expected a speed model of {', '.join(models)}, got '{name}'")
        return SpeedChoice(
            fitted=models[name]().fit(points), errors={name: left_out_errors(models[name], points)}
        )
    first: InvalidSetupError | None = None
    errors: dict[str, float] = {}
    fits: dict[str, FittedSpeed] = {}
    for key, make in models.items():
        try:
            fits[key] = make().fit(points)
        except InvalidSetupError as error:
            first = first or error
            continue
        errors[key] = left_out_errors(make, points)
    if not fits:
        assert first is not None
        raise first
    best = min(errors, key=lambda key: (errors[key], not key.endswith("smoothed"), key))
    return SpeedChoice(fitted=fits[best], errors=errors)


def left_out_errors(make: Callable[[], SpeedModel], points: Sequence[SpeedPoint]) -> float:
    """Mean |predicted / measured - 1| over points that were left out, all repetitions of a size together.

    Infinite if a fit without some of the points is not possible.
    """
    sizes = sorted({point.size for point in points})
    num_folds = min(len(sizes), _MOST_FOLDS)
    found: list[float] = []
    for fold in range(num_folds):
        out = set(sizes[fold::num_folds])
        kept = [point for point in points if point.size not in out]
        asked = [point for point in points if point.size in out]
        try:
            predicted = make().fit(kept).step_s(asked)
        except InvalidSetupError:
            return float("inf")
        measured = np.asarray([point.measured_s for point in asked])
        found += np.abs(predicted / measured - 1).tolist()
    return float(np.mean(found))
