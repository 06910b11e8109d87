"""Sizes to measure next: the points that determine a parameter-server job best (D-optimal design)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.communication.parameter_server import OPTIMUS_SYNCHRONOUS
from forerun.communication.server_models import server_columns
from forerun.communication.speed_points import SpeedPoint
from forerun.errors import InvalidSetupError

__all__ = ["candidate_points", "propose_points"]

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
