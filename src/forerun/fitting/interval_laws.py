"""The 90 % intervals of a tier: half-width of the log step time = quantile * (base + slope * spread).

The spread is the disagreement of the ensemble. Base and slope are fixed; the quantile is split-conformal over
held-out predictions in which each group (a fold of families, or a device as one source measured it) weighs
alike. Coverage is checked on groups that the quantile has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from forerun.fitting.conformal import conformal_quantile, group_weights

__all__ = ["IntervalLaw", "fit_law"]

Floats = npt.NDArray[np.float64]

_BASE = 0.05
_SLOPES = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalLaw:
    """Half-width = quantile * (base + slope * spread), in the log of the step time."""

    quantile: float
    base: float
    slope: float

    def half_widths(self, spread: Floats) -> Floats:
        """Half-widths of the log step time, (n,)."""
        widths: Floats = self.quantile * (self.base + self.slope * spread)
        return widths


def fit_law(residuals: Floats, spread: Floats, groups: Sequence[object], target: float = 0.9) -> IntervalLaw:
    """The law with the narrowest mean interval that covers the target share.

    Args:
        residuals: log(measured / predicted) of held-out rows, (n,).
        spread: Standard deviation over the ensemble, (n,).
        groups: Group of each row.
        target: Share to cover.
    """
    weights = group_weights(groups)
    laws = []
    for slope in _SLOPES:
        scores = np.abs(residuals) / (_BASE + slope * spread)
        laws.append(
            IntervalLaw(quantile=float(conformal_quantile(scores, target, weights)), base=_BASE, slope=slope)
        )
    return min(laws, key=lambda law: float(np.average(law.half_widths(spread), weights=weights)))
