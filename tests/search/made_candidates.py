"""Tables of candidates made by hand: every figure is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from forerun.search.choice import CandidateTable
from forerun.search.devices import parse_devices

WIDTH = 1.1
"""Upper end over value of every interval."""


def table(
    times_s: Sequence[float],
    costs_usd: Sequence[float],
    memory_bytes: Sequence[float] | None = None,
    *,
    options: Sequence[int] | None = None,
    width: float = WIDTH,
    **others: Sequence[float],
) -> CandidateTable:
    """Candidates with these times, costs and memory, on one T4 with 10 bytes unless ``options`` says others."""
    count = len(times_s)
    unknown = [np.nan] * count
    columns = {
        "job_time_s": times_s,
        "cost_usd": costs_usd,
        "peak_memory_bytes": memory_bytes or [1.0] * count,
        "step_time_s": np.asarray(times_s) / 100,
        "epoch_time_s": times_s,
        "throughput_samples_per_s": 1 / np.asarray(times_s),
        "device_samples_per_s": 1 / np.asarray(times_s),
        **dict.fromkeys(("energy_j", "co2_g", "accuracy"), unknown),
        **others,
    }
    return CandidateTable(
        configurations=({"model": "cnn", "precision": "fp32", "layout": "nchw"},),
        options=parse_devices("t4,l4,a10,a100-sxm4-40gb"),
        configuration=np.zeros(count, dtype=np.int64),
        option=np.asarray(options if options is not None else [0] * count),
        batch_size=np.arange(1, count + 1),
        values={
            name: np.stack([np.asarray(values, dtype=float) * end for end in (1.0, 1 / width, width)])
            for name, values in columns.items()
        },
        device_memory_bytes=np.full(count, 10.0),
        provenance=np.full(count, "datasheet only"),
    )
