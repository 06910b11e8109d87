"""Non-negative least squares on relative error, a check of identifiability, and the covariance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from forerun.errors import InvalidSetupError

__all__ = ["LinearFit", "fit_relative", "refuse_unidentifiable"]

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
    scale = np.abs(weighted).max(axis=0)
    theta, _ = nnls(weighted / scale, np.ones(len(times_s)))
    theta = theta / scale
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
