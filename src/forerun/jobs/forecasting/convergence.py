"""Laws over several runs: the work to a target against the batch size, and of a network that was never trained.

Steps and epochs to a target against the batch size B:

    steps(B)  = S_min (1 + B_c / B)
    epochs(B) = E_min (1 + B / B_c),     E_min = S_min B_c / dataset size

B_c is the batch size at which twice the least number of steps, or epochs, is needed. Both forms are one law, linear in
S_min and S_min B_c: two batch sizes determine it, more are fitted by non-negative least squares on relative errors.

A steeper growth at large batches, where a fixed recipe stops to carry over, is what the law leaves out: the two-point
line is then a lower bound, and ``fit_batch_scaling`` says how far its own points lie from it.

Source: McCandlish, Kaplan, Amodei et al. 2018 (arXiv 1812.06162), equation 5.1.

The gradient noise scale says from the gradients of one run which batch size is still worth its steps:

    B_simple = tr(covariance of the gradient of one sample) / |gradient|^2

From the squared norms of gradients over a small and a large batch of the same weights, without bias:

    |G|^2 = (B_large |G_large|^2 - B_small |G_small|^2) / (B_large - B_small)
    S     = (|G_small|^2 - |G_large|^2) / (1 / B_small - 1 / B_large)

Both are noisy; their averages over many steps, and only then the ratio, are what counts. B_simple approximates the
critical batch size B_c up to a factor that depends on the optimizer and grows in the course of a run.

Source: McCandlish et al. 2018 (arXiv 1812.06162), appendix A.1.

A network that was never trained is predicted from others on the same data:

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
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.base.numerics import relative_coefficients
from forerun.jobs.forecasting.curve import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchScaling:
    """The law of steps against the batch size, fitted.

    Attributes:
        least_steps: S_min, steps at an endless batch.
        least_samples: S_min B_c, samples at a batch of next to nothing.
        worst_error: Largest relative error at the points it was fitted to.
    """

    least_steps: float
    least_samples: float
    worst_error: float

    @property
    def critical_batch_size(self) -> float:
        """B_c; infinite where steps only ever fall with the batch."""
        return self.least_samples / self.least_steps if self.least_steps > 0 else float("inf")

    def steps(self, batch_sizes: npt.ArrayLike) -> Floats:
        """Steps to the target, (n,)."""
        sizes: Floats = np.asarray(batch_sizes, dtype=float)
        return self.least_steps + self.least_samples / sizes

    def samples(self, batch_sizes: npt.ArrayLike) -> Floats:
        """Samples to the target, (n,)."""
        sizes: Floats = np.asarray(batch_sizes, dtype=float)
        return self.steps(sizes) * sizes

    def epochs(self, batch_sizes: npt.ArrayLike, dataset_size: float) -> Floats:
        """Epochs to the target, (n,)."""
        return self.samples(batch_sizes) / dataset_size


def fit_batch_scaling(batch_sizes: npt.ArrayLike, steps: npt.ArrayLike) -> BatchScaling:
    """Fits the law to steps to the same target at several batch sizes.

    Raises:
        InvalidSetupError: Fewer than two different batch sizes, or numbers that are not above zero.
    """
    sizes, counts = np.asarray(batch_sizes, dtype=float), np.asarray(steps, dtype=float)
    good = sizes.shape == counts.shape and np.all(np.isfinite(sizes) & np.isfinite(counts))
    if not good or np.any(sizes <= 0) or np.any(counts <= 0) or len(np.unique(sizes)) < 2:
        raise InvalidSetupError(
            "steps against the batch size need two or more different batch sizes and steps above zero, got "
            f"{sizes.tolist()} and {counts.tolist()}"
        )
    columns = np.stack([np.ones_like(sizes), 1.0 / sizes], axis=1)
    least_steps, least_samples = relative_coefficients(columns, counts).tolist()
    misses = np.abs((least_steps + least_samples / sizes) / counts - 1)
    return BatchScaling(least_steps=least_steps, least_samples=least_samples, worst_error=float(misses.max()))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """Noise of gradients.

    Attributes:
        batch_size: B_simple [samples]; infinite where the gradient drowns in its noise.
        squared_gradient: |G|^2.
        covariance_trace: S.
        num_steps: Steps averaged over.
    """

    batch_size: float
    squared_gradient: float
    covariance_trace: float
    num_steps: int


def gradient_noise_scale(
    small_squared_norms: npt.ArrayLike,
    large_squared_norms: npt.ArrayLike,
    small_batch_size: int,
    large_batch_size: int,
) -> NoiseScale:
    """The gradient noise scale, from norms over small and large batches.

    Args:
        small_squared_norms: Squared norms of gradients over the small batch, (steps,).
        large_squared_norms: Over the large batch of the same step, (steps,).
        small_batch_size: Samples of the small batch.
        large_batch_size: Samples of the large batch.

    Raises:
        InvalidSetupError: The large batch is not larger, or there is no step.
    """
    small, large = np.asarray(small_squared_norms, float), np.asarray(large_squared_norms, float)
    if not 0 < small_batch_size < large_batch_size or small.shape != large.shape or not small.size:
        raise InvalidSetupError(
            "the gradient noise scale needs gradients of a small and of a larger batch in each step, got batches of "
            f"{small_batch_size} and {large_batch_size} in {small.size} and {large.size} steps"
        )
    span = large_batch_size - small_batch_size
    squared = float(np.mean((large_batch_size * large - small_batch_size * small) / span))
    trace = float(np.mean((small - large) / (1 / small_batch_size - 1 / large_batch_size)))
    return NoiseScale(
        batch_size=max(trace, 0.0) / squared if squared > 0 else float("inf"),
        squared_gradient=squared,
        covariance_trace=trace,
        num_steps=small.size,
    )


_HEAVY = 0.1
_HALF_WIDTH_90 = 2.06
"""Half-width of the 90 % interval of a normal error, in its mean absolute values: 1.645 sqrt(pi / 2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRuns:
    """A network and the epochs, or another amount, that each of its runs needed.

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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A regression of one form on one feature.

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


def _with_ones(x: Floats) -> Floats:
    return np.stack([np.ones_like(x), x], axis=1)


def _fit_line(x: Floats, y: Floats) -> Floats:
    return np.asarray(np.linalg.lstsq(_with_ones(x), y, rcond=None)[0], dtype=float)


_Fit = Callable[[Floats, Floats], Floats]
_Predict = Callable[[Floats, Floats], Floats]
_FORMS: dict[str, tuple[_Fit, _Predict]] = {
    "power": (lambda x, y: _fit_line(np.log(x), np.log(y)), lambda x, c: np.exp(c[0] + c[1] * np.log(x))),
    "saturating": (lambda x, y: relative_coefficients(_with_ones(1.0 / x), y), lambda x, c: c[0] + c[1] / x),
    "constant": (lambda x, y: np.exp([np.mean(np.log(y))]), lambda x, c: np.full(len(x), c[0])),
}
_FORMS_WITH_ZEROS: dict[str, tuple[_Fit, _Predict]] = {
    "line": (_fit_line, lambda x, c: np.maximum(c[0] + c[1] * x, 0.0)),
    "constant": (lambda x, y: np.asarray([np.mean(y)]), lambda x, c: np.full(len(x), c[0])),
}


def predict_network(networks: Sequence[NetworkRuns], features: Mapping[str, float]) -> NetworkPrediction:
    """Predicts the epochs, or another amount, that a network with these features needs.

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
    candidates = tuple(Candidate(*one, float(w)) for one, w in zip(judged, weights, strict=True))
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
    # A miss cannot be measured against zero.
    scale = y if np.all(y > 0) else np.maximum(y, max(float(y.mean()), 1e-12))
    misses = []
    for index in range(len(y)):
        others = np.arange(len(y)) != index
        predicted = predict(x[index : index + 1], fit(x[others], y[others]))[0]
        misses.append(abs(float(predicted) - y[index]) / scale[index])
    return np.asarray(misses)
