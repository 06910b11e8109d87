"""Simple predictors on the rows of a suite, the fitted ones with the families of the tested rows left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from forerun.adapters.classics.baselines import baseline_names, make_baseline
from forerun.adapters.classics.step_features import whole_model_features
from forerun.evidence.fitting.evaluation import ErrorMetrics, cross_validated_predictions, errors, group_folds
from forerun.question.devices.device import Device
from forerun.tracing.trace import trace
from studies.suite.comparison import MeasuredStep

_ROOFLINE, _PYTORCH_RULE = "roofline", "pytorch rule"
_NUM_FOLDS = 5
_FEWEST_ROWS = 10


def suite_baselines(rows: Sequence[MeasuredStep], device: Device) -> dict[str, ErrorMetrics | None]:
    """Errors of each baseline on the rows; None for fitted ones where there are too few rows or families.

    Args:
        rows: Measured steps; their models are traced again, from the cache if they are there.
        device: Device of the steps.
    """
    cases = []
    for row in rows:
        run = row.measurement.run
        assert run is not None
        cases.append((trace(run.model, run.setup), device, run.setup))
    features = whole_model_features(cases)
    actual = np.asarray([row.measured_s for row in rows])
    families = [row.measurement.family for row in rows]
    num_folds = min(_NUM_FOLDS, len(set(families)))
    splits = group_folds(families, num_folds) if num_folds >= 2 and len(rows) >= _FEWEST_ROWS else None
    found: dict[str, ErrorMetrics | None] = {}
    for name in baseline_names():
        if name == _ROOFLINE:  # as it was written down for the device itself
            found[name] = errors([row.prediction.roofline_s or np.nan for row in rows], actual)
        elif name == _PYTORCH_RULE:
            found[name] = errors(make_baseline(name).predict(features), actual)
        elif splits is None:
            found[name] = None
        else:
            predicted = cross_validated_predictions(partial(make_baseline, name), features, actual, splits)
            found[name] = errors(predicted, actual)
    return found
