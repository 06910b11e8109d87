"""All-reduces of five sizes between the devices at hand: latency and bandwidth of their link.

Parameters of the job: ``num_devices``. Results: ``latency_s`` (alpha, of one hop) and ``bandwidth_bytes_per_s`` (beta,
of one direction) of a ring, fitted on relative error to the medians ``size_N_bytes`` / ``time_N_s``;
``sharing_slowdown``, on a processor the factor on a step's time while the other processes make a step too, 1 on GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from forerun.base.errors import MeasurementError
from forerun.base.numerics import relative_coefficients
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.process_group import run_in_group
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.torch_device import synchroniser
from forerun.evidence.records.measured_run import whole_of
from forerun.evidence.records.measurement import JobKind, Measurement, Scalar
from forerun.question.devices.device import LinkKind
from forerun.question.devices.local import gpu_index

__all__ = ["PROBE_SIZES", "fit_ring", "run_link_probe", "write_measured_link"]

PROBE_SIZES = (1024, 64 * 1024, 1024**2, 8 * 1024**2, 64 * 1024**2)
"""Sizes of the five messages, from one bound by latency to one bound by bandwidth [bytes]."""


@runner(JobKind.LINK)
def run_link_probe(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times the five all-reduces; the record holds the repetitions of the largest."""
    num_devices = whole_of(job.parameters, "num_devices", 2)
    if num_devices < 2:
        raise MeasurementError(
            f"a link has two ends or more: expected num_devices of at least 2, got {num_devices}"
        )
    found: _Probe = run_in_group(
        _work,
        protocol.num_repetitions,
        num_processes=num_devices,
        device_index=device_index,
        num_threads=max(1, (protocol.num_threads or 1) // num_devices),
    )
    medians_s = [median(times_s) for times_s in found.times_s]
    latency_s, bandwidth = fit_ring(PROBE_SIZES, medians_s, num_devices)
    results: dict[str, Scalar] = {
        "latency_s": latency_s,
        "bandwidth_bytes_per_s": bandwidth,
        "world_size": num_devices,
        "sharing_slowdown": found.sharing_slowdown,
    }
    for number, (size, time_s) in enumerate(zip(PROBE_SIZES, medians_s, strict=True), start=1):
        results |= {f"size_{number}_bytes": size, f"time_{number}_s": time_s}
    return RunResult(repetitions_s=tuple(found.times_s[-1]), results=results)


def fit_ring(sizes_bytes: Sequence[float], times_s: Sequence[float], num_devices: int) -> tuple[float, float]:
    """Latency of a hop [s] and bandwidth [bytes/s] of a ring from the times of its all-reduces.

    t = 2(n-1) a + 2(n-1)/n m / B with a, 1/B >= 0 and the smallest squared *relative* error, so that small messages
    count.

    Raises:
        MeasurementError: The times do not grow with the size, so there is no bandwidth.
    """
    rounds = 2 * (num_devices - 1)
    sizes, times = np.asarray(sizes_bytes, dtype=float), np.asarray(times_s, dtype=float)
    columns = np.column_stack([np.full(len(sizes), rounds), rounds / num_devices * sizes])
    latency_s, per_byte_s = relative_coefficients(columns, times)
    if per_byte_s <= 0:
        raise MeasurementError(
            "the times of the all-reduces do not grow with their sizes; measure again on a quiet machine"
        )
    return float(latency_s), float(1 / per_byte_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Results of rank 0: times of each size [s], and the slowdown of its work by the others' work."""

    times_s: list[list[float]]
    sharing_slowdown: float


def _work(rank: int, num_processes: int, device: str, num_repetitions: int) -> _Probe:
    """The probe of one process."""
    slowdown = 1.0 if device.startswith("cuda") else _sharing_slowdown(rank, num_repetitions)
    return _Probe(times_s=_all_reduce_times_s(device, num_repetitions), sharing_slowdown=slowdown)


def _sharing_slowdown(rank: int, num_repetitions: int) -> float:
    """Time of a block's step in all processes at once over its time in one: they share caches and memory.

    The block is convolution, batch norm and ReLU on tensors of 4 MiB, as in networks: tensors that fit in a core's own
    cache share nothing and would show nothing.
    """
    import torch
    import torch.distributed as dist

    images = torch.randn(16, 64, 32, 32, requires_grad=True)
    block = torch.nn.Sequential(
        torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU()
    )

    def step_s() -> float:
        began_s = time.perf_counter()
        block(images).sum().backward()
        return time.perf_counter() - began_s

    alone_s, together_s = [], []
    for _ in range(3 + num_repetitions):
        dist.barrier()
        if rank == 0:
            alone_s.append(step_s())
        dist.barrier()
        together_s.append(step_s())
    return _undisturbed(together_s[3:]) / _undisturbed(alone_s[3:]) if rank == 0 else 1.0


def _undisturbed(times_s: list[float]) -> float:
    """Tenth percentile [s]: other work of the machine only adds time, and would hide a small cost of sharing."""
    return sorted(times_s)[len(times_s) // 10]


def _all_reduce_times_s(device: str, num_repetitions: int) -> list[list[float]]:
    """Times of the all-reduce of each size [s]."""
    import torch
    import torch.distributed as dist

    synchronise = synchroniser(torch.device(device))
    found = []
    for size in PROBE_SIZES:
        message = torch.zeros(size // 4, device=device)
        times_s = []
        for _ in range(2 + max(3, num_repetitions)):
            synchronise()
            dist.barrier()
            began_s = time.perf_counter()
            dist.all_reduce(message)
            synchronise()
            times_s.append(time.perf_counter() - began_s)
        found.append(times_s[2:])  # the first two calls open connections and buffers
    return found


def write_measured_link(measurement: Measurement, path: Path) -> None:
    """Writes the link of a probe; its usable share is 1, because the measured rate is the usable rate.

    Args:
        measurement: A finished probe.
        path: TOML file to write.

    Raises:
        MeasurementError: The probe has no result, or the file cannot be written.
    """
    results, around = measurement.results, measurement.circumstances
    latency, bandwidth = results.get("latency_s"), results.get("bandwidth_bytes_per_s")
    if not isinstance(latency, float) or not isinstance(bandwidth, float):
        raise MeasurementError(
            f"expected a finished probe of a link, got one that {measurement.outcome}: {measurement.reason}"
        )
    kind = LinkKind.HOST if gpu_index(around.device_index) is None else LinkKind.PCIE
    source = (
        f"five all-reduces of {results['world_size']} processes, {around.started_at[:10]}, "
        f"{around.framework} {around.framework_version}"
    )
    text = f"""# Measured by forerun measure link.
[link]
name = "measured"
title = "link measured on {around.device_title}"
kind = "{kind}"
bandwidth_gb_s = {bandwidth / 1e9:.6g}
usable_share = 1.0
latency_us = {max(latency, 1e-9) * 1e6:.6g}

[link.sources]
bandwidth_gb_s = "{source}"
usable_share = "the measured rate is the usable rate"
latency_us = "{source}"
"""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MeasurementError(
            f"the link could not be written to '{path}': {error.strerror or error}"
        ) from error
