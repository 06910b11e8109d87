"""Training jobs as a scheduler knows them, and the cluster that they share: groups of equal nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from forerun.base.errors import InvalidSetupError
from forerun.jobs.scheduling.speed import Efficiency, SpeedModel
from forerun.question.devices.catalogue import matching_devices
from forerun.question.devices.cluster import MOST_DEVICES, split_spec

MOST_DEVICES_PER_NODE = 1024
"""The largest nodes known have 72 devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes with devices of one kind.

    Attributes:
        device: Kind of the devices.
        num_nodes: Nodes of the group.
        devices_per_node: Devices in each of them.
        devices_by_node: Devices of each node where they differ, at most ``devices_per_node``; empty: all are equal.
    """

    device: str
    num_nodes: int
    devices_per_node: int
    devices_by_node: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.devices_per_node < 1:
            raise InvalidSetupError(
                f"a cluster needs at least one node and one device a node, got {self.num_nodes} nodes with "
                f"{self.devices_per_node} devices of {self.device}; correct or remove this group"
            )
        if self.num_devices > MOST_DEVICES or self.devices_per_node > MOST_DEVICES_PER_NODE:
            raise InvalidSetupError(
                f"a cluster may have at most {MOST_DEVICES:,} devices of a kind, {MOST_DEVICES_PER_NODE:,} in a node; "
                f"got {self.num_nodes:,} nodes with {self.devices_per_node:,} devices of {self.device}"
            )

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return sum(self.devices_by_node) or self.num_nodes * self.devices_per_node

    @property
    def node_sizes(self) -> tuple[int, ...]:
        """Devices of each node."""
        return self.devices_by_node or (self.devices_per_node,) * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCluster:
    """Groups of nodes; nodes are numbered through all groups, in order.

    Attributes:
        groups: The groups, each with a device kind of its own.
    """

    groups: tuple[NodeGroup, ...]

    def __post_init__(self) -> None:
        kinds = [group.device for group in self.groups]
        if not kinds:
            raise InvalidSetupError("a cluster needs at least one group of nodes, got none")
        twice = [kind for kind in kinds if kinds.count(kind) > 1]
        if twice:
            raise InvalidSetupError(
                f"'{twice[0]}' occurs in two groups of the cluster; give each kind of device one group"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of devices, by group."""
        return tuple(group.device for group in self.groups)

    @property
    def num_devices(self) -> int:
        """Devices of all kinds."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """Nodes of all kinds."""
        return sum(group.num_nodes for group in self.groups)

    def group(self, device: str) -> NodeGroup:
        """The group with this kind of device."""
        return self.groups[self.kinds.index(device)]

    def first_node(self, device: str) -> int:
        """Number of the first node with this kind of device."""
        return sum(group.num_nodes for group in self.groups[: self.kinds.index(device)])

    def __str__(self) -> str:
        alike = [(g.node_sizes, size, g.device) for g in self.groups for size in dict.fromkeys(g.node_sizes)]
        return "+".join(f"{sizes.count(size)}x{size}x{device}" for sizes, size, device in alike)


def parse_cluster(text: str) -> SharedCluster:
    """A cluster as it is written on a command line: the grammar of ``--on`` for each kind, kinds joined by '+'.

    >>> parse_cluster("16x4xt4").num_devices
    64
    >>> parse_cluster("2x8xa100-sxm4-40gb+4xt4").kinds
    ('a100-sxm4-40gb', 't4')

    Raises:
        InvalidSetupError: The text is no cluster, or a group has no nodes or devices.
    """
    return SharedCluster(groups=tuple(_group(part.strip(), text) for part in re.split(r"[+,]", text)))


def _group(part: str, text: str) -> NodeGroup:
    nodes, devices, kind = split_spec(part)
    # Kinds of a trace need not be in the catalogue, but a word without numbers must be.
    if not re.search(r"[a-z][a-z0-9]", kind, re.IGNORECASE) or (kind == part and not matching_devices(part)):
        raise InvalidSetupError(
            "a cluster must be nodes x devices a node x kind, such as 16x4xt4 or 2x8xa100-sxm4-40gb+4x4xt4, "
            f"got '{text}'"
        )
    return NodeGroup(num_nodes=nodes, devices_per_node=devices, device=kind.lower())


WorkForecast = Callable[[float], float]
"""Samples that are forecast to be left of a job after so many."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataParallelTraining:
    """Training by all-reduce on devices of one kind at a time.

    Attributes:
        speeds: Speed model by kind of device; the job cannot run on a kind that is absent.
        batch_size: Global batch asked for.
        batch_range: Smallest and largest global batch that a policy may choose; None: only the one asked for.
        efficiency: What a sample of another batch is worth; None: the same.
    """

    speeds: Mapping[str, SpeedModel]
    batch_size: float
    batch_range: tuple[float, float] | None = None
    efficiency: Efficiency | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledJob:
    """One job.

    Attributes:
        name: Name that no other job has.
        training: Its speed on each kind of device, and its batch.
        work_samples: Samples to process, as many as batches of the size asked for need.
        forecast: Forecast of the work left, where ``work_samples`` is only a guess; None: the stated work counts.
        num_workers: Devices that its owner asks for.
        is_elastic: Whether another number of devices may be given than asked for.
        max_workers: Most devices it may get.
        arrival_s: Time of its arrival [s].
        deadline_s: Time by which it must be done [s]; infinite without a deadline.
        weight: Weight of its waiting time among the jobs.
        restart_s: Time from a change of its devices to its next step [s].
        is_preemptible: Whether its devices may be changed or taken once it runs. A job that may not be preempted
            starts with no fewer devices than its owner asks for.
        min_run_s: Time for which it keeps its devices after a start or change [s].
        part: Devices of it that must lie on one node together.
    """

    name: str
    training: DataParallelTraining
    work_samples: float
    forecast: WorkForecast | None = None
    num_workers: int = 1
    is_elastic: bool = True
    max_workers: int = 1 << 30
    arrival_s: float = 0.0
    deadline_s: float = inf
    weight: float = 1.0
    restart_s: float = 0.0
    is_preemptible: bool = True
    min_run_s: float = 0.0
    part: int = 1

    def __post_init__(self) -> None:
        # A file of jobs was checked row by row; what else makes jobs must keep the same bounds.
        assert 0 <= self.arrival_s < self.deadline_s, self.name
        assert 0 < self.work_samples < inf, self.name
        assert 1 <= self.num_workers <= self.max_workers, self.name
        assert 0 < self.weight < inf, self.name
        assert 0 <= self.restart_s < inf, self.name
        assert 0 <= self.min_run_s < inf, self.name


