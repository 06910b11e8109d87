"""Modules for every job, imported once by the fork server, which saves seconds per job.

The first optimizer of a process loads ``torch._dynamo``, the first model of torchvision all of its models. This
module must not begin to use a GPU or start a thread: a child is forked from the process that imported it.
"""

from __future__ import annotations

import importlib

__all__ = ["PRELOADED"]

PRELOADED = (
    "torch._dynamo",
    "torchvision.models",
    "forerun.measurement.runners.data_parallel_runner",
    "forerun.measurement.runners.kernel_runner",
    "forerun.measurement.layers.modules",
    "forerun.measurement.runners.layer_runner",
    "forerun.measurement.runners.link_runner",
    "forerun.measurement.runners.null_runner",
    "forerun.measurement.runners.step_runner",
    "forerun.measurement.runners.training_runner",
    "forerun.tracing.models.sources",
    "forerun.tracing.step",
)
"""The modules imported with this one."""

for _name in PRELOADED:
    importlib.import_module(_name)
