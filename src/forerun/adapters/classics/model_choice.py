"""Speed models of all-reduce training, fitted to few points, and the choice of a model by left-out points.

With K devices on N nodes, m samples per device and micro-step, s micro-steps:

    T = (s - 1) T_grad + (T_grad^g + T_sync^g)^(1/g)            g >= 1: 1 adds, infinity hides all

Pollux (Qiao et al. 2021, OSDI, section 3.2), seven parameters:

    T_grad = a_g + b_g m        T_sync = 0 (K = 1) | a_l + b_l (K-2) (one node) | a_n + b_n (K-2)

Ours, the ring of ``collectives`` with fitted link and stragglers, seven as well:

    T_grad = (a_g + b_g m) (1 + c_g E_K)        T_sync = 2 (K-1)/K v (1 + c_s E_K),  v = v_l (one node) | v_n

E_K is the expected maximum of K normal numbers. Few points do not determine seven parameters, so both are fitted as
most probable values under wide log-normal priors relative to the median point, with a loss that grows linearly for
outliers. Where a point names the exposed synchronisation of its step (as Pollux' agents report too),
the rest of it is a second observation, of T_grad.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from forerun.adapters.classics.server_models import OptimusModel
from forerun.adapters.classics.speed_models import (
    FittedSpeed,
    LogQuadraticModel,
    SmoothedModel,
    SpeedModel,
    SpeedPoint,
    measured_times,
    refuse_too_few,
    variances_along,
)
from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import Floats
from forerun.cost.communication.data_parallel import expected_normal_maximum

_NOISE = 0.08
_SYNC_WEIGHT = 0.5
_LEAST_POINTS = 3
_NODE_PRICE = 1.1
"""Least synchronisation between nodes over that inside one, where no point tells. Source: Pollux, section 4.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes of points as arrays, (points,)."""

    num_devices: Floats
    num_nodes: Floats
    batch_size: Floats
    num_passes: Floats
    waiting: Floats


def _sizes(points: Sequence[SpeedPoint]) -> _Sizes:
    devices = [point.num_devices for point in points]
    return _Sizes(
        num_devices=np.asarray(devices, dtype=float),
        num_nodes=np.asarray([point.num_nodes for point in points], dtype=float),
        batch_size=np.asarray([point.batch_size_per_device for point in points], dtype=float),
        num_passes=np.asarray([point.num_accumulation_steps for point in points], dtype=float),
        waiting=np.asarray([expected_normal_maximum(number) for number in devices]),
    )


Form = Callable[[Floats, _Sizes], tuple[Floats, Floats]]
"""Function from coefficients and sizes to T_grad and T_sync."""


def _pollux(theta: Floats, at: _Sizes) -> tuple[Floats, Floats]:
    grad = theta[0] + theta[1] * at.batch_size
    # Two devices pay the constant part alone, as in Pollux.
    more = np.maximum(0.0, at.num_devices - 2)
    sync = np.where(at.num_nodes == 1, theta[3] + theta[4] * more, theta[5] + theta[6] * more)
    return grad, np.where(at.num_devices == 1, 0.0, sync)


def _ring(theta: Floats, at: _Sizes) -> tuple[Floats, Floats]:
    grad = (theta[0] + theta[1] * at.batch_size) * (1 + theta[6] * at.waiting)
    # A ring sends each gradient twice but for one part (reduce-scatter, then all-gather).
    volume = 2 * (at.num_devices - 1) / at.num_devices
    sync = volume * np.where(at.num_nodes == 1, theta[3], theta[5]) * (1 + theta[4] * at.waiting)
    return grad, sync


def _step_s(form: Form, theta: Floats, at: _Sizes) -> tuple[Floats, Floats]:
    """Step and T_grad of every size, (points,) each [s]."""
    grad, sync = form(theta, at)
    # The coefficient is g - 1: positive as all are, it keeps a step between the larger of both parts and their sum.
    power = 1 + theta[2]
    # Powers of shares of the larger one: those of milliseconds would vanish at a large exponent.
    largest = np.maximum(grad, sync)
    joined = largest * ((grad / largest) ** power + (sync / largest) ** power) ** (1 / power)
    return (at.num_passes - 1) * grad + joined, grad


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorForm:
    """A form with its priors: means and widths of the logarithms of its coefficients.

    Attributes:
        name: Name of the model.
        form: The form.
        coefficients: Names, the exponent g - 1 third, synchronisation in a node and between nodes fourth and sixth.
        centre: Prior means; of times relative to the median step, of times per sample to it per median batch.
        width: Prior standard deviations.
        is_time: Whether a coefficient scales with the step.
    """

    name: str
    form: Form
    coefficients: tuple[str, ...]
    centre: tuple[float, ...]
    width: tuple[float, ...] = (1.5, 1.5, 1.0, 1.5, 1.5, 1.2, 1.5)
    is_time: tuple[bool, ...] = (True, True, False, True, True, True, True)

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Most probable coefficients of the points; see the head of the module.

        Raises:
            InvalidSetupError: There are fewer than three sizes, or a time is not above zero.
        """
        times, at = measured_times(points, _LEAST_POINTS, self.name), _sizes(points)
        offset: Floats = np.where(self.is_time, np.log(np.median(times)), 0.0)
        offset[1] -= np.log(np.median(at.batch_size))
        grad_s = np.asarray([_compute_s(point) for point in points])
        seen = np.isfinite(grad_s)

        # Logarithms keep coefficients positive, and the offset makes the priors those of a step of 1 s at a batch of 1.
        def residual(scaled: Floats) -> Floats:
            step, grad = _step_s(self.form, np.exp(scaled + offset), at)
            rest = _SYNC_WEIGHT * np.log(at.num_passes[seen] * grad[seen] / grad_s[seen]) / _NOISE
            pull = (scaled - np.asarray(self.centre)) / np.asarray(self.width)
            return np.concatenate([_softened(np.log(step / times) / _NOISE), rest, pull])

        found = least_squares(residual, np.asarray(self.centre), max_nfev=200)
        scaled: Floats = found.x
        if not (at.num_nodes > 1).any():
            # Or nodes that nobody measured would be faster than the devices of one: both are times, the sixth of nodes.
            scaled[5] = max(scaled[5], scaled[3] + np.log(_NODE_PRICE))
        return self._fitted(scaled, np.asarray(found.jac, dtype=np.float64), offset, times, at)

    def _fitted(
        self, scaled: Floats, jacobian: Floats, offset: Floats, times: Floats, at: _Sizes
    ) -> FittedSpeed:
        # The priors are rows of the residual, so a coefficient that no point moves has its prior's variance.
        covariance = np.linalg.pinv(jacobian.T @ jacobian)
        theta = np.exp(scaled + offset)

        def log_steps(sizes: _Sizes, moved: Floats | float = 0.0) -> Floats:
            return np.log(_step_s(self.form, np.exp(scaled + offset + moved), sizes)[0])

        def log_variances(points: Sequence[SpeedPoint]) -> Floats:
            sizes, step = _sizes(points), 1e-4
            moved = np.asarray([log_steps(sizes, step * unit) for unit in np.eye(len(theta))])
            return variances_along((moved - log_steps(sizes)).T / step, covariance)

        residual = np.log(_step_s(self.form, theta, at)[0] / times)
        named = dict(zip(self.coefficients, theta.tolist(), strict=True))
        return FittedSpeed(
            name=self.name,
            parameters=named,
            log_times=lambda points: log_steps(_sizes(points)),
            log_variances=log_variances,
            # A perfect fit of few points does not show the scatter, so half the usual scatter is kept.
            log_spread=float(np.sqrt(np.mean(residual**2) + (_NOISE / 2) ** 2)),
            num_freedom=max(2, len(times) - 2),
        )


