"""Several processes of one job that communicate: started, joined into a group, and ended together."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from forerun.base.errors import MeasurementError
from forerun.base.isolation import Child, EndedError, replies
from forerun.base.kept import temporary_folder
from forerun.question.devices.local import gpu_index

__all__ = ["run_in_group"]

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
    context = multiprocessing.get_context("spawn")
    with temporary_folder() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        members = [Child(context, name=f"forerun-rank-{rank}") for rank in range(num_processes)]
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
    dist.barrier()
    dist.destroy_process_group()
    return answer
