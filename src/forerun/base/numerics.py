"""Numerical methods of several rooms: non-negative least squares on relative error, and monotone interpolation.

SciPy is imported where something is fitted, not by a question that is only answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError

Floats = npt.NDArray[np.float64]

_RANK_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearFit:
    """Coefficients of a time that is linear in them.

    Attributes:
        coefficients: theta >= 0, (k,).
        covariance: Covariance of theta, from the scatter of the relative residuals, (k, k).
        log_spread: Standard deviation of the relative residuals.
    """

    coefficients: Floats
    covariance: Floats
    log_spread: float


def refuse_unidentifiable(columns: Floats, names: Sequence[str]) -> None:
    """Refuses points that do not determine all coefficients.

    Args:
        columns: Factor of each coefficient, (points, k).
        names: Names of the coefficients.

    Raises:
        InvalidSetupError: The rank is below k; the message names the coefficients that are not identifiable.
    """
    # The rank must not depend on the units of the columns.
    scaled = columns / np.maximum(np.abs(columns).max(axis=0), 1e-300)
    _, singular, directions = np.linalg.svd(scaled, full_matrices=True)
    largest = singular.max(initial=0.0)
    rank = int((singular > _RANK_TOLERANCE * max(1.0, largest)).sum())
    if rank == len(names):
        return
    loose = np.abs(directions[rank:]).max(axis=0) > 1e-6
    unknown = ", ".join(name for name, is_loose in zip(names, loose, strict=True) if is_loose)
    raise InvalidSetupError(
        f"the points do not tell {unknown} apart: expected {len(names)} independent points, got {rank} "
        f"({len(columns)} in all); add points at other numbers of workers and servers, such as those of a design"
    )


def relative_coefficients(columns: Floats, times_s: Floats) -> Floats:
    """Theta >= 0 that minimises sum_i ((x_i theta - T_i) / T_i)^2, (k,).

    Columns are scaled to a largest value of one first, because seconds of FLOP and counts of kernels differ by 10^10,
    too much for the solver's absolute tolerance. A column of zeros has the coefficient zero.

    Args:
        columns: Factor of each coefficient, (points, k).
        times_s: Measured times, above zero, (points,) [s].

    Source: Lawson and Hanson 1974, Solving Least Squares Problems, chapter 23.
    """
    return nonnegative_coefficients(columns / times_s[:, None], np.ones(len(times_s)))


def nonnegative_coefficients(rows: Floats, wanted: Floats) -> Floats:
    """Theta >= 0 that minimises |X theta - y|^2, (k,); columns are scaled as for ``relative_coefficients``."""
    from scipy.optimize import nnls

    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    theta: Floats = nnls(rows / scale, wanted)[0] / scale
    return theta


def fit_relative(columns: Floats, times_s: Floats, names: Sequence[str]) -> LinearFit:
    """Theta >= 0 with the smallest sum of squared relative errors: rows are divided by their time.

    minimise sum_i ((x_i theta - T_i) / T_i)^2

    Args:
        columns: Factor of each coefficient, (points, k).
        times_s: Measured times, above zero, (points,) [s].
        names: Names of the coefficients, for messages.

    Raises:
        InvalidSetupError: A time is not above zero, or the coefficients are not identifiable.
    """
    refuse_times(times_s)
    refuse_unidentifiable(columns, names)
    weighted = columns / times_s[:, None]
    theta = relative_coefficients(columns, times_s)
    residual = weighted @ theta - 1
    freedom = max(1, len(times_s) - int((theta > 0).sum()))
    variance = float(residual @ residual) / freedom
    covariance = np.asarray(variance * np.linalg.pinv(weighted.T @ weighted), dtype=np.float64)
    return LinearFit(coefficients=theta, covariance=covariance, log_spread=float(np.sqrt(variance)))


def refuse_times(times_s: Floats) -> None:
    """Refuses times that are not above zero and finite."""
    wrong = times_s[~(np.isfinite(times_s) & (times_s > 0))]
    if len(wrong):
        raise InvalidSetupError(
            f"a step time must be above zero seconds and finite, got {wrong[0]:g}; correct or remove that point"
        )


def monotone_cubic(x: Floats, y: Floats, at: Floats) -> Floats:
    """Values between nodes by piecewise cubics that rise where the nodes rise and fall where they fall (PCHIP).

    The slope of a node is the weighted harmonic mean of those of its two pieces, zero where their signs differ.

    Args:
        x: Nodes, ascending, at least three, (nodes,).
        y: Values, (rows, nodes).
        at: Places between the first node and the last, (places,).

    Returns:
        Values at the places, (rows, places).

    Source: Fritsch and Butland 1984, SIAM J. Sci. Stat. Comput. 5(2).

    >>> monotone_cubic(np.asarray([0.0, 1.0, 2.0]), np.asarray([[0.0, 1.0, 4.0]]), np.asarray([0.5, 1.0])).tolist()
    [[0.3125, 1.0]]
    """
    width = np.diff(x)
    rise = np.diff(y, axis=1) / width
    slopes = np.zeros_like(y)
    before, after = 2 * width[1:] + width[:-1], width[1:] + 2 * width[:-1]
    is_turn = np.sign(rise[:, :-1]) * np.sign(rise[:, 1:]) <= 0
    left, right = (np.where(is_turn, 1.0, part) for part in (rise[:, :-1], rise[:, 1:]))
    # Harmonic means of the neighbouring rises keep each piece between its nodes; at a turn the slope is flat.
    slopes[:, 1:-1] = np.where(is_turn, 0.0, (before + after) / (before / left + after / right))
    slopes[:, 0] = _end_slope(width[0], width[1], rise[:, 0], rise[:, 1])
    slopes[:, -1] = _end_slope(width[-1], width[-2], rise[:, -1], rise[:, -2])
    piece = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(width) - 1)
    share = (at - x[piece]) / width[piece]
    first, last = slopes[:, piece] * width[piece], slopes[:, piece + 1] * width[piece]
    low, step = y[:, piece], y[:, piece + 1] - y[:, piece]
    found: Floats = low + share * (
        first + share * ((3 * step - 2 * first - last) + share * (first + last - 2 * step))
    )
    return found


def _end_slope(near: float, next_width: float, rise: Floats, next_rise: Floats) -> Floats:
    """Slope at an end: that of a parabola through three nodes, held within what keeps the curve monotone."""
    slope = ((2 * near + next_width) * rise - near * next_rise) / (near + next_width)
    slope = np.where(np.sign(slope) != np.sign(rise), 0.0, slope)
    is_steep = (np.sign(rise) != np.sign(next_rise)) & (np.abs(slope) > 3 * np.abs(rise))
    found: Floats = np.where(is_steep, 3 * rise, slope)
    return found
