"""What ``import forerun`` offers, and what it leaves alone."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import forerun

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "numpy",
    "pandas",
    "timm",
    "transformers",
    "tensorflow",
    "matplotlib",
    "scipy",
    "rich.table",
)

PUBLIC_NAMES = [
    "Calibration",
    "Capture",
    "CostModel",
    "Device",
    "Diagnosis",
    "Estimate",
    "Evaluation",
    "FailureError",
    "ForerunError",
    "Host",
    "Interval",
    "LiveSchedule",
    "MeasurementRun",
    "Plan",
    "PlanOptions",
    "Record",
    "Run",
    "RunForecast",
    "RunOptions",
    "ScaleCurve",
    "ScaleOptions",
    "Schedule",
    "ServerCurve",
    "SpeedFit",
    "Sweep",
    "TradeOff",
    "TuneResult",
    "UsageError",
    "__version__",
    "advise",
    "apply",
    "backtest",
    "calibrate",
    "capture",
    "compare",
    "describe_host",
    "diagnose",
    "evaluate",
    "find_device",
    "fit",
    "fit_regressor",
    "fit_speed",
    "forecast",
    "layouts",
    "load_catalog",
    "load_trained_model",
    "measure",
    "measure_composition",
    "measure_curve",
    "measure_grid",
    "measure_layers",
    "measure_link",
    "measure_model",
    "plan",
    "predict",
    "predict_step_time",
    "predict_time",
    "profile",
    "save_trained_model",
    "scale",
    "scale_servers",
    "schedule",
    "schedule_live",
    "schedule_trace",
    "sweep",
    "time_estimator",
    "trade_off",
    "tune",
    "watch",
]


def test_public_names_are_these():
    assert forerun.__all__ == PUBLIC_NAMES


@pytest.mark.parametrize("name", PUBLIC_NAMES)
def test_every_public_name_can_be_had(name):
    assert getattr(forerun, name) is not None
    assert name in dir(forerun)


def test_a_wrong_attribute_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'forerun' has no attribute 'predikt'"):
        _ = forerun.predikt


def test_version_is_that_of_the_installed_package():
    assert forerun.__version__ == metadata.version("forerun")


def test_sources_that_are_only_on_the_path_have_an_unknown_version():
    code = "import forerun; print(forerun.__version__)"
    command = [sys.executable, "-S", "-c", code]  # -S: no installed package
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )
    assert done.stdout.strip() == "0+unknown"


@pytest.mark.parametrize(
    "statement",
    [
        "import forerun; dir(forerun); forerun.__version__; forerun.ForerunError",
        "from forerun.surface.cli.main import app; app(['--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['predict', '--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['scale', '--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['schedule', '--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['forecast', '--help'], standalone_mode=False)",
        "import forerun.script.callbacks; dir(forerun.script.callbacks)",
        "from forerun.surface.cli.main import app; app(['plan', '--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['serve', '--help'], standalone_mode=False)",
        "from forerun.surface.cli.main import app; app(['hardware', 'list', '--json'], standalone_mode=False)",
    ],
)
def test_nothing_heavy_is_loaded_where_nothing_is_computed(statement):
    question = f"import sys; print('loaded:', sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}; {question}"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
