"""Traced graphs of the tests go to a folder of their own; examples of laws are the same every time."""

from __future__ import annotations

import gc
import os
import resource
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# A change must fail for what it does, not for the draw or for what else the machine does just now;
# `--hypothesis-profile default` searches anew.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")

# Two workers share the cores: more threads of libraries would spin for each other. They read this when they load.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# Processes of the tests, and this one, look for cycles of objects less often: see tests/children/sitecustomize.py.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parent / "children"), *filter(None, [os.environ.get("PYTHONPATH")])]
)
gc.set_threshold(100_000, 50, 100)

# A test that takes all memory shall fail by its name. Without a limit the system ends whole workers, and the run hangs.
_, _allowed_bytes = resource.getrlimit(resource.RLIMIT_DATA)
if _allowed_bytes == resource.RLIM_INFINITY:
    resource.setrlimit(resource.RLIMIT_DATA, (10 << 30, _allowed_bytes))

# With this module TensorBoard does without TensorFlow, whose LLVM cannot share a process with Triton's.
sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))


def pytest_collection_finish():
    """Takes what the imports made, millions of objects, out of every later garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Gives it back to the interpreter, which takes all apart at its end."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def _one_fork_server_for_all_children():
    """A process has one fork server, which loads what its first user needs; here also what the others will need."""
    from forerun.base import process_control

    def for_all(modules):
        from forerun.evidence.measurement.measured_job import _PRELOADED
        from forerun.tracing.source import TRACED_MODULES

        return variables_for([*TRACED_MODULES, *_PRELOADED, *modules])

    variables_for = process_control.preload_variables
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_control, "preload_variables", for_all)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    if "FORERUN_CACHE" not in os.environ:
        folder = tmp_path_factory.getbasetemp()
        # One for all workers: a graph is traced once.
        shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
        os.environ["FORERUN_CACHE"] = str(shared / "forerun-cache")
        yield
        del os.environ["FORERUN_CACHE"]
    else:
        yield
