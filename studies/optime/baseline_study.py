"""Simple predictors on the rows of the family study, fitted with the same families left out."""

from __future__ import annotations

from collections.abc import Sequence
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


def baseline_study(steps: Sequence[Measured]) -> dict[str, dict[str, ErrorMetrics]]:
    """Errors of each baseline over all rows and by layout, five folds by family.

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
