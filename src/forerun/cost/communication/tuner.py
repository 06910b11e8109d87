"""The fastest algorithm and protocol of an all-reduce, chosen like NCCL's tuner does.

For every algorithm and protocol the tuner adds a base latency, the latencies of the hops and message / bandwidth, and
takes the smallest sum. Latencies and factors: NCCL, src/graph/tuning.cc, NVIDIA/nccl commit 01afd20a77b5 (BSD
3-clause).
Left out: CollNet and NVLS, which need a switch that reduces, and the tuner's static corrections of medium-sized
    messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import floor, log2

from forerun.cost.communication.collectives import (
    hierarchical_all_reduce_time_s,
    ring_all_reduce_time_s,
)
from forerun.question.devices.cluster import Cluster, Link, require_link
from forerun.question.devices.device import LinkKind
from forerun.question.sharing import Algorithm


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice of the tuner: algorithm, protocol, and expected time [s]."""

    algorithm: Algorithm
    protocol: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """The devices and links of an all-reduce, which determine its time for a message.

    Attributes:
        num_nodes: Nodes.
        num_devices_per_node: Devices of each.
        intra: Kind of the link inside a node.
        intra_bytes_per_s: Usable bandwidth inside a node [bytes/s].
        intra_latency_s: Latency of a hop inside a node [s].
        inter_bytes_per_s: Usable bandwidth of a node to the others [bytes/s].
        inter_latency_s: Latency of a hop between nodes [s].
        algorithm: Forced algorithm, or the fastest.
    """

    num_nodes: int = 1
    num_devices_per_node: int
    intra: LinkKind = LinkKind.NVLINK
    intra_bytes_per_s: float = float("inf")
    intra_latency_s: float = 0.0
    inter_bytes_per_s: float = float("inf")
    inter_latency_s: float = 0.0
    algorithm: Algorithm = Algorithm.AUTO

    @property
    def num_devices(self) -> int:
        """Number of devices that take part."""
        return self.num_nodes * self.num_devices_per_node

    @property
    def slowest_bytes_per_s(self) -> float:
        """Bandwidth of the slowest link of a ring through all devices [bytes/s]."""
        rates = [self.intra_bytes_per_s] if self.num_devices_per_node > 1 else []
        rates += [self.inter_bytes_per_s] if self.num_nodes > 1 else []
        return min(rates, default=float("inf"))

    def time_s(self, message_bytes: float) -> float:
        """Time of one all-reduce of a message [s]; 0 for one device."""
        if self.num_devices == 1:
            return 0.0
        if self.algorithm is Algorithm.AUTO:
            return nccl_choice(self, message_bytes).time_s
        return min(
            choice.time_s for choice in _choices(self, message_bytes) if choice.algorithm is self.algorithm
        )


