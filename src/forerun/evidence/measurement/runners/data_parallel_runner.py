"""Jobs of several devices: real processes, real all-reduces.

Steps run under DistributedDataParallel. Parameters of their job beside those of ``step_runner``: ``num_devices``
and ``strategy`` (``ddp``). The batch size is that of one device. On a
processor, n gloo processes share its cores: each has the threads of the session divided by n. Results beside the times
of a step: ``synchronisation_s``, the median step less the median of the same step without its all-reduces
(``no_sync``) in the same processes; ``gradient_bytes``; ``world_size``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.base.isolation import Child, EndedError, fork_server, replies
from forerun.base.kept import temporary_folder, write_whole, writes
from forerun.base.numerics import relative_coefficients
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.step_runner import (
    LEARNING_RATE,
    built_for,
    compiled,
    make_real_optimizer,
    make_step,
    num_parameters,
)
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.timing import has_settled_under
from forerun.evidence.measurement.runners.torch_device import synchroniser
from forerun.evidence.records.measured_run import setup_of, text_of, whole_of
from forerun.evidence.records.measurement import JobKind, Measurement, Scalar
from forerun.question.devices.device import LinkKind
from forerun.question.devices.local import gpu_index
from forerun.question.setup import Phase

if TYPE_CHECKING:
    import torch

STRATEGIES = ("ddp",)
"""Strategies that can be measured."""

_TRIAL_STEPS = 3
_WARM_UP_STEPS = 5


def check_strategy(strategy: str, num_devices: int, phase: str) -> None:
    """Refuse a job that cannot run on several devices.

    Raises:
        InvalidSetupError: The strategy is not known, the number of devices is below one, or the phase has no gradients.
    """
    if strategy not in STRATEGIES:
        raise InvalidSetupError(
            f"expected a strategy of {', '.join(STRATEGIES)}, got '{strategy}'; choose one that runs here"
        )
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    if phase != Phase.TRAIN:
        raise InvalidSetupError(
            f"several devices are measured in training only, got phase {phase}; leave --phase out"
        )


@runner(JobKind.DATA_PARALLEL)
def run_data_parallel(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of all devices together and of the same devices without synchronisation."""
    num_devices = whole_of(job.parameters, "num_devices", 2)
    check_strategy(text_of(job.parameters, "strategy", "ddp"), num_devices, setup_of(job.parameters).phase)
    _check_devices(device_index, num_devices)
    num_threads = max(1, (protocol.num_threads or 1) // num_devices)
    found: RunResult = run_in_group(
        _work, (job, protocol), num_processes=num_devices, device_index=device_index, num_threads=num_threads
    )
    return found.with_results(world_size=num_devices, num_threads_per_process=num_threads)


def _check_devices(device_index: str, num_devices: int) -> None:
    if gpu_index(device_index) is None:
        return
    import torch

    if torch.cuda.device_count() < num_devices:
        raise MeasurementError(
            f"expected {num_devices} GPUs, PyTorch sees {torch.cuda.device_count()}; "
            "ask for fewer, or measure on --device cpu"
        )


def _work(rank: int, num_processes: int, device: str, argument: tuple[MeasurementJob, Protocol]) -> RunResult:
    """One process: builds the model, agrees with the others on the number of steps, and times them."""
    import torch

    job, protocol = argument
    member = _Member(job, torch.device(device))
    trial_s = [member.time_s(with_sync=True) for _ in range(_TRIAL_STEPS)]
    num_steps = _agreed(_num_steps(min(trial_s), protocol), device)
    warm_up_s = [*trial_s, *(member.time_s(with_sync=True) for _ in range(min(_WARM_UP_STEPS, num_steps)))]
    repetitions_s, alone_s = [], []
    for _ in range(num_steps):
        repetitions_s.append(member.time_s(with_sync=True))
        # Side by side, so that a drift of the machine affects both equally.
        alone_s.append(member.time_s(with_sync=False))
    return RunResult(
        warm_up_s=tuple(warm_up_s),
        repetitions_s=tuple(repetitions_s),
        is_stationary=has_settled_under([*warm_up_s, *repetitions_s], protocol),
        results={
            "num_parameters": num_parameters(member.module),
            "gradient_bytes": member.gradient_bytes,
            "step_without_synchronisation_s": median(alone_s),
            "synchronisation_s": max(0.0, median(repetitions_s) - median(alone_s)),
        },
    )


def _num_steps(step_s: float, protocol: Protocol) -> int:
    """Repetitions that fit the protocol's time, at least three."""
    # Each repetition is made twice, with its all-reduces and without.
    return max(3, min(protocol.num_repetitions, int(protocol.max_seconds / (2 * step_s))))


def _agreed(number: int, device: str) -> int:
    """Rank 0's number of steps: all processes must make equally many, or they would wait for ever."""
    import torch
    import torch.distributed as dist

    told = torch.tensor([number], device=device)
    dist.broadcast(told, src=0)
    return int(told.item())


class _Member:
    """The model of one process: the step of one device, under DistributedDataParallel."""

    def __init__(self, job: MeasurementJob, device: torch.device) -> None:
        from torch.nn.parallel import DistributedDataParallel

        from forerun.tracing.step import prepared_batch

        setup = setup_of(job.parameters)
        built = built_for(job, setup, device)
        self.module = built.module
        self._parallel = DistributedDataParallel(built.module)
        batch = prepared_batch(built, setup, setup.batch_size_per_device)
        optimizer = make_real_optimizer(setup, built.module, LEARNING_RATE)
        network = compiled(self._parallel, setup)
        self._step = make_step(built, setup, batch, optimizer, device, network)
        self._synchronise = synchroniser(device)
        self.gradient_bytes = float(
            sum(p.numel() * p.element_size() for p in built.module.parameters() if p.requires_grad)
        )

    def time_s(self, *, with_sync: bool) -> float:
        """Time of one step; all processes begin together [s]."""
        import torch.distributed as dist

        self._synchronise()
        dist.barrier()
        began_s = time.perf_counter()
        with nullcontext() if with_sync else self._parallel.no_sync():
            self._step()
        self._synchronise()
        return time.perf_counter() - began_s


_GROUP_TIMEOUT = timedelta(minutes=5)

Work = Callable[[int, int, str, Any], Any]
"""Function of a module from (rank, number of processes, device, argument) to the result of rank 0."""


def run_in_group(
    work: Work, argument: Any, *, num_processes: int, device_index: str, num_threads: int
) -> Any:
    """Runs a function in n processes of a process group, and returns what rank 0 returned.

    On a processor the group uses gloo over the loopback; on GPUs each process takes the GPU of its rank and uses
    NCCL.

    Args:
        work: Function of a module; called in every process after the group has met.
        argument: Argument passed on to the function.
        num_processes: n, number of processes.
        device_index: Device: ``cpu``, or ``cuda`` for the first n GPUs.
        num_threads: Number of threads of the framework in each process.

    Raises:
        MeasurementError: A process failed or ended; the message has the first reason.
    """
    context = fork_server(["torch._dynamo", __name__])  # they share one import of the framework
    own = dict(os.environ)  # that of a server is the one in which it was started
    with temporary_folder() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        members = [
            Child(context, environment=own, name=f"forerun-rank-{rank}") for rank in range(num_processes)
        ]
        try:
            for rank, member in enumerate(members):
                member.begin(_member, work, argument, rank, num_processes, device_index, num_threads, meeting)
            return _first_answer(members)
        finally:
            for member in members:
                member.close()


def _first_answer(members: list[Child]) -> Any:
    """Answer of rank 0, after all processes have answered; the first failure ends the wait."""
    answers: dict[int, Any] = {}
    try:
        for rank, reply in replies(members):
            if reply.error:
                raise MeasurementError(f"process {rank} of {len(members)}: {reply.text}")
            answers[rank] = reply.result
    except EndedError as ended:
        raise MeasurementError(
            f"process {ended.number} of {len(members)} ended before it had a result; see its messages above"
        ) from None
    return answers[0]


def _member(
    work: Work,
    argument: Any,
    rank: int,
    num_processes: int,
    device_index: str,
    num_threads: int,
    meeting: str,
) -> Any:
    """One process: joins the group and works."""
    import torch
    import torch.distributed as dist

    # Processes that each take all cores would measure their quarrel for them.
    torch.set_num_threads(num_threads)
    is_gpu = gpu_index(device_index) is not None
    if is_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if is_gpu else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=num_processes,
        timeout=_GROUP_TIMEOUT,
    )
    answer = work(rank, num_processes, f"cuda:{rank}" if is_gpu else "cpu", argument)
    # A group that one leaves while others still send is an error in theirs.
    dist.barrier()
    dist.destroy_process_group()
    return answer


PROBE_SIZES = (1024, 64 * 1024, 1024**2, 8 * 1024**2, 64 * 1024**2)
"""Sizes of the five messages, from one bound by latency to one bound by bandwidth [bytes]."""


@runner(JobKind.LINK)
def run_link_probe(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times the five all-reduces; the record holds the repetitions of the largest.

    Parameter of the job: ``num_devices``. Results: ``latency_s`` (alpha, of one hop) and ``bandwidth_bytes_per_s``
    (beta, of one direction) of a ring, fitted on relative error to the medians ``size_N_bytes`` / ``time_N_s``;
    ``sharing_slowdown``, on a processor the factor on a step's time while the other processes make a step too, 1 on
    GPUs.
    """
    num_devices = whole_of(job.parameters, "num_devices", 2)
    if num_devices < 2:
        raise MeasurementError(
            f"a link has two ends or more: expected num_devices of at least 2, got {num_devices}"
        )
    found: _Probe = run_in_group(
        _probe,
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


def _probe(rank: int, num_processes: int, device: str, num_repetitions: int) -> _Probe:
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
    with writes(path, MeasurementError):
        write_whole(path, text.encode())
