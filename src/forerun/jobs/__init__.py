"""Forecasts runs and schedules jobs on a shared cluster; its door for callbacks and measured curves is this module.

The names below are all that other satellites may use. They load with their first use, so that the door costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.jobs.forecasting.backtest_table import shipped_table
    from forerun.jobs.forecasting.batch_scaling import NoiseScale, gradient_noise_scale
    from forerun.jobs.forecasting.curve import Curve, Target, parse_target
    from forerun.jobs.forecasting.curve_files import find_curve_files, read_curve
    from forerun.jobs.forecasting.forecast import CurveForecast, forecast_curve
    from forerun.jobs.forecasting.forecast_answer import HOPELESS
    from forerun.jobs.forecasting.schedule import LearningRateSchedule, schedule_of

__all__ = [
    "HOPELESS",
    "Curve",
    "CurveForecast",
    "LearningRateSchedule",
    "NoiseScale",
    "Target",
    "find_curve_files",
    "forecast_curve",
    "gradient_noise_scale",
    "parse_target",
    "read_curve",
    "schedule_of",
    "shipped_table",
]

_MODULES = {
    "HOPELESS": "forecast_answer",
    "Curve": "curve",
    "CurveForecast": "forecast",
    "LearningRateSchedule": "schedule",
    "NoiseScale": "batch_scaling",
    "Target": "curve",
    "find_curve_files": "curve_files",
    "forecast_curve": "forecast",
    "gradient_noise_scale": "batch_scaling",
    "parse_target": "curve",
    "read_curve": "curve_files",
    "schedule_of": "schedule",
    "shipped_table": "backtest_table",
}
"""Module of ``jobs.forecasting`` that has each name."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.forecasting.{_MODULES[name]}"), name)
