"""Traced graphs of the tests go to a folder of their own; examples of laws are the same every time."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# The workers of pytest fill the cores already: threads of small products would only wait for each other, by spinning.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

# A change must fail for what it does, not for the draw or for what else the machine does just now;
# `--hypothesis-profile default` searches anew.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    if "FORERUN_CACHE" not in os.environ:
        os.environ["FORERUN_CACHE"] = str(tmp_path_factory.mktemp("forerun-cache"))
        yield
        del os.environ["FORERUN_CACHE"]
    else:
        yield
