"""The public names and the module of each; ``__init__.py`` loads them from here on first use."""

from forerun.adapters.classics.composition import measure_composition as measure_composition
from forerun.adapters.classics.scale_servers import (
    ServerCurve as ServerCurve,
)
from forerun.adapters.classics.scale_servers import (
    SpeedFit as SpeedFit,
)
from forerun.adapters.classics.scale_servers import (
    fit_speed as fit_speed,
)
from forerun.adapters.classics.scale_servers import (
    scale_servers as scale_servers,
)
from forerun.adapters.classics.trained_models import load_trained_model as load_trained_model
from forerun.adapters.classics.trained_models import predict_step_time as predict_step_time
from forerun.adapters.classics.trained_models import predict_time as predict_time
from forerun.adapters.classics.trained_models import save_trained_model as save_trained_model
from forerun.adapters.clusters.job_formats import time_estimator as time_estimator
from forerun.base.errors import (
    FailureError as FailureError,
)
from forerun.base.errors import (
    ForerunError as ForerunError,
)
from forerun.base.errors import (
    UsageError as UsageError,
)
from forerun.cost.time.weights import CostModel as CostModel
from forerun.evidence.calibrate import Calibration as Calibration
from forerun.evidence.calibrate import calibrate as calibrate
from forerun.evidence.evaluate import Evaluation as Evaluation
from forerun.evidence.evaluate import evaluate as evaluate
from forerun.evidence.fit import (
    fit as fit,
)
from forerun.evidence.fit import (
    fit_regressor as fit_regressor,
)
from forerun.evidence.measure import (
    MeasurementRun as MeasurementRun,
)
from forerun.evidence.measure import (
    measure as measure,
)
from forerun.evidence.measure import (
    measure_grid as measure_grid,
)
from forerun.evidence.measure import (
    measure_layers as measure_layers,
)
from forerun.evidence.measure import (
    measure_link as measure_link,
)
from forerun.evidence.measure import (
    measure_model as measure_model,
)
from forerun.evidence.measure_curve import measure_curve as measure_curve
from forerun.evidence.records.measurement import Record as Record
from forerun.graph.captured import Capture as Capture
from forerun.jobs.forecast import TradeOff as TradeOff
from forerun.jobs.forecast import forecast as forecast
from forerun.jobs.forecast import trade_off as trade_off
from forerun.jobs.forecasting.backtest import backtest as backtest
from forerun.jobs.forecasting.forecast_answer import RunForecast as RunForecast
from forerun.jobs.schedule import Schedule as Schedule
from forerun.jobs.schedule import schedule as schedule
from forerun.jobs.schedule import schedule_trace as schedule_trace
from forerun.jobs.schedule_live import LiveSchedule as LiveSchedule
from forerun.jobs.schedule_live import schedule_live as schedule_live
from forerun.prediction.estimate import Estimate as Estimate
from forerun.prediction.estimate import Interval as Interval
from forerun.question.devices import (
    Device as Device,
)
from forerun.question.devices import (
    Host as Host,
)
from forerun.question.devices import (
    describe_host as describe_host,
)
from forerun.question.devices import (
    find_device as find_device,
)
from forerun.question.devices import (
    load_catalog as load_catalog,
)
from forerun.question.options import RunOptions as RunOptions
from forerun.question.options import ScaleOptions as ScaleOptions
from forerun.question.run import Run as Run
from forerun.script.callbacks.live import watch as watch
from forerun.script.capture_script import capture as capture
from forerun.script.compare import apply as apply
from forerun.script.compare import compare as compare
from forerun.script.diagnosis.diagnose import Diagnosis as Diagnosis
from forerun.script.diagnosis.diagnose import diagnose as diagnose
from forerun.script.profile import profile as profile
from forerun.script.tune import TuneResult as TuneResult
from forerun.script.tune import tune as tune
from forerun.search.advise import advise as advise
from forerun.search.layouts import layouts as layouts
from forerun.search.options import PlanOptions as PlanOptions
from forerun.search.plan import plan as plan
from forerun.search.plan_answer import Plan as Plan
from forerun.search.predict import predict as predict
from forerun.search.scale import ScaleCurve as ScaleCurve
from forerun.search.scale import scale as scale
from forerun.search.sweep import Sweep as Sweep
from forerun.search.sweep import sweep as sweep

__version__: str
