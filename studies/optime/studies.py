"""Cross-validated predictions of the op-level model: whole families held out, whole devices held out.

Fits and predictions are by split, never by row; the splits come from ``fitting.evaluation``. A study returns
one row per tested measurement, so that any error figure can be computed, and printed again, from it.

A device may be known from a few of its steps. The correction is that of ``forerun.cost.time.correction``; here it is
conditioned on the steps themselves, without its coefficients. With J_k the rows of k measured steps, S = diag(s^2) the
prior and n the noise:

    K    = J_k S J_k' + n^2 I
    C    = J S J_k' + q^2 D,   D = 1 where a row is the measured run, q^2 = n^2 without the noise between repeats
    mean = C K^-1 r_k
    var  = diag(J S J') - diag(C K^-1 C') + n^2

The scales are those that make the residuals of held-out devices most likely, so that one odd measurement moves a
prediction no further than devices have been seen to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import optimize

from forerun.cost.time.correction import PriorScales, sensitivities, with_circumstances
from forerun.cost.time.evidence import operation_mix, step_covariates
from forerun.cost.time.step_times import StepTimes, step_times
from forerun.cost.time.weights import CostModel
from forerun.evidence.fitting.device_calibration import WORSE_BY
from forerun.evidence.fitting.evaluation import family_folds
from forerun.evidence.fitting.measured_steps import Measured
from forerun.evidence.fitting.op_time_fit import (
    EncodedSamples,
    FitSettings,
    OpNetwork,
    as_weights,
)
from forerun.graph.graph import StepPart
from studies.optime.fit import encode, fit_ensemble, fittable, predict_log_times, source_of
from studies.tables.operators import OperatorTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Predictions of measurements that the fit did not see, n rows.

    Attributes:
        steps: The measurements.
        log_predicted: Log of the predicted step time with release, settings and machine known, (n,).
        log_asked: The same as a user asks, who types what must be typed and nothing else, (n,).
        covariates: What the prediction as asked says about its own error (``evidence.step_covariates``), (n, 3).
        fold: Split each row was tested in, (n,).
        sensitivities: Rows of the calibration's J, (n, c).
        forward_share: Share of the kernels' time that lies in the forward pass, (n,).
    """

    steps: tuple[Measured, ...]
    log_predicted: Floats
    log_asked: Floats
    covariates: Floats
    fold: npt.NDArray[np.int64]
    sensitivities: Floats
    forward_share: Floats

    @property
    def log_measured(self) -> Floats:
        """Log of the measured step time, (n,)."""
        return np.log([step.record.step_time_s for step in self.steps])

    @property
    def residuals(self) -> Floats:
        """log(measured / predicted), (n,)."""
        return self.log_measured - self.log_predicted

    def as_asked(self) -> HeldOut:
        """The same rows, predicted as a user asks."""
        return replace(self, log_predicted=self.log_asked)

    def take(self, rows: npt.NDArray[np.int64]) -> HeldOut:
        """The rows with these indices."""
        arrays = {name: getattr(self, name)[rows] for name in _COLUMNS}
        return HeldOut(steps=tuple(self.steps[int(i)] for i in rows), **arrays)


_COLUMNS = tuple(field.name for field in fields(HeldOut) if field.name != "steps")


def predict_with(
    weights: CostModel,
    steps: Sequence[Measured],
    asked: Sequence[Measured] | None = None,
    folds: npt.NDArray[np.int64] | None = None,
) -> HeldOut:
    """Predictions of steps by a model that was fitted without them, with the offsets that a user gets.

    Args:
        weights: The model.
        steps: The steps.
        asked: The same steps as a user asks for them; those of ``steps`` unless given.
        folds: Split of each.
    """
    logs, shares = np.empty(len(steps)), np.empty(len(steps))
    log_asked, own, rows = np.empty(len(steps)), np.empty((len(steps), 3)), []
    for index, (step, question) in enumerate(zip(steps, asked or steps, strict=True)):
        times = _times(weights, step)
        logs[index] = np.log(times.step_s[0])
        rows.append(sensitivities(step.ops, times)[0])
        assert times.kernel_s is not None
        is_forward = step.ops.step_part == StepPart.FORWARD
        shares[index] = times.kernel_s[0, is_forward].sum() / times.kernel_s[0].sum()
        times = times if question is step else _times(weights, question)
        log_asked[index] = np.log(times.step_s[0])
        is_measured = [weights.knows_die(question.device)]
        own[index] = step_covariates(operation_mix(question.ops), times.spread, is_measured)[0]
    return HeldOut(
        steps=tuple(steps),
        log_predicted=logs,
        log_asked=log_asked,
        covariates=own,
        fold=np.zeros(len(steps), dtype=np.int64) if folds is None else folds,
        sensitivities=np.asarray(rows),
        forward_share=shares,
    )


