"""An allocation as commands: which devices of which node, and the torchrun line of each."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.jobs.scheduling.placement import Placement

__all__ = ["NodeDevices", "device_numbers", "torchrun_lines"]

FIRST_PORT = 29500
"""PyTorch's usual rendezvous port; each job of a plan gets the next."""


@dataclass(frozen=True, slots=True)
class NodeDevices:
    """Devices of one node that a job has.

    Attributes:
        node: Number of the node.
        devices: Numbers of the devices on it.
    """

    node: int
    devices: tuple[int, ...]


def device_numbers(placements: Mapping[str, Placement]) -> dict[str, tuple[NodeDevices, ...]]:
    """Numbers of devices for each job, counted up on each node in the order of the jobs."""
    used: dict[int, int] = {}
    found = {}
    for job, placement in placements.items():
        parts = []
        for share in placement:
            first = used.get(share.node, 0)
            used[share.node] = first + share.num_workers
            parts.append(NodeDevices(share.node, tuple(range(first, first + share.num_workers))))
        found[job] = tuple(parts)
    return found


def torchrun_lines(parts: Sequence[NodeDevices], script: str, port: int) -> list[str]:
    """One line for each node, to be started there; nodes are called node0, node1 ...

    >>> torchrun_lines([NodeDevices(0, (0, 1))], "train.py", 29500)
    ['CUDA_VISIBLE_DEVICES=0,1 torchrun --standalone --nproc-per-node=2 train.py']
    """
    words = " ".join(shlex.quote(word) for word in shlex.split(script))
    if len(parts) == 1:
        return [
            f"{_visible(parts[0])} torchrun --standalone --nproc-per-node={len(parts[0].devices)} {words}"
        ]
    meeting = f"node{parts[0].node}:{port}"
    return [
        f"{_visible(part)} torchrun --nnodes={len(parts)} --nproc-per-node={len(part.devices)} --node-rank={rank} "
        f"--rdzv-backend=c10d --rdzv-id={port} --rdzv-endpoint={meeting} {words}"
        for rank, part in enumerate(parts)
    ]


def _visible(part: NodeDevices) -> str:
    return f"CUDA_VISIBLE_DEVICES={','.join(map(str, part.devices))}"