def _softened(residual: Floats) -> Floats:
    """Residuals whose squares grow linearly beyond one: outliers pull little."""
    softened: Floats = np.sign(residual) * np.sqrt(2 * (np.sqrt(1 + residual**2) - 1))
    return softened


def _compute_s(point: SpeedPoint) -> float:
    """The step less its exposed synchronisation [s]; not a number where that is not known."""
    if point.synchronisation_s is None:
        return float("nan")
    # Agents may report nearly the whole step as exposed, and a logarithm needs something left.
    return max(point.measured_s - point.synchronisation_s, 0.01 * point.measured_s)


_OF_COMPUTING = ("a_grad_s", "b_grad_s", "exponent_less_1")

POLLUX = PriorForm(
    name="pollux",
    form=_pollux,
    coefficients=(*_OF_COMPUTING, "a_local_s", "b_local_s", "a_node_s", "b_node_s"),
    centre=(-1.2, -0.7, 0.0, -1.5, -3.5, -0.7, -4.0),
)
"""Pollux' seven-parameter form."""

RING = PriorForm(
    name="ring",
    form=_ring,
    coefficients=(*_OF_COMPUTING, "local_s", "sync_scatter", "node_s", "grad_scatter"),
    centre=(-1.2, -0.7, 0.0, -2.0, -3.0, -0.9, -3.0),
    is_time=(True, True, False, True, False, True, False),
)
"""Our form: a ring over links whose volume times are fitted, with stragglers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragedModel:
    """Geometric mean of several models: their errors on unseen sizes differ, so that the mean errs less than each.

    Attributes:
        name: Name of the mean.
        models: The models.
    """

    name: str
    models: tuple[SpeedModel, ...]

    def fit(self, points: Sequence[SpeedPoint]) -> FittedSpeed:
        """Fits each; the interval is the mean of theirs, widened by how much they disagree."""
        fits = [model.fit(points) for model in self.models]

        def log_variances(at: Sequence[SpeedPoint]) -> Floats:
            variances = np.mean([fit.log_variances(at) for fit in fits], axis=0)
            disagreement = np.var([fit.log_times(at) for fit in fits], axis=0)
            return np.asarray(variances + disagreement, dtype=np.float64)

        return FittedSpeed(
            name=self.name,
            parameters={f"{fit.name}.{key}": value for fit in fits for key, value in fit.parameters.items()},
            log_times=lambda at: np.mean([fit.log_times(at) for fit in fits], axis=0),
            log_variances=log_variances,
            log_spread=float(np.mean([fit.log_spread for fit in fits])),
            num_freedom=min(fit.num_freedom for fit in fits),
        )


AVERAGE = AveragedModel(name="average", models=(POLLUX, RING))
SERVER_AVERAGE = AveragedModel(name="server-average", models=(OptimusModel(), LogQuadraticModel()))

ALL_REDUCE_MODELS: tuple[SpeedModel, ...] = (POLLUX, RING, AVERAGE)
"""Models of all-reduce training."""

SERVER_MODELS: tuple[SpeedModel, ...] = (
    *SERVER_AVERAGE.models,
    OptimusModel(synchronous=False),
    SERVER_AVERAGE,
)
"""Models of parameter-server training."""

_MOST_FOLDS = 10
_FEWEST_TO_CHOOSE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChoice:
    """The chosen model and the errors of all.

    Attributes:
        fitted: The chosen model, fitted to all points.
        errors: Mean |predicted / measured - 1| of left-out points by model; infinite where it could not be fitted.
    """

    fitted: FittedSpeed
    errors: Mapping[str, float]


def _models_for(points: Sequence[SpeedPoint]) -> dict[str, SpeedModel]:
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
    return {model.name: model for model in (*forms, *map(SmoothedModel, forms))}


def choose_speed_model(points: Sequence[SpeedPoint], name: str | None = None) -> SpeedChoice:
    """Fits the model that predicts left-out points best, or the named one.

    Args:
        points: Measured points.
        name: Name of a model; None for a choice.

    Raises:
        InvalidSetupError: The points do not suffice for any model, or the name is not known.
    """
    refuse_too_few(points, _FEWEST_TO_CHOOSE, "a speed model")
    models = _models_for(points)
    if name is not None:
        if name not in models:
            raise InvalidSetupError(f"expected a speed model of {', '.join(models)}, got '{name}'")
        return SpeedChoice(
            fitted=models[name].fit(points), errors={name: _left_out_errors(models[name], points)}
        )
    first: InvalidSetupError | None = None
    errors: dict[str, float] = {}
    fits: dict[str, FittedSpeed] = {}
    for key, model in models.items():
        try:
            fits[key] = model.fit(points)
        except InvalidSetupError as error:
            first = first or error
            continue
        errors[key] = _left_out_errors(model, points)
    if not fits:
        assert first is not None
        raise first
    # Of equal errors the plain form wins: residuals that help nowhere only widen what is said of other sizes.
    best = min(errors, key=lambda key: (errors[key], not key.endswith("smoothed"), key))
    return SpeedChoice(fitted=fits[best], errors=errors)


def _left_out_errors(model: SpeedModel, points: Sequence[SpeedPoint]) -> float:
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
            predicted = model.fit(kept).step_s(asked)
        except InvalidSetupError:
            return float("inf")
        measured = np.asarray([point.measured_s for point in asked])
        found += np.abs(predicted / measured - 1).tolist()
    return float(np.mean(found))
