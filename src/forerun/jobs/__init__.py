"""Forecasts runs and schedules jobs on a shared cluster; its door for callbacks and measured curves is this module.

The names below are all that other satellites may use. They load with their first use, so that the door costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.jobs.forecasting.backtest_table import shipped_table as shipped_table
    from forerun.jobs.forecasting.convergence import NoiseScale as NoiseScale
    from forerun.jobs.forecasting.convergence import gradient_noise_scale as gradient_noise_scale
    from forerun.jobs.forecasting.curve import Curve as Curve
    from forerun.jobs.forecasting.curve import Target as Target
    from forerun.jobs.forecasting.curve import parse_target as parse_target
    from forerun.jobs.forecasting.curve_files import find_curve_files as find_curve_files
    from forerun.jobs.forecasting.curve_files import read_curve as read_curve
    from forerun.jobs.forecasting.forecast import CurveForecast as CurveForecast
    from forerun.jobs.forecasting.forecast import forecast_curve as forecast_curve
    from forerun.jobs.forecasting.forecast_answer import HOPELESS as HOPELESS
    from forerun.jobs.forecasting.forecast_answer import chance_to_win as chance_to_win
    from forerun.jobs.forecasting.next_trial import next_stage as next_stage
    from forerun.jobs.forecasting.next_trial import next_trial as next_trial
    from forerun.jobs.forecasting.schedule import LearningRateSchedule as LearningRateSchedule
    from forerun.jobs.forecasting.schedule import followed_schedule as followed_schedule
    from forerun.jobs.forecasting.schedule import schedule_of as schedule_of

_NAMES = {
    "backtest_table": ("shipped_table",),
    "convergence": ("NoiseScale", "gradient_noise_scale"),
    "curve": ("Curve", "Target", "parse_target"),
    "curve_files": ("find_curve_files", "read_curve"),
    "forecast": ("CurveForecast", "forecast_curve"),
    "forecast_answer": ("HOPELESS", "chance_to_win"),
    "next_trial": ("next_stage", "next_trial"),
    "schedule": ("LearningRateSchedule", "followed_schedule", "schedule_of"),
}
"""Names by the module of ``jobs.forecasting`` that has them."""

__all__ = [name for names in _NAMES.values() for name in names]


def __getattr__(name: str) -> object:
    module = next((module for module, names in _NAMES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.forecasting.{module}"), name)
