"""Know what a training run will take before you run it.

    >>> import forerun
    >>> estimate = forerun.predict("torchvision:resnet50", device="a100-sxm4-40gb", batch_size=64)
    >>> estimate.step_time_s.low <= estimate.step_time_s.value <= estimate.step_time_s.high
    True

Names are loaded on first use, so that the import itself needs no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.api import (
        Calibration,
        Evaluation,
        MeasurementRun,
        RunForecast,
        ScaleCurve,
        Schedule,
        ServerCurve,
        SpeedFit,
        SuiteRun,
        Sweep,
        TradeOff,
        TuneResult,
        apply,
        backtest,
        calibrate,
        compare,
        evaluate,
        fit_regressor,
        fit_speed,
        forecast,
        load_trained_model,
        measure_composition,
        measure_curve,
        measure_grid,
        measure_layers,
        measure_link,
        measure_model,
        measure_suite,
        plan,
        predict,
        predict_epoch_time,
        predict_time,
        profile,
        save_trained_model,
        scale,
        scale_servers,
        schedule,
        schedule_trace,
        sweep,
        time_estimator,
        trade_off,
        tune,
        tune_scenarios,
    )
    from forerun.errors import FailureError, ForerunError, UsageError
    from forerun.hardware import Device, Host, describe_host, find_device, load_catalog
    from forerun.planner.plan import Plan
    from forerun.prediction.estimate import Estimate, Interval

__all__ = [
    "Calibration",
    "Device",
    "Estimate",
    "Evaluation",
    "FailureError",
    "ForerunError",
    "Host",
    "Interval",
    "MeasurementRun",
    "Plan",
    "RunForecast",
    "ScaleCurve",
    "Schedule",
    "ServerCurve",
    "SpeedFit",
    "SuiteRun",
    "Sweep",
    "TradeOff",
    "TuneResult",
    "UsageError",
    "__version__",
    "apply",
    "backtest",
    "calibrate",
    "compare",
    "describe_host",
    "evaluate",
    "find_device",
    "fit_regressor",
    "fit_speed",
    "forecast",
    "load_catalog",
    "load_trained_model",
    "measure_composition",
    "measure_curve",
    "measure_grid",
    "measure_layers",
    "measure_link",
    "measure_model",
    "measure_suite",
    "plan",
    "predict",
    "predict_epoch_time",
    "predict_time",
    "profile",
    "save_trained_model",
    "scale",
    "scale_servers",
    "schedule",
    "schedule_trace",
    "sweep",
    "time_estimator",
    "trade_off",
    "tune",
    "tune_scenarios",
]

__version__ = "0.1.0"

_MODULES = {
    "Calibration": "forerun.api",
    "Device": "forerun.hardware",
    "Estimate": "forerun.prediction.estimate",
    "Evaluation": "forerun.api",
    "FailureError": "forerun.errors",
    "ForerunError": "forerun.errors",
    "Host": "forerun.hardware",
    "Interval": "forerun.prediction.estimate",
    "MeasurementRun": "forerun.api",
    "Plan": "forerun.planner.plan",
    "RunForecast": "forerun.api",
    "ScaleCurve": "forerun.api",
    "Schedule": "forerun.api",
    "ServerCurve": "forerun.api",
    "SpeedFit": "forerun.api",
    "SuiteRun": "forerun.api",
    "Sweep": "forerun.api",
    "TradeOff": "forerun.api",
    "TuneResult": "forerun.api",
    "UsageError": "forerun.errors",
    "apply": "forerun.api",
    "backtest": "forerun.api",
    "calibrate": "forerun.api",
    "compare": "forerun.api",
    "describe_host": "forerun.hardware",
    "evaluate": "forerun.api",
    "find_device": "forerun.hardware",
    "fit_regressor": "forerun.api",
    "fit_speed": "forerun.api",
    "forecast": "forerun.api",
    "load_catalog": "forerun.hardware",
    "load_trained_model": "forerun.api",
    "measure_composition": "forerun.api",
    "measure_curve": "forerun.api",
    "measure_grid": "forerun.api",
    "measure_layers": "forerun.api",
    "measure_link": "forerun.api",
    "measure_model": "forerun.api",
    "measure_suite": "forerun.api",
    "plan": "forerun.api",
    "predict": "forerun.api",
    "predict_epoch_time": "forerun.api",
    "predict_time": "forerun.api",
    "profile": "forerun.api",
    "save_trained_model": "forerun.api",
    "scale": "forerun.api",
    "scale_servers": "forerun.api",
    "schedule": "forerun.api",
    "schedule_trace": "forerun.api",
    "sweep": "forerun.api",
    "time_estimator": "forerun.api",
    "trade_off": "forerun.api",
    "tune": "forerun.api",
    "tune_scenarios": "forerun.api",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
