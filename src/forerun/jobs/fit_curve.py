"""``forerun forecast law`` as a function: the coefficients of a law, fitted to the log of one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from forerun.base.answers import Answer
from forerun.base.errors import InvalidSetupError, RecordError, near_matches
from forerun.jobs.forecasting.curve import Curve, Target, parse_target
from forerun.jobs.forecasting.curve_files import read_curve
from forerun.jobs.forecasting.laws import OptimusFit, fit_optimus

__all__ = ["CURVE_LAWS", "CurveFit", "fit_curve"]

CURVE_LAWS = ("optimus",)
"""Laws whose coefficients can be fitted to one run."""

_FEWEST_POINTS = 4
_LOSSES = ("loss", "train_loss", "val_loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveFit(Answer):
    """A law fitted to the log of a run.

    Attributes:
        law: ``optimus``: loss(k) = 1 / (b0 k + b1) + b2.
        run: Name of the file.
        curve: The points; k counts their ``unit``.
        fit: Coefficients with standard errors.
        r2: 1 - squared error / squared deviation from the mean; None if all losses are equal.
        steps_per_epoch: Steps of an epoch, None where the file does not tell.
        target: The loss to reach, or None.
        reached_at: Steps (or epochs) until the law reaches it; infinite if it never does, None without a target.
    """

    law: str
    run: str
    curve: Curve
    fit: OptimusFit
    r2: float | None
    steps_per_epoch: float | None
    target: Target | None
    reached_at: float | None

    def json_fields(self) -> dict[str, Any]:
        """Coefficients, errors and the fitted points."""
        named = dict(zip(("b0", "b1", "b2"), self.fit.deviations, strict=True))
        fitted = self.fit.losses(self.curve.epochs)
        return {
            "law": self.law,
            "run": self.run,
            "metric": self.curve.metric,
            "unit": self.curve.unit,
            "n": len(self.curve),
            **{name: getattr(self.fit, name) for name in named},
            "errors": {name: error if np.isfinite(error) else None for name, error in named.items()},
            "rmse": self.fit.rmse,
            "r2": self.r2,
            "steps_per_epoch": self.steps_per_epoch,
            "target": None if self.target is None else str(self.target),
            "reached_at": self.reached_at
            if self.reached_at is not None and np.isfinite(self.reached_at)
            else None,
            "points": [
                {"k": k, "real": real, "fitted": law}
                for k, real, law in zip(
                    self.curve.epochs.tolist(), self.curve.values.tolist(), fitted.tolist(), strict=True
                )
            ],
            "notes": self.curve.notes,
        }


def fit_curve(
    run: str | Path, law: str = "optimus", *, metric: str | None = None, target: str | None = None
) -> CurveFit:
    """Fits a law to a run, each row of the log being a point: no row is averaged, and steps are not epochs.

    Args:
        run: A log as ``forecast`` reads it; a CSV with ``epoch, step, loss, acc`` is that of Optimus.
        law: ``optimus``.
        metric: A loss; None takes ``loss``, ``train_loss`` or ``val_loss``, the first that is there.
        target: A loss to reach, such as ``loss<=0.5``.

    Raises:
        RecordError: The log cannot be read, has too few rows or no loss.
        InvalidSetupError: The law or the metric is not known, or the metric is no loss.
    """
    if law not in CURVE_LAWS:
        raise InvalidSetupError(
            f"unknown law '{law}'{near_matches(law, CURVE_LAWS)}; expected one of {', '.join(CURVE_LAWS)}"
        )
    wanted = None if target is None else parse_target(target)
    curve = _loss_curve(run, metric or (wanted.metric if wanted else None))
    is_number = np.isfinite(curve.values)
    steps, losses = curve.epochs[is_number], curve.values[is_number]
    if len(losses) < _FEWEST_POINTS:
        raise RecordError(
            f"{curve.name}: expected at least {_FEWEST_POINTS} rows with a {curve.metric} to fit three coefficients, "
            f"got {len(losses)}; log each step, such as with: forerun measure curve MODEL --steps-out FILE.csv"
        )
    if np.any(losses < 0):
        raise RecordError(f"{curve.name}: Optimus' law is of losses of at least 0, got {losses.min():g}")
    fit = fit_optimus(steps, losses)
    spread = float(np.sum((losses - losses.mean()) ** 2))
    return CurveFit(
        law=law,
        run=curve.name,
        curve=curve,
        fit=fit,
        r2=1 - len(losses) * fit.rmse**2 / spread if spread > 0 else None,
        steps_per_epoch=_steps_per_epoch(run, curve),
        target=wanted,
        reached_at=None if wanted is None else fit.steps_to(wanted.value),
    )


def _loss_curve(run: str | Path, metric: str | None) -> Curve:
    for name in _LOSSES if metric is None else (metric,):
        try:
            curve = read_curve(run, name, by_step=True)
        except InvalidSetupError:
            if name == (metric or _LOSSES[-1]):
                raise
            continue
        if curve.is_rising:
            raise InvalidSetupError(
                f"{curve.name}: Optimus' law is of a loss that falls, and '{curve.metric}' rises; name a loss with "
                "--metric"
            )
        return curve
    raise AssertionError


def _steps_per_epoch(run: str | Path, curve: Curve) -> float | None:
    """Steps of an epoch, from the same file read by epoch."""
    by_epoch = read_curve(run, curve.metric)
    if curve.unit != "step" or by_epoch.unit != "epoch" or by_epoch.steps is None:
        return None
    return float(curve.epochs[-1] / by_epoch.epochs[-1])
