"""Memory of a configuration before it runs, from the trials that have run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MemoryPoint", "predicted_memory_bytes"]

_WORKER_BYTES = 200e6
"""Memory assumed for a forked worker before one has run: it copies the pages of its parent that it touches."""

_MARGIN = 1.10
_NEAR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Memory of a trial.

    Attributes:
        values: Values of the trial's parameters.
        start_bytes: Memory before the first step [bytes].
        peak_bytes: Peak memory; for a trial that the limit ended, the limit [bytes].
    """

    values: Mapping[str, Any]
    start_bytes: float
    peak_bytes: float


def predicted_memory_bytes(
    points: Sequence[MemoryPoint], values: Mapping[str, Any], base: Mapping[str, Any]
) -> float | None:
    """Upper estimate of the peak of a configuration [bytes]; None before any trial has run.

    peak = start + a x + w n + v n x, with x the pixels of a batch relative to the script's own and n the workers.
    Tensors of a step grow with its batch, each worker has a process and prefetched batches. With a single
    batch size seen, all memory after the start is taken to grow with the batch, which is too much rather than too
    little; with two or more the terms are fitted by non-negative least squares on relative errors. The margin is a
    tenth, and grows with the square root of the batch over the largest batch that ran.
    """
    from scipy.optimize import nnls

    if not points:
        return None
    sizes = np.array([_relative_batch(point.values, base) for point in points])
    workers = np.array([float(point.values.get("num_workers", 0)) for point in points])
    peaks = np.array([point.peak_bytes for point in points])
    start = float(np.median([point.start_bytes for point in points]))
    size, num_workers = _relative_batch(values, base), float(values.get("num_workers", 0))
    worker_bytes = 0.0 if np.any(workers) else _WORKER_BYTES
    if len(set(sizes)) < 2:
        growth = float(np.max((peaks - start - _WORKER_BYTES * workers) / sizes))
        return _MARGIN * (start + max(0.0, growth) * size + _WORKER_BYTES * num_workers)
    design = np.column_stack([np.ones_like(sizes), sizes, workers, workers * sizes])
    weights, _ = nnls(design / peaks[:, None], np.ones_like(peaks))
    expected = float(np.array([1.0, size, num_workers, num_workers * size]) @ weights)
    expected += worker_bytes * num_workers
    # A configuration that ran is a floor for one that is larger in every respect.
    below = (sizes <= size) & (workers <= num_workers)
    floor = float(peaks[below].max()) if below.any() else 0.0
    beyond = max(1.0, size / (_NEAR * float(sizes.max())))
    return float(max(expected * (1 + (_MARGIN - 1) * beyond**0.5), floor))


def _relative_batch(values: Mapping[str, Any], base: Mapping[str, Any]) -> float:
    def ratio(name: str) -> float:
        own = base.get(name)
        return float(values.get(name, own)) / float(own) if own else 1.0

    return ratio("batch_size") * ratio("image_size") ** 2
