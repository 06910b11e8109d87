"""Sizes to measure next: the points that determine a parameter-server job best (D-optimal design)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from forerun.adapters.classics.all_reduce_models import ALL_REDUCE_MODELS, AveragedModel
from forerun.adapters.classics.server_models import OPTIMUS_SYNCHRONOUS, OptimusModel, server_columns
from forerun.adapters.classics.speed_models import (
    FittedSpeed,
    LogQuadraticModel,
    SmoothedModel,
    SpeedModel,
    SpeedPoint,
    refuse_too_few,
)
from forerun.base.errors import InvalidSetupError

__all__ = [
    "SERVER_MODELS",
    "SpeedChoice",
    "candidate_points",
    "choose_speed_model",
    "left_out_errors",
    "models_for",
    "propose_points",
]

Floats = npt.NDArray[np.float64]

_RIDGE = 1e-6


def candidate_points(
    workers: Sequence[int], servers: Sequence[int], batch_size_global: float = 1.0
) -> tuple[SpeedPoint, ...]:
    """Every combination of workers and servers at a fixed global batch."""
    return tuple(
        SpeedPoint(num_devices=w, num_servers=p, batch_size_per_device=batch_size_global / w)
        for w in workers
        for p in servers
    )


def propose_points(
    candidates: Sequence[SpeedPoint],
    num_points: int,
    *,
    measured: Sequence[SpeedPoint] = (),
    theta: Sequence[float] = OPTIMUS_SYNCHRONOUS,
    synchronous: bool = True,
) -> tuple[SpeedPoint, ...]:
    """The next points to measure, by greedy growth and exchange of the determinant of the information matrix.

    With times whose *relative* error is constant, a point x informs by (x/T)(x/T)'; T is what ``theta`` expects there.
    maximise log det( sum_i (x_i/T_i)(x_i/T_i)' ) over the chosen and the measured points.

    Args:
        candidates: Sizes that could be measured.
        num_points: Number of points to choose, at most all candidates.
        measured: Points that are measured already.
        theta: Expected coefficients, for T; those of Optimus' ResNet-50 if none are known.
        synchronous: Whether the fitted form is the synchronous one.

    Raises:
        InvalidSetupError: There are fewer candidates than points, or they cannot determine the coefficients.

    Source: Fedorov 1972, Theory of Optimal Experiments (exchange); Atkinson and Donev 1992.
    """
    if not 1 <= num_points <= len(candidates):
        raise InvalidSetupError(
            f"expected between 1 and {len(candidates)} points of a design, got {num_points}; widen workers or servers"
        )
    batch = float(np.median([point.batch_size_global for point in candidates]))
    rows = _informative(server_columns(candidates, synchronous=synchronous, batch=batch), theta)
    start = (
        _information(_informative(server_columns(measured, synchronous=synchronous, batch=batch), theta))
        if measured
        else 0.0
    )
    base = start + _RIDGE * np.eye(rows.shape[1])
    chosen = _grown(rows, base, num_points)
    chosen = _exchanged(rows, base, chosen)
    if np.linalg.matrix_rank(start + _information(rows[chosen]), tol=1e-7) < min(
        rows.shape[1], num_points + len(measured)
    ):
        raise InvalidSetupError(
            "the candidates cannot tell the coefficients apart: workers and servers must both vary, and not together; "
            "give at least three numbers of each"
        )
    return tuple(candidates[i] for i in chosen)


def _informative(columns: Floats, theta: Sequence[float]) -> Floats:
    """Rows divided by the expected time, columns brought to a common size."""
    expected = columns @ np.maximum(np.asarray(theta, dtype=float), 1e-3)
    rows: Floats = columns / expected[:, None]
    return rows


def _information(rows: Floats) -> Floats:
    return rows.T @ rows


def _log_determinant(matrix: Floats) -> float:
    sign, value = np.linalg.slogdet(matrix)
    return float(value) if sign > 0 else -np.inf


def _grown(rows: Floats, base: Floats, num_points: int) -> list[int]:
    chosen: list[int] = []
    for _ in range(num_points):
        left = [i for i in range(len(rows)) if i not in chosen]
        now = base + _information(rows[chosen])
        chosen.append(max(left, key=lambda i, now=now: _log_determinant(now + np.outer(rows[i], rows[i]))))  # type: ignore[misc]
    return chosen


def _exchanged(rows: Floats, base: Floats, chosen: list[int]) -> list[int]:
    """Swaps one chosen point for another candidate as long as the determinant grows."""
    chosen = list(chosen)
    improved = True
    while improved:
        improved = False
        for position in range(len(chosen)):
            others = [*chosen[:position], *chosen[position + 1 :]]
            now = base + _information(rows[others])
            left = [i for i in range(len(rows)) if i not in others]
            gains = [_log_determinant(now + np.outer(rows[i], rows[i])) for i in left]
            best = left[int(np.argmax(gains))]
            if best != chosen[position] and max(gains) > gains[left.index(chosen[position])] + 1e-9:
                chosen[position] = best
                improved = True
    return chosen


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
