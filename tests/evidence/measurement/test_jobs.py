"""Settings that cannot be meant are refused, and a protocol survives its journey as JSON."""

import math

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.jobs import Protocol


@pytest.mark.parametrize(
    "settings",
    [
        {"min_warm_up": -1},
        {"min_warm_up": 5, "max_warm_up": 4},
        {"window": 2},
        {"tolerance": -0.1},
        {"tolerance": math.nan},
        {"num_repetitions": 2},
        {"max_seconds": -1.0},
        {"timeout_s": 0.0},
        {"timeout_s": math.nan},
        {"anchor_every": -1},
        {"num_threads": 0},
        {"telemetry_every_s": 0.0},
    ],
)
def test_impossible_settings_are_refused_by_name(settings):
    with pytest.raises(InvalidSetupError, match=f"expected {list(settings)[-1]} "):
        Protocol(**settings)
