"""The machines that jobs share, as groups of equal nodes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf

from forerun.base.errors import InvalidSetupError
from forerun.question.devices.catalogue import matching_devices
from forerun.question.devices.cluster import MOST_DEVICES, split_spec

__all__ = ["NodeGroup", "SharedCluster", "parse_cluster"]

MOST_DEVICES_PER_NODE = 1024
"""The largest nodes known have 72 devices."""

_GROUP = re.compile(r"\s*(\d+)\s*x\s*(\d+)\s*x\s*(\S.*?)\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes with devices of one kind.

    Attributes:
        device: Kind of the devices.
        num_nodes: Nodes of the group.
        devices_per_node: Devices in each of them.
        cpu_cores_per_node: Processor cores of a node; infinite where only devices are counted.
        memory_bytes_per_node: Main memory of a node [bytes]; infinite where only devices are counted.
        devices_by_node: Devices of each node where they differ, at most ``devices_per_node``; empty: all are equal.
    """

    device: str
    num_nodes: int
    devices_per_node: int
    cpu_cores_per_node: float = inf
    memory_bytes_per_node: float = inf
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
        if not (self.cpu_cores_per_node > 0 and self.memory_bytes_per_node > 0):
            raise InvalidSetupError(
                f"cores and memory of a node must be above zero, got {self.cpu_cores_per_node} and "
                f"{self.memory_bytes_per_node}"
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

    @property
    def capacity(self) -> tuple[float, ...]:
        """Devices of each kind, then processor cores, then memory [bytes]."""
        cores = sum(group.num_nodes * group.cpu_cores_per_node for group in self.groups)
        memory = sum(group.num_nodes * group.memory_bytes_per_node for group in self.groups)
        return (*(float(group.num_devices) for group in self.groups), cores, memory)

    def group(self, device: str) -> NodeGroup:
        """The group with this kind of device."""
        return self.groups[self.kinds.index(device)]

    def first_node(self, device: str) -> int:
        """Number of the first node with this kind of device."""
        return sum(group.num_nodes for group in self.groups[: self.kinds.index(device)])

    def __str__(self) -> str:
        return "+".join(f"{g.num_nodes}x{g.devices_per_node}x{g.device}" for g in self.groups)


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
    if not re.search(r"[a-z]", kind, re.IGNORECASE) or (kind == part and not matching_devices(part)):
        raise InvalidSetupError(
            "a cluster must be nodes x devices a node x kind, such as 16x4xt4 or 2x8xa100-sxm4-40gb+4x4xt4, "
            f"got '{text}'"
        )
    return NodeGroup(num_nodes=nodes, devices_per_node=devices, device=kind.lower())