def all_reduce_of(cluster: Cluster, algorithm: Algorithm = Algorithm.AUTO) -> AllReduce:
    """The all-reduce over all devices of a cluster.

    Args:
        cluster: The devices and links.
        algorithm: Forced algorithm, or the fastest.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    intra: Link | None = cluster.intra_link
    inter: Link | None = cluster.inter_link
    if cluster.num_devices_per_node > 1:
        intra = require_link(intra, f"the {cluster.device.name} of a node", "--intra")
    if cluster.num_nodes > 1:
        inter = require_link(inter, "the nodes", "--inter")
    inter_rate = inter.usable_bytes_per_s * cluster.num_inter_links if inter else float("inf")
    return AllReduce(
        num_nodes=cluster.num_nodes,
        num_devices_per_node=cluster.num_devices_per_node,
        intra=intra.kind if intra else LinkKind.NVLINK,
        intra_bytes_per_s=intra.usable_bytes_per_s if intra else float("inf"),
        intra_latency_s=intra.latency_s if intra else 0.0,
        inter_bytes_per_s=inter_rate,
        inter_latency_s=inter.latency_s if inter else 0.0,
        algorithm=algorithm,
    )


_SINGLE = (Algorithm.RING, Algorithm.TREE, Algorithm.HIERARCHICAL)
"""In one machine gloo uses its ring only, whatever the question asks for."""
_US = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Protocol:
    """Base latency [s], factor on the hop latency of LL, and share of the bandwidth, for ring and tree."""

    name: str
    ring_base_s: float
    ring_hop: float
    ring_share: float
    tree_base_s: float
    tree_hop: float
    tree_share: float
    kinds: tuple[LinkKind, ...]


# Hop latencies of the catalogue are those of LL in a ring; the ratios of the other columns of the table to it for
# NVLink. LL sends a flag with every four bytes and LL128 with every 120; LL128 is taken over direct links only.
_PROTOCOLS = (
    _Protocol(
        name="LL", ring_base_s=3.6 * _US, ring_hop=1.0, ring_share=1 / 4,
        tree_base_s=4.4 * _US, tree_hop=1.1, tree_share=0.9 / 3.8, kinds=tuple(LinkKind),
    ),
    _Protocol(
        name="LL128", ring_base_s=10.0 * _US, ring_hop=4.0, ring_share=0.92,
        tree_base_s=4.4 * _US, tree_hop=2.6, tree_share=0.9 * 7 / 9, kinds=(LinkKind.NVLINK,),
    ),
    _Protocol(
        name="Simple", ring_base_s=8.4 * _US, ring_hop=7.2, ring_share=1.0,
        tree_base_s=0.0, tree_hop=60.0, tree_share=0.9, kinds=tuple(LinkKind),
    ),
)  # fmt: skip


@lru_cache(maxsize=4096)
def nccl_choice(about: AllReduce, message_bytes: float) -> Choice:
    """The fastest algorithm and protocol for a message, with its time; buckets are the same at every batch size."""
    if about.num_devices == 1:
        return Choice(algorithm=Algorithm.RING, protocol="none", time_s=0.0)
    return min(_choices(about, message_bytes), key=lambda choice: choice.time_s)


def _choices(about: AllReduce, message_bytes: float) -> list[Choice]:
    if about.intra is LinkKind.HOST and about.num_nodes == 1:
        # Processes of one machine speak gloo, whose ring is what a probe of their link measures.
        time_s = ring_all_reduce_time_s(
            message_bytes, about.num_devices, about.intra_latency_s, about.intra_bytes_per_s
        )
        return [Choice(algorithm=kind, protocol="gloo", time_s=time_s) for kind in _SINGLE]
    found = []
    for protocol in _PROTOCOLS:
        if about.intra not in protocol.kinds:
            continue
        times = {
            Algorithm.RING: _ring_s(about, message_bytes, protocol),
            Algorithm.TREE: _tree_s(about, message_bytes, protocol),
            Algorithm.HIERARCHICAL: _hierarchical_s(about, message_bytes, protocol),
        }
        found += [Choice(algorithm=kind, protocol=protocol.name, time_s=time) for kind, time in times.items()]
    return found


def _ring_s(about: AllReduce, message_bytes: float, protocol: _Protocol) -> float:
    num_inter = 2 * (about.num_nodes - 1)
    num_intra = 2 * (about.num_devices - 1) - num_inter
    hops_s = protocol.ring_hop * (num_intra * about.intra_latency_s + num_inter * about.inter_latency_s)
    rate = about.slowest_bytes_per_s * protocol.ring_share
    return protocol.ring_base_s + hops_s + ring_all_reduce_time_s(message_bytes, about.num_devices, 0.0, rate)


def _tree_s(about: AllReduce, message_bytes: float, protocol: _Protocol) -> float:
    depth = floor(log2(about.num_nodes)) if about.num_nodes > 1 else 0
    hops_s = (about.num_devices_per_node - 1) * about.intra_latency_s + depth * about.inter_latency_s
    rate = about.slowest_bytes_per_s * protocol.tree_share
    return protocol.tree_base_s + 2 * protocol.tree_hop * hops_s + 2 * message_bytes / rate


def _hierarchical_s(about: AllReduce, message_bytes: float, protocol: _Protocol) -> float:
    return protocol.ring_base_s + hierarchical_all_reduce_time_s(
        message_bytes,
        num_nodes=about.num_nodes,
        num_devices_per_node=about.num_devices_per_node,
        intra_latency_s=protocol.ring_hop * about.intra_latency_s,
        intra_bytes_per_s=about.intra_bytes_per_s * protocol.ring_share,
        inter_latency_s=protocol.ring_hop * about.inter_latency_s,
        inter_bytes_per_s=about.inter_bytes_per_s * protocol.ring_share,
    )
