"""PyTorch's own estimators, simple predictors and ours on the rows of ``timm_train``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from forerun.adapters.classics.baselines import baseline_names, make_baseline
from forerun.adapters.classics.step_features import whole_model_features
from forerun.evidence.fitting.evaluation import (
    ErrorMetrics,
    cross_validated_predictions,
    errors,
    family_folds,
)
from forerun.evidence.fitting.measured_steps import Measured
from forerun.tracing.trace import trace
from studies.memory.study import Bracket
from studies.optime.pytorch_tools import ToolAnswer, ToolProcess, estimated_step_s, tracked_peak_bytes
from studies.optime.studies import HeldOut

TRACKED_METHODS = {"PyTorch's MemTracker": False, "MemTracker under our CUDA rules": True}
"""Names of the methods of ``tracker_study``, with whether CUDA's autocast rules are switched on."""

_Report = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeRow:
    """One measured step and two predictions of it.

    Attributes:
        step: The measured step.
        forerun_s: Our prediction, the step's family left out of the fit [s].
        pytorch: Answer of ``RuntimeEstimator`` [s].
    """

    step: Measured
    forerun_s: float
    pytorch: ToolAnswer


def runtime_study(held: HeldOut, num_rows: int, report: _Report | None = None) -> list[RuntimeRow]:
    """Both predictions for rows at equal distances in the table.

    Args:
        held: Measured steps, each predicted without its family.
        num_rows: Rows to take.
        report: Told how many rows are done.
    """
    found = []
    with ToolProcess() as tool:
        for index in _spread_out(len(held.steps), num_rows):
            step = held.steps[index]
            found.append(
                RuntimeRow(
                    step=step,
                    forerun_s=float(np.exp(held.log_predicted[index])),
                    pytorch=tool.ask(estimated_step_s, step.run.model, step.setup, step.device),
                )
            )
            if report is not None:
                report(len(found), num_rows)
    return found


def tracker_study(brackets: Sequence[Bracket], num_rows: int, report: _Report | None = None) -> list[Bracket]:
    """Brackets at equal distances with the peaks of ``MemTracker`` added; those it cannot run lack them."""
    bracketed = [bracket for bracket in brackets if bracket.failed_bytes is not None]
    found = []
    with ToolProcess() as tool:
        for index in _spread_out(len(bracketed), num_rows):
            found.append(_with_tracker(bracketed[index], tool))
            if report is not None:
                report(len(found), num_rows)
    return found


def _with_tracker(bracket: Bracket, tool: ToolProcess) -> Bracket:
    record, setup = bracket.record, bracket.record.training_setup()
    failed_batch = record.next_larger_batch_failed
    assert bracket.failed_bytes is not None
    assert failed_batch is not None
    ran, failed = dict(bracket.ran_bytes), dict(bracket.failed_bytes)
    for method, cuda_rules in TRACKED_METHODS.items():
        for needed, batch_size in ((ran, record.batch_size_per_device), (failed, failed_batch)):
            at_batch = replace(setup, batch_size_per_device=batch_size)
            answer = tool.ask(tracked_peak_bytes, record.run.model, at_batch, cuda_rules=cuda_rules)
            if answer.value is not None:
                needed[method] = answer.value
    return replace(bracket, ran_bytes=ran, failed_bytes=failed)


def _spread_out(num_all: int, num_wanted: int) -> list[int]:
    """Indices at equal distances, the first and the last among them; all if there are not that many."""
    chosen = np.linspace(0, num_all - 1, min(num_wanted, num_all)).round()
    return sorted({int(index) for index in chosen})


def baseline_study(steps: Sequence[Measured]) -> dict[str, dict[str, ErrorMetrics]]:
    """Errors of each baseline over all rows and by layout, five folds by family, which are those of the family study.

    Args:
        steps: The tested rows.
    """
    cases = [(trace(step.run.model, step.setup), step.device, step.setup) for step in steps]
    features = whole_model_features(cases)
    actual = np.asarray([step.record.step_time_s for step in steps])
    layouts = np.asarray([str(step.setup.layout) for step in steps])
    splits = family_folds([step.record for step in steps])
    found: dict[str, dict[str, ErrorMetrics]] = {}
    for name in baseline_names():
        predicted = cross_validated_predictions(partial(make_baseline, name), features, actual, splits)
        found[name] = {"all": errors(predicted, actual)}
        for layout in np.unique(layouts):
            chosen = layouts == layout
            found[name][str(layout)] = errors(predicted[chosen], actual[chosen])
    return found
