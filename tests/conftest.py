"""Traced graphs of the tests go to a folder of their own; examples of laws are the same every time."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# A change must fail for what it does, not for the draw; `--hypothesis-profile default` searches anew.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    if "FORERUN_CACHE" not in os.environ:
        os.environ["FORERUN_CACHE"] = str(tmp_path_factory.mktemp("forerun-cache"))
        yield
        del os.environ["FORERUN_CACHE"]
    else:
        yield
