"""The calls a user makes, by verb; each is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api.calibration import Calibration, calibrate
    from forerun.api.composition import CompositionRun, measure_composition, recorded_compositions
    from forerun.api.curves import TrainedCurve, measure_curve
    from forerun.api.forecasting import Backtest, RunForecast, TradeOff, backtest, forecast, trade_off
    from forerun.api.measurement import MeasurementRun, measure_grid, measure_layers, measure_model
    from forerun.api.planning import plan, read_accuracies
    from forerun.api.prediction import (
        Evaluation,
        Sweep,
        evaluate,
        evaluate_reference,
        fit_op_model,
        predict,
        sweep,
    )
    from forerun.api.profiling import profile
    from forerun.api.regressors import (
        fit_regressor,
        load_trained_model,
        predict_epoch_time,
        predict_time,
        save_trained_model,
    )
    from forerun.api.scenarios import tune_scenarios
    from forerun.api.suite import SuiteRun, measure_suite
    from forerun.api.tuning import Comparison, TuneResult, apply, compare, tune

__all__ = [
    "Backtest",
    "Calibration",
    "Comparison",
    "CompositionRun",
    "Evaluation",
    "MeasurementRun",
    "RunForecast",
    "SuiteRun",
    "Sweep",
    "TradeOff",
    "TrainedCurve",
    "TuneResult",
    "apply",
    "backtest",
    "calibrate",
    "compare",
    "evaluate",
    "evaluate_reference",
    "fit_op_model",
    "fit_regressor",
    "forecast",
    "load_trained_model",
    "measure_composition",
    "measure_curve",
    "measure_grid",
    "measure_layers",
    "measure_model",
    "measure_suite",
    "plan",
    "predict",
    "predict_epoch_time",
    "predict_time",
    "profile",
    "read_accuracies",
    "recorded_compositions",
    "save_trained_model",
    "sweep",
    "trade_off",
    "tune",
    "tune_scenarios",
]

_MODULES = {
    "Backtest": "forecasting",
    "Calibration": "calibration",
    "Comparison": "tuning",
    "CompositionRun": "composition",
    "Evaluation": "prediction",
    "MeasurementRun": "measurement",
    "RunForecast": "forecasting",
    "SuiteRun": "suite",
    "Sweep": "prediction",
    "TradeOff": "forecasting",
    "TrainedCurve": "curves",
    "TuneResult": "tuning",
    "apply": "tuning",
    "backtest": "forecasting",
    "calibrate": "calibration",
    "compare": "tuning",
    "evaluate": "prediction",
    "evaluate_reference": "prediction",
    "fit_op_model": "prediction",
    "fit_regressor": "regressors",
    "forecast": "forecasting",
    "load_trained_model": "regressors",
    "measure_composition": "composition",
    "measure_curve": "curves",
    "measure_grid": "measurement",
    "measure_layers": "measurement",
    "measure_model": "measurement",
    "measure_suite": "suite",
    "plan": "planning",
    "predict": "prediction",
    "predict_epoch_time": "regressors",
    "predict_time": "regressors",
    "profile": "profiling",
    "read_accuracies": "planning",
    "recorded_compositions": "composition",
    "save_trained_model": "regressors",
    "sweep": "prediction",
    "trade_off": "forecasting",
    "tune": "tuning",
    "tune_scenarios": "scenarios",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