def _times(weights: CostModel, step: Measured) -> StepTimes:
    offsets = weights.offsets_of_point(step.point)[:, None]
    return step_times(step.ops, [step.point], weights, offsets, with_kernels=True)


def joined(parts: Sequence[HeldOut]) -> HeldOut:
    """Several results as one."""
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
    return HeldOut(steps=tuple(step for part in parts for step in part.steps), **arrays)


@dataclass(frozen=True, slots=True)
class OperatorError:
    """log(measured / predicted) of one operator of one table, device and number format, (k,)."""

    source: str
    device: str
    precision: str
    operator: str
    residuals: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A model of a study, and its errors on operators that were left out.

    Attributes:
        weights: The model.
        operators: Operators timed alone that the fit did not see; the constant of their tables' loops is included.
    """

    weights: CostModel
    operators: tuple[OperatorError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Everything that a fit may take, encoded once for all studies.

    Attributes:
        steps: Measured whole steps.
        asked: The same steps as a user asks for them.
        operators: Tables of operators timed alone.
        encoded: The steps, then the operators.
    """

    steps: tuple[Measured, ...]
    asked: tuple[Measured, ...]
    operators: tuple[OperatorTable, ...]
    encoded: EncodedSamples

    @classmethod
    def of(
        cls,
        steps: Sequence[Measured],
        asked: Sequence[Measured] = (),
        operators: Sequence[OperatorTable] = (),
    ) -> Corpus:
        """Encodes the samples."""
        return cls(
            steps=tuple(steps),
            asked=tuple(asked or steps),
            operators=tuple(operators),
            encoded=encode(steps, operators),
        )

    def fitted_without(
        self,
        left_out: npt.NDArray[np.bool_],
        settings: Sequence[FitSettings],
        operators_left_out: npt.NDArray[np.bool_] | None = None,
    ) -> Fit:
        """A model fitted to the rest.

        Args:
            left_out: Whether each step is left out, (n,).
            settings: Members of the ensemble.
            operators_left_out: Whether each operator is left out, None for none of them, (m,).
        """
        known = np.flatnonzero(fittable(self.steps) & ~left_out)
        num_operators = len(self.encoded) - len(self.steps)
        skipped = np.zeros(num_operators, dtype=bool) if operators_left_out is None else operators_left_out
        rows = np.concatenate([known, len(self.steps) + np.flatnonzero(~skipped)])
        networks = fit_ensemble(self.encoded, rows, settings)
        seen = {self.steps[int(i)].system for i in known}
        return Fit(
            weights=as_weights(networks, self.encoded.systems, {}, seen),
            operators=self._operator_errors(networks, np.flatnonzero(skipped)),
        )

    def operator_devices(self) -> npt.NDArray[np.str_]:
        """Device of each operator, (m,)."""
        return np.asarray([table.device.name for table in self.operators for _ in table.operators])

    def _operator_errors(
        self, networks: Sequence[OpNetwork], chosen: npt.NDArray[np.int64]
    ) -> tuple[OperatorError, ...]:
        """Errors of some of the operators, by operator of a table."""
        if not len(chosen):
            return ()
        rows = len(self.steps) + chosen
        logs = np.mean([predict_log_times(network, self.encoded, rows, True) for network in networks], axis=0)
        errors = self.encoded.log_time.numpy()[rows] - logs
        names = [
            (table.source, table.device.name, str(table.sample.point.setup.precision), operator)
            for table in self.operators
            for operator in table.operators
        ]
        found: dict[tuple[str, str, str, str], list[float]] = {}
        for index, error in zip(chosen, errors, strict=True):
            found.setdefault(names[int(index)], []).append(float(error))
        return tuple(OperatorError(*key, np.asarray(values)) for key, values in found.items())

    def predicted_by(self, weights: CostModel, chosen: npt.NDArray[np.int64], fold: int = 0) -> HeldOut:
        """Predictions of some of the steps."""
        steps, asked = ([rows[int(i)] for i in chosen] for rows in (self.steps, self.asked))
        return predict_with(weights, steps, asked, np.full(len(chosen), fold))


