"""What every job needs, imported once by the fork server instead of in each child: seconds a job.

The first optimizer of a process loads ``torch._dynamo``, the first model of torchvision all of its models. Nothing here
may begin to use a GPU or start a thread: a child is forked from the process that imported this.
"""

from __future__ import annotations

import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    "torch._dynamo",
    "torchvision.models",
    "forerun.measurement.data_parallel_runner",
    "forerun.measurement.kernel_runner",
    "forerun.measurement.layer_modules",
    "forerun.measurement.layer_runner",
    "forerun.measurement.link_runner",
    "forerun.measurement.null_runner",
    "forerun.measurement.step_runner",
    "forerun.measurement.training_runner",
    "forerun.tracing.sources",
    "forerun.tracing.step",
)
"""The modules, imported with this one."""

for _name in PRELOADED:
    importlib.import_module(_name)
