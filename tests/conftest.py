"""Traced graphs of the tests go to a folder of their own, never to the user's cache."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    if "FORERUN_CACHE" not in os.environ:
        os.environ["FORERUN_CACHE"] = str(tmp_path_factory.mktemp("forerun-cache"))
        yield
        del os.environ["FORERUN_CACHE"]
    else:
        yield
