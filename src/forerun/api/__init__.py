"""The calls a user makes, by verb; each is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api.calibration import Calibration, calibrate
    from forerun.api.composition import CompositionRun, measure_composition, recorded_compositions
    from forerun.api.measurement import MeasurementRun, measure_grid, measure_layers, measure_model
    from forerun.api.prediction import (
        Evaluation,
        Sweep,
        evaluate,
        evaluate_reference,
        fit_op_model,
        predict,
        sweep,
    )
    from forerun.api.regressors import (
        fit_regressor,
        load_trained_model,
        predict_epoch_time,
        predict_time,
        save_trained_model,
    )
    from forerun.api.suite import SuiteRun, measure_suite

__all__ = [
    "Calibration",
    "CompositionRun",
    "Evaluation",
    "MeasurementRun",
    "SuiteRun",
    "Sweep",
    "calibrate",
    "evaluate",
    "evaluate_reference",
    "fit_op_model",
    "fit_regressor",
    "load_trained_model",
    "measure_composition",
    "measure_grid",
    "measure_layers",
    "measure_model",
    "measure_suite",
    "predict",
    "predict_epoch_time",
    "predict_time",
    "recorded_compositions",
    "save_trained_model",
    "sweep",
]

_MODULES = {
    "Calibration": "calibration",
    "CompositionRun": "composition",
    "Evaluation": "prediction",
    "MeasurementRun": "measurement",
    "SuiteRun": "suite",
    "Sweep": "prediction",
    "calibrate": "calibration",
    "evaluate": "prediction",
    "evaluate_reference": "prediction",
    "fit_op_model": "prediction",
    "fit_regressor": "regressors",
    "load_trained_model": "regressors",
    "measure_composition": "composition",
    "measure_grid": "measurement",
    "measure_layers": "measurement",
    "measure_model": "measurement",
    "measure_suite": "suite",
    "predict": "prediction",
    "predict_epoch_time": "regressors",
    "predict_time": "regressors",
    "recorded_compositions": "composition",
    "save_trained_model": "regressors",
    "sweep": "prediction",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
