"""Samples a data loader delivers, and the step when they come too late.

A worker needs a fixed time per sample to decode and augment it; storage and network carry so many bytes a second:

    rate = min(workers used / cost per sample, storage / bytes per sample, network / bytes per sample)
    workers used = min(workers, cores)

With workers the loader runs beside the device and hides behind it as long as it is faster, given that batches are
prefetched: step = max(device, batch / rate). Without workers the training process loads itself, and nothing overlaps:
step = device + batch / rate. Start-up of the workers at each epoch, and the copy to the device, are left out.

A worker also joins samples to batches and hands them over, and shares the caches of its processor: what it needs lies
within ``LOADER_RANGE`` of the cost of its samples, which is the interval of the loading.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from forerun.question.input_pipeline import InputPipeline

__all__ = [
    "LOADER_BOUND_NOTE",
    "LOADER_RANGE",
    "fed_step_s",
    "is_loader_bound",
    "loader_rate_samples_per_s",
    "workers_needed",
]

Floats = npt.NDArray[np.float64]


LOADER_RANGE = (0.95, 1.65)
"""Least and most time of a worker, in the cost of its samples: docs/methods/planning.md has the loaders measured."""

LOADER_BOUND_NOTE = (
    "loader-bound: the device waits for its batches; a worker is assumed to need 0.95 to 1.65 times the cost of "
    "its samples, as measured in real loaders"
)


def loader_rate_samples_per_s(pipeline: InputPipeline) -> float:
    """Samples a second that the loader can deliver; infinite where nothing limits it.

    >>> loader_rate_samples_per_s(InputPipeline(sample_cost_s=0.01, num_workers=8, num_cores=4))
    400.0
    """
    used: float = max(1, pipeline.num_workers)
    if pipeline.num_cores is not None:
        used = min(used, pipeline.num_cores)
    rates = [used / pipeline.sample_cost_s if pipeline.sample_cost_s else math.inf]
    bandwidths = (pipeline.storage_bytes_per_s, pipeline.network_bytes_per_s)
    if pipeline.sample_bytes:
        rates += [bandwidth / pipeline.sample_bytes for bandwidth in bandwidths if bandwidth is not None]
    return min(rates)


def fed_step_s(step_s: Floats, num_samples: Floats, pipeline: InputPipeline) -> Floats:
    """Time of a step with its loader [s].

    Args:
        step_s: Time of the device with its low and high ends, (3, n) [s].
        num_samples: Samples of the step on one device, (n,).
        pipeline: The loader.
    """
    loading_s = np.asarray([[1.0], [LOADER_RANGE[0]], [LOADER_RANGE[1]]]) * (
        num_samples / loader_rate_samples_per_s(pipeline)
    )
    if pipeline.num_workers:
        return np.maximum(step_s, loading_s)
    # One after the other: their errors are independent.
    value = step_s[0] + loading_s[0]
    low, high = np.hypot(step_s[1:] - step_s[0], loading_s[1:] - loading_s[0])
    return np.stack([value, value - low, value + high])


def is_loader_bound(step_s: float, busy_s: float, pipeline: InputPipeline) -> bool:
    """True if the wait for the loader bounds a step.

    Without workers every batch is waited for, which bounds the step only where it takes longer than the device.

    Args:
        step_s: Time of the step with its loader [s].
        busy_s: Time of the device alone [s].
        pipeline: The loader.
    """
    return step_s > (1 + 1e-9 if pipeline.num_workers else 2.0) * busy_s


def workers_needed(pipeline: InputPipeline, device_samples_per_s: float) -> int | None:
    """Fewest workers that keep a device busy; None where cores, storage or network forbid it.

    >>> workers_needed(InputPipeline(sample_cost_s=0.01, num_workers=1), 250.0)
    3
    """
    needed = max(1, math.ceil(device_samples_per_s * pipeline.sample_cost_s - 1e-9))
    with_them = replace(pipeline, num_workers=needed)
    return needed if loader_rate_samples_per_s(with_them) >= device_samples_per_s * (1 - 1e-9) else None
