"""Steps of a model on several devices under DistributedDataParallel: real processes, real all-reduces.

Parameters of the job beside those of ``step_runner``: ``num_devices``, ``strategy`` (``ddp``), ``bucket_cap_mb``,
``num_accumulation_steps``. The batch size is that of one device. On a processor, n gloo processes share its cores:
each has the threads of the session divided by n. Results beside the times of a step: ``synchronisation_s``, the
median step less the median of the same step without its all-reduces (``no_sync``) in the same processes;
``gradient_bytes``; ``world_size``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from forerun.base.errors import InvalidSetupError, MeasurementError
from forerun.evidence.measurement.jobs import MeasurementJob, Protocol, RunResult
from forerun.evidence.measurement.runners.process_group import run_in_group
from forerun.evidence.measurement.runners.step_runner import (
    autocast_region,
    compiled,
    make_real_optimizer,
    num_parameters,
)
from forerun.evidence.measurement.runners.table import runner
from forerun.evidence.measurement.runners.torch_device import set_numeric_flags, synchroniser
from forerun.evidence.measurement.summary import has_settled
from forerun.evidence.records.measured_run import (
    flag_of,
    input_options_of,
    number_of,
    setup_of,
    text_of,
    whole_of,
)
from forerun.evidence.records.measurement import JobKind
from forerun.question.devices.local import gpu_index
from forerun.question.setup import Phase

if TYPE_CHECKING:
    import torch

__all__ = ["STRATEGIES", "check_strategy", "run_data_parallel"]

STRATEGIES = ("ddp",)
"""Strategies that can be measured."""

_LEARNING_RATE = 1e-4
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Times that rank 0 measured [s]."""

    warm_up_s: tuple[float, ...]
    repetitions_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    gradient_bytes: float
    num_parameters: int


@runner(JobKind.DATA_PARALLEL)
def run_data_parallel(job: MeasurementJob, device_index: str, protocol: Protocol) -> RunResult:
    """Times steps of all devices together and of the same devices without synchronisation."""
    num_devices = whole_of(job.parameters, "num_devices", 2)
    check_strategy(text_of(job.parameters, "strategy", "ddp"), num_devices, setup_of(job.parameters).phase)
    _check_devices(device_index, num_devices)
    num_threads = max(1, (protocol.num_threads or 1) // num_devices)
    times: _Times = run_in_group(
        _work, (job, protocol), num_processes=num_devices, device_index=device_index, num_threads=num_threads
    )
    every = [*times.warm_up_s, *times.repetitions_s]
    window = max(3, min(protocol.window, len(every) // 2))
    return RunResult(
        warm_up_s=times.warm_up_s,
        repetitions_s=times.repetitions_s,
        is_stationary=has_settled(every, window=window, tolerance=protocol.tolerance),
        results={
            "num_parameters": times.num_parameters,
            "gradient_bytes": times.gradient_bytes,
            "world_size": num_devices,
            "num_threads_per_process": num_threads,
            "step_without_synchronisation_s": median(times.alone_s),
            "synchronisation_s": max(0.0, median(times.repetitions_s) - median(times.alone_s)),
        },
    )


def _check_devices(device_index: str, num_devices: int) -> None:
    if gpu_index(device_index) is None:
        return
    import torch

    if torch.cuda.device_count() < num_devices:
        raise MeasurementError(
            f"expected {num_devices} GPUs, PyTorch sees {torch.cuda.device_count()}; "
            "ask for fewer, or measure on --device cpu"
        )


def _work(rank: int, num_processes: int, device: str, argument: tuple[MeasurementJob, Protocol]) -> _Times:
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
    return _Times(
        warm_up_s=tuple(warm_up_s),
        repetitions_s=tuple(repetitions_s),
        alone_s=tuple(alone_s),
        gradient_bytes=member.gradient_bytes,
        num_parameters=num_parameters(member.module),
    )


def _num_steps(step_s: float, protocol: Protocol) -> int:
    """Repetitions that fit the protocol's time, at least three."""
    return max(3, min(protocol.num_repetitions, int(protocol.max_seconds / (2 * step_s))))


def _agreed(number: int, device: str) -> int:
    """Rank 0's number of steps: all processes must make equally many, or they would wait for ever."""
    import torch
    import torch.distributed as dist

    told = torch.tensor([number], device=device)
    dist.broadcast(told, src=0)
    return int(told.item())


class _Member:
    """The model of one process."""

    def __init__(self, job: MeasurementJob, device: torch.device) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        from forerun.tracing.models.sources import build_model
        from forerun.tracing.step import prepared_batch

        setup = setup_of(job.parameters)
        set_numeric_flags(setup.precision, cudnn_benchmark=flag_of(job.parameters, "cudnn_benchmark"))
        torch.manual_seed(whole_of(job.parameters, "seed", 0))
        built = build_model(
            job.subject, training=True, device=str(device), **input_options_of(job.parameters)
        )
        self.module = built.module
        self._built = built
        self._setup = setup
        self._num_accumulation = whole_of(job.parameters, "num_accumulation_steps", 1)
        self._batch = prepared_batch(built, setup, setup.batch_size_per_device)
        self._optimizer = make_real_optimizer(setup, built.module, _LEARNING_RATE)
        self._parallel = DistributedDataParallel(
            built.module, bucket_cap_mb=number_of(job.parameters, "bucket_cap_mb", 25.0)
        )
        self._network: Callable[..., Any] = compiled(self._parallel, setup)
        self._region = autocast_region(setup.precision, device)
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
        self._step(with_sync)
        self._synchronise()
        return time.perf_counter() - began_s

    def _step(self, with_sync: bool) -> None:
        self.module.zero_grad(set_to_none=self._setup.zero_grad_to_none)
        for index in range(self._num_accumulation):
            is_last = index == self._num_accumulation - 1
            with nullcontext() if with_sync and is_last else self._parallel.no_sync():
                self._pass()
        if self._optimizer is not None:
            self._optimizer.step()

    def _pass(self) -> None:
        batch = self._batch
        with self._region():
            outputs = self._network(*batch.get("args", ()), **batch.get("kwargs", {}))
            loss = self._built.loss(outputs, batch)
        loss.backward()
