"""The calls a user makes, by verb; each is loaded on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api.backtests import Backtest, ReferenceBacktest, backtest, backtest_reference
    from forerun.api.calibration import Calibration, calibrate
    from forerun.api.comparing import Comparison, apply, compare
    from forerun.api.composition import CompositionRun, measure_composition, recorded_compositions
    from forerun.api.configurations import TradeOff, trade_off
    from forerun.api.convergence_tables import (
        BatchForecast,
        NetworkForecast,
        forecast_batches,
        forecast_networks,
    )
    from forerun.api.curves import TrainedCurve, measure_curve
    from forerun.api.forecasting import RunForecast, forecast
    from forerun.api.frameworks import keras_parity, stack_study
    from forerun.api.loading import LoaderRun, measure_loader
    from forerun.api.measurement import (
        MeasurementRun,
        measure_grid,
        measure_layers,
        measure_link,
        measure_model,
    )
    from forerun.api.models import kept_model_names, model_names, trace_model
    from forerun.api.plan_targets import read_curves
    from forerun.api.planning import plan, read_accuracies
    from forerun.api.prediction import (
        Evaluation,
        Sweep,
        evaluate,
        evaluate_reference,
        fit_op_model,
        fit_scaling_model,
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
    from forerun.api.scaling import ScaleCurve, scale
    from forerun.api.scenarios import tune_scenarios
    from forerun.api.scheduling import Schedule, schedule, schedule_trace
    from forerun.api.skypilot import time_estimator
    from forerun.api.speeds import ServerCurve, SpeedFit, fit_speed, scale_servers
    from forerun.api.suite import SuiteRun, measure_suite
    from forerun.api.tuning import TuneResult, tune

__all__ = [
    "Backtest",
    "BatchForecast",
    "Calibration",
    "Comparison",
    "CompositionRun",
    "Evaluation",
    "LoaderRun",
    "MeasurementRun",
    "NetworkForecast",
    "ReferenceBacktest",
    "RunForecast",
    "ScaleCurve",
    "Schedule",
    "ServerCurve",
    "SpeedFit",
    "SuiteRun",
    "Sweep",
    "TradeOff",
    "TrainedCurve",
    "TuneResult",
    "apply",
    "backtest",
    "backtest_reference",
    "calibrate",
    "compare",
    "evaluate",
    "evaluate_reference",
    "fit_op_model",
    "fit_regressor",
    "fit_scaling_model",
    "fit_speed",
    "forecast",
    "forecast_batches",
    "forecast_networks",
    "kept_model_names",
    "keras_parity",
    "load_trained_model",
    "measure_composition",
    "measure_curve",
    "measure_grid",
    "measure_layers",
    "measure_link",
    "measure_loader",
    "measure_model",
    "measure_suite",
    "model_names",
    "plan",
    "predict",
    "predict_epoch_time",
    "predict_time",
    "profile",
    "read_accuracies",
    "read_curves",
    "recorded_compositions",
    "save_trained_model",
    "scale",
    "scale_servers",
    "schedule",
    "schedule_trace",
    "stack_study",
    "sweep",
    "time_estimator",
    "trace_model",
    "trade_off",
    "tune",
    "tune_scenarios",
]

_MODULES = {
    "Backtest": "backtests",
    "BatchForecast": "convergence_tables",
    "Calibration": "calibration",
    "Comparison": "comparing",
    "CompositionRun": "composition",
    "Evaluation": "prediction",
    "LoaderRun": "loading",
    "MeasurementRun": "measurement",
    "NetworkForecast": "convergence_tables",
    "ReferenceBacktest": "backtests",
    "RunForecast": "forecasting",
    "ScaleCurve": "scaling",
    "Schedule": "scheduling",
    "ServerCurve": "speeds",
    "SpeedFit": "speeds",
    "SuiteRun": "suite",
    "Sweep": "prediction",
    "TradeOff": "configurations",
    "TrainedCurve": "curves",
    "TuneResult": "tuning",
    "apply": "comparing",
    "backtest": "backtests",
    "backtest_reference": "backtests",
    "calibrate": "calibration",
    "compare": "comparing",
    "evaluate": "prediction",
    "evaluate_reference": "prediction",
    "fit_op_model": "prediction",
    "fit_regressor": "regressors",
    "fit_scaling_model": "prediction",
    "fit_speed": "speeds",
    "forecast": "forecasting",
    "forecast_batches": "convergence_tables",
    "forecast_networks": "convergence_tables",
    "kept_model_names": "models",
    "keras_parity": "frameworks",
    "load_trained_model": "regressors",
    "measure_composition": "composition",
    "measure_curve": "curves",
    "measure_grid": "measurement",
    "measure_layers": "measurement",
    "measure_link": "measurement",
    "measure_loader": "loading",
    "measure_model": "measurement",
    "measure_suite": "suite",
    "model_names": "models",
    "plan": "planning",
    "predict": "prediction",
    "predict_epoch_time": "regressors",
    "predict_time": "regressors",
    "profile": "profiling",
    "read_accuracies": "planning",
    "read_curves": "plan_targets",
    "recorded_compositions": "composition",
    "save_trained_model": "regressors",
    "scale": "scaling",
    "scale_servers": "speeds",
    "schedule": "scheduling",
    "schedule_trace": "scheduling",
    "stack_study": "frameworks",
    "sweep": "prediction",
    "time_estimator": "skypilot",
    "trace_model": "models",
    "trade_off": "configurations",
    "tune": "tuning",
    "tune_scenarios": "scenarios",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
