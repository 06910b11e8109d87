"""Trials on the nodes of a Ray cluster: one task per trial, run again elsewhere when its node dies."""

from __future__ import annotations

import atexit
import contextlib
from typing import Any

from forerun.errors import MeasurementError
from forerun.measurement.device_index import gpu_index
from forerun.measurement.ray_cluster import connected_ray
from forerun.tuning.configuration import Configuration
from forerun.tuning.trial import TrialOrder, TrialResult, run_trial
from forerun.tuning.tuner import TrialRunner

__all__ = ["ray_runner"]

_NUM_RETRIES = 3


def ray_runner(address: str) -> TrialRunner:
    """A runner that gives each trial to a node with a free core, or a free GPU if the trials need one.

    The script and its data must be where the node has them too. Several studies' processes may use the same cluster;
    each waits for its own trial.

    Args:
        address: ``auto`` or ``HOST:PORT``.

    Raises:
        MissingExtraError, MeasurementError: Ray is not installed, or there is no cluster.
    """
    stack = contextlib.ExitStack()
    ray = stack.enter_context(connected_ray(address))
    atexit.register(stack.close)

    def run(order: TrialOrder, configuration: Configuration, **ignored: Any) -> TrialResult:
        # Pruning needs every printed line while a trial runs; a remote trial runs to its end.
        resources = {"num_cpus": 1, "num_gpus": 0 if gpu_index(order.device_index) is None else 1}
        task = ray.remote(run_trial).options(max_retries=_NUM_RETRIES, **resources)
        try:
            result: TrialResult = ray.get(task.remote(order, configuration))
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
            raise MeasurementError(f"expected a trial to run on the cluster, got: {reason}") from error
        return result

    return run