def family_study(
    corpus: Corpus,
    tested: Sequence[int],
    settings: Sequence[FitSettings],
    report: Callable[[str], None] = lambda _: None,
    num_folds: int = 5,
) -> tuple[HeldOut, tuple[OperatorError, ...]]:
    """Every tested step predicted by a fit without its family in any table, every operator by one without it.

    Args:
        corpus: All measurements that may be fitted.
        tested: Indices of the steps to predict; folds are by their families.
        settings: Members of the ensemble.
        report: Told about each finished fold.
        num_folds: Number of folds.
    """
    families = np.asarray([step.record.family for step in corpus.steps])
    rows = np.asarray(tested)
    fold_of_operator = np.arange(len(corpus.encoded) - len(corpus.steps)) % num_folds
    parts: list[HeldOut] = []
    operators: list[OperatorError] = []
    for number, split in enumerate(family_folds([corpus.steps[int(i)].record for i in rows], num_folds)):
        left_out = np.isin(families, families[rows[split.test]])
        fit = corpus.fitted_without(left_out, settings, fold_of_operator == number)
        parts.append(corpus.predicted_by(fit.weights, rows[split.test], number))
        operators.extend(fit.operators)
        report(f"families, fold {number + 1} of {num_folds}")
    return joined(parts), tuple(operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStudies:
    """All predictions by fits that did not see what they predict.

    Attributes:
        families: Rows of ``timm_train``, each predicted without its family.
        devices: Rows of each device, predicted without the device.
        sources: Rows of each source, predicted without the source.
        known_operators: Operators timed alone on devices with other operators in the fit.
        other_operators: Operators of devices that were left out of everything.
    """

    families: HeldOut
    devices: dict[str, HeldOut]
    sources: dict[str, HeldOut]
    known_operators: tuple[OperatorError, ...]
    other_operators: tuple[OperatorError, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FewSteps:
    """Errors on a system that the fit did not see, after k measured steps.

    Attributes:
        corrected: For each k, log(measured / predicted) of the steps that were not measured, of all draws.
        deviation: For each k, the posterior standard deviation of those.
    """

    corrected: dict[int, Floats]
    deviation: dict[int, Floats]


def device_study(
    corpus: Corpus, devices: Sequence[str], settings: Sequence[FitSettings]
) -> tuple[dict[str, HeldOut], tuple[OperatorError, ...]]:
    """Steps and operators of some devices predicted by a fit without any row of them, in any table."""
    names = np.asarray([step.device.name for step in corpus.steps])
    fit = corpus.fitted_without(
        np.isin(names, devices), settings, np.isin(corpus.operator_devices(), devices)
    )
    return {
        device: corpus.predicted_by(fit.weights, np.flatnonzero(names == device)) for device in devices
    }, fit.operators


def source_study(corpus: Corpus, source: str, settings: Sequence[FitSettings]) -> HeldOut:
    """A source's steps predicted by a fit without any row of it; its devices stay where others measured them."""
    is_own = np.asarray([source_of(step) == source for step in corpus.steps])
    return corpus.predicted_by(corpus.fitted_without(is_own, settings).weights, np.flatnonzero(is_own))


def few_shot(
    held_out: dict[str, HeldOut],
    prior: dict[str, HeldOut],
    kin: Callable[[Measured], str],
    num_steps: Sequence[int] = (0, 1, 3, 5, 10),
    num_candidates: int = 60,
    num_draws: int = 5,
) -> dict[str, FewSteps]:
    """Errors after k chosen steps were measured; prior scales from the groups that are no kin.

    The candidates are drawn some times: what one draw gives may hang on a single step far from the others.

    Args:
        held_out: Held-out steps by system.
        prior: Systems that make the prior, unless they are kin.
        kin: What a step's system shares with others, such as its source: systems with the same one are kin.
        num_steps: Numbers of measured steps.
        num_candidates: Steps of a system among which those to measure are chosen.
        num_draws: Draws of candidates.
    """
    random = np.random.default_rng(0)
    large = {name: held for name, held in prior.items() if len(held.steps) >= _FEWEST_PRIOR_ROWS}
    families = {name: kin(held.steps[0]) for name, held in large.items()}
    samples = {name: held.take(_sample(held, random, _PRIOR_ROWS)) for name, held in large.items()}
    known = {name: (_rows(held), held.residuals) for name, held in samples.items()}
    scales: dict[str, PriorScales] = {}
    results = {}
    for name, held in held_out.items():
        own = kin(held.steps[0])
        if own not in scales:
            others = [group for other, group in known.items() if families[other] != own]
            scales[own] = fit_scales(others or list(known.values()))
        rows, residuals = _rows(held), held.residuals
        corrected: dict[int, Floats] = {k: np.empty(0) for k in num_steps}
        deviation: dict[int, Floats] = {k: np.empty(0) for k in num_steps}
        for _ in range(num_draws):
            candidates = _sample(held, random, num_candidates)
            order = information_order(rows[candidates], np.ones(len(candidates)), scales[own])
            measured = [int(candidates[i]) for i in order[: max(num_steps)]]
            for k in num_steps:
                known_steps = _unless_refused(rows, measured[:k], residuals, scales[own])
                posterior = condition(rows, known_steps, residuals[known_steps], scales[own])
                rest = np.setdiff1d(np.arange(len(held.steps)), measured[:k])
                corrected[k] = np.append(corrected[k], (residuals - posterior.mean)[rest])
                deviation[k] = np.append(deviation[k], posterior.deviation[rest])
        results[name] = FewSteps(corrected=corrected, deviation=deviation)
    return results


def _unless_refused(rows: Floats, measured: list[int], residuals: Floats, scales: PriorScales) -> list[int]:
    """The measured steps, or none where they predict each other far worse than before, which ``calibrate`` refuses."""
    if len(measured) < 2:
        return measured
    others = [[other for other in measured if other != one] for one in measured]
    moved = [
        condition(rows, rest, residuals[rest], scales).mean[one]
        for one, rest in zip(measured, others, strict=True)
    ]
    before, after = residuals[measured], residuals[measured] - np.asarray(moved)
    worse, better = (np.abs(np.expm1(-logs)).mean() for logs in (after, before))
    return [] if worse > WORSE_BY * better else measured


_PRIOR_ROWS, _FEWEST_PRIOR_ROWS = 24, 5


def _rows(held: HeldOut) -> Floats:
    return with_circumstances(held.sensitivities, [step.setup for step in held.steps])


def _sample(held: HeldOut, random: np.random.Generator, limit: int) -> npt.NDArray[np.int64]:
    """Some of the rows, in an order by chance."""
    return random.permutation(len(held.steps))[:limit]


def overall_scales(held_out: dict[str, HeldOut]) -> PriorScales:
    """Prior scales from all held-out groups, for devices nobody here has measured."""
    random = np.random.default_rng(0)
    chosen = [held.take(_sample(held, random, _PRIOR_ROWS)) for held in held_out.values()]
    return fit_scales([(_rows(held), held.residuals) for held in chosen])


_PULL = 0.01


@dataclass(frozen=True, slots=True)
class Posterior:
    """Log corrections of p steps: mean and standard deviation, noise included, (p,) each."""

    mean: Floats
    deviation: Floats


def condition(rows: Floats, measured: Sequence[int], residuals: Floats, scales: PriorScales) -> Posterior:
    """Corrections of all steps, given the log residuals of the measured ones.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        measured: Indices of the measured steps, k of them.
        residuals: log(measured / predicted) of those, (k,).
        scales: Prior scales.
    """
    variances = scales.variances()[: rows.shape[1]]
    weighted = rows * variances
    prior = (weighted * rows).sum(axis=1)
    if not len(measured):
        return Posterior(np.zeros(len(rows)), np.sqrt(prior + scales.noise**2))
    chosen = rows[list(measured)]
    gram = (chosen * variances) @ chosen.T + scales.noise**2 * np.eye(len(chosen))
    is_same = np.arange(len(rows))[:, None] == np.asarray(measured)
    cross = weighted @ chosen.T + scales.run_variance * is_same
    solved = np.linalg.solve(gram, cross.T)
    explained = (cross.T * solved).sum(axis=0)
    deviation = np.sqrt(np.maximum(prior + scales.noise**2 - explained, 0))
    return Posterior(cross @ np.linalg.solve(gram, residuals), deviation)


def information_order(rows: Floats, cost_s: Floats, scales: PriorScales) -> list[int]:
    """All steps, ordered so that each next one is the most informative about all for its cost.

    The gain of a step is by how much it lowers the summed posterior variance: with C the posterior covariance so far,
    sum_j C_ij^2 / (C_ii + n^2); after it, C loses C_i' C_i / (C_ii + n^2). What is cut short is the part that
    would have told least.

    Args:
        rows: ``sensitivities`` of all steps, (p, c).
        cost_s: Time that measuring each takes, (p,) [s].
        scales: Prior scales.
    """
    covariance = (rows * scales.variances()[: rows.shape[1]]) @ rows.T + scales.run_variance * np.eye(
        len(rows)
    )
    noise_variance = scales.noise**2 - scales.run_variance
    order: list[int] = []
    open_ones = np.ones(len(rows), dtype=bool)
    while open_ones.any():
        own = np.diag(covariance) + noise_variance
        gains = (covariance**2).sum(axis=1) / own / cost_s
        chosen = int(np.argmax(np.where(open_ones, gains, -1.0)))
        order.append(chosen)
        open_ones[chosen] = False
        covariance = covariance - np.outer(covariance[chosen], covariance[chosen]) / own[chosen]
    return order


def fit_scales(groups: Sequence[tuple[Floats, Floats]]) -> PriorScales:
    """Scales that maximise the marginal likelihood of held-out residuals, one independent draw per device.

    Args:
        groups: Per device the ``sensitivities`` of its steps, (p, c), and their log residuals, (p,).
    """
    first = np.log(astuple(PriorScales()))

    def negative_log_likelihood(logs: Floats) -> float:
        scales = PriorScales(**dict(zip(PriorScales.__slots__, np.exp(logs), strict=True)))
        roots = np.sqrt(scales.variances())
        total = 0.0
        for rows, residuals in groups:
            # In the space of the columns, as in ``optime.correction``.
            scaled = rows * roots[: rows.shape[1]] / scales.noise
            inner = np.eye(rows.shape[1]) + scaled.T @ scaled
            projected = scaled.T @ residuals / scales.noise
            squares = residuals @ residuals / scales.noise**2 - projected @ np.linalg.solve(inner, projected)
            log_determinant = np.linalg.slogdet(inner)[1] + 2 * len(rows) * np.log(scales.noise)
            # Devices weigh alike however many steps of them were measured.
            total += (log_determinant + squares) / len(rows)
        # A weak pull to the start keeps scales that the data say nothing about where they were.
        return float(total + _PULL * len(groups) * ((logs - first) ** 2).sum())

    options: Any = {"maxiter": 3, "xtol": 0.05, "ftol": 1e-3}
    found = optimize.minimize(negative_log_likelihood, first, method="Powell", options=options)
    return PriorScales(**dict(zip(PriorScales.__slots__, np.exp(found.x).tolist(), strict=True)))
