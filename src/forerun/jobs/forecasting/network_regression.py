"""Convergence of a network that was never trained, from others on the same data: system C's regression, done right.

Epochs to a target (or Optimus' b0, b1, b2) of some networks are regressed on what a network is: depth, parameters,
operations. Not on the device: the steps that training needs do not depend on it, only the clock does; runs of one
network on several devices are repetitions, and their mean is what is fitted.

Forms, for a feature x such as the number of parameters:

    power       log y = a + b log x
    saturating  y = a + b / x,  a, b >= 0        capacity helps until there is enough of it
    constant    y = mean

Where a value is zero, as b2 may be, a line in x, not below zero, takes the place of the first two.

Every form with every feature is a candidate. Each is judged by predicting every given network from the others, a
network counting more the nearer it is to the one asked about, because laws that agree in between part ways beyond:

    error = sum of |predicted / y - 1| exp(-|log x - log x_asked|) / sum of exp(...)

and the answer is their geometric mean with weights error^-2; the errors give its interval. Nothing is chosen on the
network that is asked about.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.base.errors import InvalidSetupError
from forerun.jobs.forecasting.curve import Floats
from forerun.jobs.forecasting.laws import nonnegative_fit

__all__ = ["Candidate", "NetworkPrediction", "NetworkRuns", "predict_network"]

_HEAVY = 0.1
_HALF_WIDTH_90 = 2.06
"""Half-width of the 90 % interval of a normal error, in its mean absolute values: 1.645 sqrt(pi / 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRuns:
    """A network and what its runs needed.

    Attributes:
        name: The network.
        features: Depth, parameters, operations and the like, above zero, by name.
        values: What each run needed, such as epochs to a target, (runs,).
    """

    name: str
    features: Mapping[str, float]
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the runs."""
        return float(np.mean(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One form with one feature.

    Attributes:
        name: Form and feature.
        value: What it predicts.
        left_out_error: Its error on the networks given, near ones first.
        weight: Its weight in the answer.
    """

    name: str
    value: float
    left_out_error: float
    weight: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPrediction:
    """Convergence of a network that was never trained.

    Attributes:
        value: The weighted geometric mean of the candidates.
        low, high: Ends of the 90 % interval: those of all candidates with at least a tenth of the largest weight,
            each 1 + 2.06 times its error to either side, as if its errors were normal.
        candidates: All candidates.
    """

    value: float
    low: float
    high: float
    candidates: tuple[Candidate, ...]


def _fit_power(x: Floats, y: Floats) -> tuple[float, float]:
    columns = np.stack([np.ones_like(x), np.log(x)], axis=1)
    a, b = np.linalg.lstsq(columns, np.log(y), rcond=None)[0]
    return float(a), float(b)


def _fit_saturating(x: Floats, y: Floats) -> tuple[float, float]:
    columns = np.stack([np.ones_like(x), 1.0 / x], axis=1) / y[:, None]
    a, b = nonnegative_fit(columns[None], np.ones(len(y)))[0][0]
    return float(a), float(b)


def _fit_constant(x: Floats, y: Floats) -> tuple[float, float]:
    return float(np.exp(np.mean(np.log(y)))), 0.0


def _fit_line(x: Floats, y: Floats) -> tuple[float, float]:
    columns = np.stack([np.ones_like(x), x], axis=1)
    a, b = np.linalg.lstsq(columns, y, rcond=None)[0]
    return float(a), float(b)


def _fit_mean(x: Floats, y: Floats) -> tuple[float, float]:
    return float(np.mean(y)), 0.0


_Fit = Callable[[Floats, Floats], tuple[float, float]]
_Predict = Callable[[Floats, tuple[float, float]], Floats]
_FORMS: dict[str, tuple[_Fit, _Predict]] = {
    "power": (_fit_power, lambda x, c: np.exp(c[0] + c[1] * np.log(x))),
    "saturating": (_fit_saturating, lambda x, c: c[0] + c[1] / x),
    "constant": (_fit_constant, lambda x, c: np.full(len(x), c[0])),
}
_FORMS_WITH_ZEROS: dict[str, tuple[_Fit, _Predict]] = {
    "line": (_fit_line, lambda x, c: np.maximum(c[0] + c[1] * x, 0.0)),
    "constant": (_fit_mean, lambda x, c: np.full(len(x), c[0])),
}


def predict_network(networks: Sequence[NetworkRuns], features: Mapping[str, float]) -> NetworkPrediction:
    """Predicts what a network with these features needs.

    Raises:
        InvalidSetupError: Fewer than three networks, features that are not above zero, or values below zero.
    """
    values = np.asarray([network.mean for network in networks])
    _check(networks, values, features)
    forms = _FORMS if np.all(values > 0) else _FORMS_WITH_ZEROS
    judged: list[tuple[str, float, float]] = []
    for feature, asked in features.items():
        x = np.asarray([network.features[feature] for network in networks])
        nearness = np.exp(-np.abs(np.log(x / asked)))
        for form, (fit, predict) in forms.items():
            error = float(np.average(_left_out(forms[form], x, values), weights=nearness))
            value = float(predict(np.asarray([asked]), fit(x, values))[0])
            judged.append(
                (f"{form} {feature}" if form != "constant" else f"constant ({feature})", value, error)
            )
    # A form that meets all the others by chance must not count alone.
    weights = np.asarray([max(error, 0.01) ** -2 for _, _, error in judged])
    weights = weights / weights.sum()
    candidates = tuple(
        Candidate(name=name, value=value, left_out_error=error, weight=float(weight))
        for (name, value, error), weight in zip(judged, weights, strict=True)
    )
    guesses = np.asarray([c.value for c in candidates])
    if forms is _FORMS:
        mean = float(np.exp(np.sum(weights * np.log(np.maximum(guesses, 1e-12)))))
    else:
        mean = float(np.sum(weights * guesses))
    heavy = [c for c in candidates if c.weight >= _HEAVY * max(weights)]
    factors = [1 + _HALF_WIDTH_90 * c.left_out_error for c in heavy]
    low = min(mean, *(c.value / factor for c, factor in zip(heavy, factors, strict=True)))
    high = max(mean, *(c.value * factor for c, factor in zip(heavy, factors, strict=True)))
    return NetworkPrediction(value=mean, low=low, high=high, candidates=candidates)


def _check(networks: Sequence[NetworkRuns], values: Floats, features: Mapping[str, float]) -> None:
    known = np.asarray(
        [f for network in networks for f in network.features.values()] + list(features.values())
    )
    are_numbers = np.all(np.isfinite(known)) and np.all(np.isfinite(values))
    if len(networks) < 3 or not features or not are_numbers or np.any(known <= 0) or np.any(values < 0):
        raise InvalidSetupError(
            "a regression over networks needs three or more of them, features above zero and values that are not "
            f"below zero, got {len(networks)} networks with {values.tolist()} for {dict(features)}"
        )


def _left_out(form: tuple[_Fit, _Predict], x: Floats, y: Floats) -> Floats:
    """Relative error of each network by the others, (n,); where a value is zero, relative to the mean at least."""
    fit, predict = form
    scale = y if np.all(y > 0) else np.maximum(y, max(float(y.mean()), 1e-12))
    misses = []
    for index in range(len(y)):
        others = np.arange(len(y)) != index
        predicted = predict(x[index : index + 1], fit(x[others], y[others]))[0]
        misses.append(abs(float(predicted) - y[index]) / scale[index])
    return np.asarray(misses)
