"""Public names of this package and the module of each; ``__init__.py`` loads them from here on first use."""

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
from forerun.jobs.forecasting.next_trial import chance_to_win as chance_to_win
from forerun.jobs.forecasting.next_trial import next_stage as next_stage
from forerun.jobs.forecasting.next_trial import next_trial as next_trial
from forerun.jobs.forecasting.schedule import LearningRateSchedule as LearningRateSchedule
from forerun.jobs.forecasting.schedule import followed_schedule as followed_schedule
from forerun.jobs.forecasting.schedule import schedule_of as schedule_of