@dataclass(frozen=True, slots=True)
class Allocation:
    """Devices of a job.

    Attributes:
        device: Kind of the devices.
        num_workers: Number of them.
    """

    device: str
    num_workers: int


def check_jobs(jobs: tuple[ScheduledJob, ...], kinds: Mapping[str, int]) -> None:
    """Refuses a set of jobs that cannot be scheduled.

    Args:
        jobs: The jobs.
        kinds: Devices of the cluster by kind.

    Raises:
        InvalidSetupError: There are no jobs, two have one name, or one is larger than the cluster.
    """
    if not jobs:
        raise InvalidSetupError("expected at least one job, got none")
    seen: set[str] = set()
    for job in jobs:
        if job.name in seen:
            raise InvalidSetupError(f"two jobs are called '{job.name}'; give each a name of its own")
        seen.add(job.name)
        usable = {kind: number for kind, number in kinds.items() if kind in job.training.speeds}
        if not usable:
            raise InvalidSetupError(
                f"job '{job.name}': its speed is known on {', '.join(job.training.speeds)}, the cluster has "
                f"{', '.join(kinds)}; add a speed or change the cluster"
            )
        most = max(usable.values())
        if job.num_workers > most:
            raise InvalidSetupError(
                f"job '{job.name}' asks for {job.num_workers} devices of one kind, the cluster has {most}; ask for "
                "fewer or enlarge the cluster"
            )
