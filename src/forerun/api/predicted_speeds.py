"""Speed of a job of a schedule from its model alone: steps on one device by ``predict``, on several by ``scale``."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log
from typing import Any

from forerun.api.predict import predict
from forerun.api.scale import scale
from forerun.api.sweep import sweep
from forerun.errors import InvalidSetupError
from forerun.scheduler.cluster import NodeGroup, SharedCluster
from forerun.scheduler.jobs_file import JobEntry
from forerun.scheduler.speed import SpeedModel
from forerun.scheduler.speed_fit import StepPoint, fit_data_parallel

__all__ = ["Links", "predicted_sizes", "predicted_speeds"]

_FROM_90_PERCENT = 1.645
_MOST_NODES = 16
"""Nodes up to which steps are predicted; the form of the speed goes on from there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links that the boards do not tell, as in ``scale``.

    Attributes:
        intra: Between devices of a node; None: what the form of the board says.
        inter: Between nodes.
    """

    intra: str | None = None
    inter: str | None = None


def predicted_speeds(
    entry: JobEntry, cluster: SharedCluster, links: Links
) -> tuple[dict[str, SpeedModel], float]:
    """Speed of a model on each kind of device, fitted to predicted steps, and the spread of its logarithm.

    Raises:
        UsageError: The model, a device or a link is not known.
        FailureError: The model cannot be predicted.
    """
    found: dict[str, SpeedModel] = {}
    spreads = []
    for group in cluster.groups:
        most = _most_samples(entry, group.device)
        if most < 1:
            continue
        batches = _batches(entry, most)
        shared, spread = _shared_steps(entry, group, links, batches)
        found[group.device] = fit_data_parallel([*_alone(entry, group.device, batches), *shared], most)
        spreads.append(spread)
    if not found:
        raise InvalidSetupError(
            f"job '{entry.name}': not even one sample of {entry.model} fits on {', '.join(cluster.kinds)}"
        )
    return found, max(spreads)


_OF_SEVERAL = ("strategy", "algorithm", "bucket_mb", "sync_batch_norm", "variation")


def _options(entry: JobEntry) -> dict[str, Any]:
    """Settings of the job's run on one device."""
    return {name: value for name, value in entry.run_options().items() if name not in _OF_SEVERAL}


def _most_samples(entry: JobEntry, device: str) -> float:
    """Most samples that fit on one device; infinite where that is not known."""
    assert entry.model is not None
    share = max(1, entry.batch_size // entry.num_devices)
    one = predict(entry.model, device=device, batch_size=share, **_options(entry))
    return float(one.max_batch_size.value) if one.max_batch_size is not None else inf


def _batches(entry: JobEntry, most: float) -> list[int]:
    """Batches of one device to ask about: the whole one or what fits, down to an eighth."""
    return sorted({max(1, int(min(entry.batch_size, most) / part)) for part in (1, 2, 4, 8)})


def _alone(entry: JobEntry, device: str, batches: list[int]) -> list[StepPoint]:
    assert entry.model is not None
    times = sweep(
        entry.model,
        devices=[device],
        batch_sizes=batches,
        precisions=[entry.precision],
        **{name: value for name, value in _options(entry).items() if name != "precision"},
    )
    return [
        StepPoint(num_devices=1, num_nodes=1, batch_size_per_device=float(batch), step_time_s=float(step_s))
        for batch, step_s in zip(batches, times.step_time_s[0, 0], strict=True)
    ]


def predicted_sizes(group: NodeGroup, max_devices: int) -> list[int]:
    """Numbers of devices to ask about: doubling within a node, a full node, doubling numbers of full nodes.

    >>> predicted_sizes(NodeGroup(device="t4", num_nodes=5, devices_per_node=6), 100)
    [2, 4, 6, 12, 24]
    """
    per_node = group.devices_per_node
    within = [1 << k for k in range(1, per_node.bit_length()) if 1 << k <= per_node]
    across = [1 << k for k in range(1, _MOST_NODES.bit_length()) if 1 << k <= group.num_nodes]
    sizes = {*within, per_node, *(per_node * nodes for nodes in across)} - {1}
    return sorted(size for size in sizes if size <= max_devices)


def _shared_steps(
    entry: JobEntry, group: NodeGroup, links: Links, batches: list[int]
) -> tuple[list[StepPoint], float]:
    """Steps on several devices at the smallest and the largest batch of a device, and their widest spread."""
    assert entry.model is not None
    numbers = [1, *predicted_sizes(group, entry.max_devices or group.num_devices)]
    points, spreads = [], []
    for batch in sorted({batches[0], batches[-1]}):
        curve = scale(
            entry.model,
            device=f"{group.num_nodes}x{group.devices_per_node}x{group.device}",
            num_devices=numbers,
            batch_size=batch,
            intra=links.intra if max(numbers) > 1 else None,
            inter=links.inter if group.num_nodes > 1 else None,
            **(entry.run_options() if max(numbers) > 1 else _options(entry)),
        )
        for point in curve.points:
            step = point.step_time_s
            spreads.append(log(max(step.high / step.value, 1.0)) / _FROM_90_PERCENT)
            if point.num_devices > 1:
                points.append(
                    StepPoint(
                        num_devices=point.num_devices,
                        num_nodes=point.num_nodes,
                        batch_size_per_device=float(batch),
                        step_time_s=step.value,
                    )
                )
    return points, max(spreads)
