"""Public names of this package and the module of each; ``__init__.py`` loads them from here on first use."""

from forerun.script.callbacks.frameworks import keras_callback as keras_callback
from forerun.script.callbacks.frameworks import lightning_callback as lightning_callback
from forerun.script.callbacks.frameworks import lightning_timer as lightning_timer
from forerun.script.callbacks.frameworks import trainer_callback as trainer_callback
from forerun.script.callbacks.loop import CurveCallback as CurveCallback
from forerun.script.callbacks.loop import CurveLog as CurveLog
from forerun.script.callbacks.loop import LoopTimer as LoopTimer
from forerun.script.callbacks.pruner import ForecastPruner as ForecastPruner
from forerun.script.callbacks.pruner import ray_scheduler as ray_scheduler
from forerun.script.callbacks.run_logger import RunLogger as RunLogger
