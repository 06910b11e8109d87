"""The calls a user makes, by verb; each is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api.calibration import Calibration, calibrate
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
    from forerun.api.scheduling import Schedule, schedule, schedule_trace

__all__ = [
    "Calibration",
    "Evaluation",
    "MeasurementRun",
    "Schedule",
    "Sweep",
    "calibrate",
    "evaluate",
    "evaluate_reference",
    "fit_op_model",
    "fit_regressor",
    "load_trained_model",
    "measure_grid",
    "measure_layers",
    "measure_model",
    "predict",
    "predict_epoch_time",
    "predict_time",
    "save_trained_model",
    "schedule",
    "schedule_trace",
    "sweep",
]

_MODULES = {
    "Calibration": "calibration",
    "Evaluation": "prediction",
    "MeasurementRun": "measurement",
    "Schedule": "scheduling",
    "Sweep": "prediction",
    "calibrate": "calibration",
    "evaluate": "prediction",
    "evaluate_reference": "prediction",
    "fit_op_model": "prediction",
    "fit_regressor": "regressors",
    "load_trained_model": "regressors",
    "measure_grid": "measurement",
    "measure_layers": "measurement",
    "measure_model": "measurement",
    "predict": "prediction",
    "predict_epoch_time": "regressors",
    "predict_time": "regressors",
    "save_trained_model": "regressors",
    "schedule": "scheduling",
    "schedule_trace": "scheduling",
    "sweep": "prediction",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
