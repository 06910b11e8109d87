"""Time of single collectives as functions of message, devices, latency and bandwidth.

Symbols: n devices, message of m bytes on every device, latency a of one hop [s], usable bandwidth B of one link in one
direction [bytes/s]. Contention between collectives and the additions themselves are left out.

Groups of devices that a layout joins talk over the real links between them. A group of g devices at a distance of s
ranks has k = min(g, d/s) members in a node of d devices and g/k nodes. The other d/k groups of the node talk at the
same time, so that a group has k/d of the node's links to other nodes. One collective in which w bytes cross each link
takes

    t = a + (g - 1) hop + w / B (1 + sqrt(w0 / w))

with B the slower of the two links. The square root is the slow approach of a ring to its full rate: half of
it is reached at w0 bytes. Sources: measured collectives of ai-dynamo/aiconfigurator, fitted by ``python -m studies
fit-layouts``.

Replicas reduce gradients by the fastest algorithm and protocol, as NCCL's tuner chooses it: for each it adds a base
latency, the latencies of the hops and message / bandwidth, and takes the smallest sum. Latencies and factors: NCCL,
src/graph/tuning.cc, NVIDIA/nccl commit 01afd20a77b5 (BSD 3-clause). Left out: CollNet and NVLS, which need a switch
that reduces, and the tuner's static corrections of medium-sized messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import floor, log2, sqrt
from typing import TYPE_CHECKING

from forerun.question.devices.cluster import Cluster, Link, example_network, require_link
from forerun.question.devices.device import LinkKind
from forerun.question.sharing import Algorithm

if TYPE_CHECKING:
    from forerun.cost.communication.constants import LayoutConstants


def ring_all_reduce_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time of one ring all-reduce [s].

    With n devices, 2(n-1) rounds each send 1/n of the message:
    t = 2(n-1) * (a + m / (n * B)); 0 for one device. The latency is the floor of small messages.

    Args:
        message_bytes: Buffer reduced on every device [bytes].
        num_devices: Devices in the ring, n >= 1.
        latency_s: Latency of a hop [s].
        bandwidth_bytes_per_s: Bandwidth of the slowest link of the ring, one direction [bytes/s].

    Source: Patarasuk and Yuan 2009, J. Parallel Distrib. Comput. 69(2).

    >>> round(ring_all_reduce_time_s(100e6, 4, 0.0, 10e9), 6)
    0.015
    """
    rounds = 2 * (num_devices - 1)
    return rounds * (latency_s + message_bytes / (num_devices * bandwidth_bytes_per_s))


def hierarchical_all_reduce_time_s(
    message_bytes: float,
    *,
    num_nodes: int,
    num_devices_per_node: int,
    intra_latency_s: float,
    intra_bytes_per_s: float,
    inter_latency_s: float,
    inter_bytes_per_s: float,
) -> float:
    """Time of an all-reduce in three stages [s].

    Reduce-scatter inside each node, ring all-reduce of the m/g bytes of each device between the nodes (the g rings
    share the node's link), all-gather inside. With one node it is the ring inside it, with one device a node that
    between.

    Args:
        message_bytes: Buffer reduced on every device [bytes].
        num_nodes: Nodes.
        num_devices_per_node: Devices of a node, g.
        intra_latency_s: Hop inside a node [s].
        intra_bytes_per_s: Usable bandwidth between devices of a node [bytes/s].
        inter_latency_s: Hop between nodes [s].
        inter_bytes_per_s: Usable bandwidth of a node to the others, all its links together [bytes/s].
    """
    inside = ring_all_reduce_time_s(message_bytes, num_devices_per_node, intra_latency_s, intra_bytes_per_s)
    # The g rings of m/g bytes together put m bytes on the node's link.
    return inside + ring_all_reduce_time_s(message_bytes, num_nodes, inter_latency_s, inter_bytes_per_s)


class Collective(StrEnum):
    """Exchange between all devices of a group."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "alltoall"

    def crossing_bytes(self, message_bytes: float, num_devices: int) -> float:
        """Bytes that cross each link of a ring; the message is the whole buffer of a device [bytes]."""
        share = (num_devices - 1) / num_devices
        return (2 if self is Collective.ALL_REDUCE else 1) * share * message_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that exchange data.

    Attributes:
        num_devices: Devices of the group.
        num_nodes: Nodes that they are on.
        intra_bytes_per_s: Usable bandwidth between two devices of a node [bytes/s].
        inter_bytes_per_s: Share of a node's links to other nodes that is this group's [bytes/s].
        device_inter_bytes_per_s: Share of these links that is one device's [bytes/s].
        hop_s: Mean latency of a hop [s].
        constants: Fitted constants.
    """

    num_devices: int
    num_nodes: int = 1
    intra_bytes_per_s: float = float("inf")
    inter_bytes_per_s: float = float("inf")
    device_inter_bytes_per_s: float = float("inf")
    hop_s: float = 0.0
    constants: LayoutConstants

    def time_s(self, kind: Collective, message_bytes: float) -> float:
        """Time of one collective [s]; 0 for one device or an empty message.

        Args:
            kind: The exchange.
            message_bytes: Whole buffer of a device: before a reduction, after a gathering [bytes].
        """
        if self.num_devices == 1 or not message_bytes > 0:
            return 0.0
        constants = self.constants
        crossing = kind.crossing_bytes(message_bytes, self.num_devices)
        intra = self.intra_bytes_per_s * constants.intra_share_of(kind)
        rate = min(intra, self.inter_bytes_per_s * constants.inter_share) if self.num_nodes > 1 else intra
        if kind is Collective.ALL_TO_ALL and self.num_nodes > 1:
            # Of a device's data the part for other nodes leaves over its own share of the links.
            outside = crossing * (self.num_nodes - 1) / self.num_nodes
            rate = min(intra, crossing / outside * self.device_inter_bytes_per_s * constants.inter_share)
        smoothed = crossing + sqrt(constants.half_rate_bytes * crossing)
        return constants.start_s + (self.num_devices - 1) * self.hop_s + smoothed / rate

    def dispatch_s(self, message_bytes: float, num_copies: float) -> float:
        """Time in which tokens go once to each device and node that has some of their experts [s].

        Of n devices, n (1 - (1 - 1/n)^k) have one of k experts that are drawn evenly, and of nodes alike. Between nodes
        the exchange takes the whole rate of the links, as DeepEP's kernels do (43 to 58 of 50 GB/s in its own table),
        while the tokens go on inside the nodes.

        Args:
            message_bytes: Tokens of a device, once for each of their experts [bytes].
            num_copies: Experts of a token, k.
        """
        if self.num_devices == 1 or not message_bytes > 0:
            return 0.0

        def sent_bytes(parts: int) -> float:
            drawn = float(parts * (1 - (1 - 1 / parts) ** num_copies) / num_copies)
            return message_bytes * drawn * (parts - 1) / parts

        constants = self.constants
        inside = self.intra_bytes_per_s * constants.intra_share_of(Collective.ALL_TO_ALL)
        in_node = sent_bytes(self.num_devices)
        moved_s = (in_node + sqrt(constants.half_rate_bytes * in_node)) / inside
        if self.num_nodes > 1:
            moved_s = max(moved_s, sent_bytes(self.num_nodes) / self.device_inter_bytes_per_s)
        return constants.start_s + (self.num_devices - 1) * self.hop_s + moved_s

    def send_s(self, message_bytes: float) -> float:
        """Time in which a device sends a message to its neighbour in the group [s]."""
        if self.num_devices == 1 or not message_bytes > 0:
            return 0.0
        constants = self.constants
        rate = self.intra_bytes_per_s
        if self.num_nodes > 1:
            rate = min(rate, self.device_inter_bytes_per_s * constants.inter_share)
        smoothed = message_bytes + sqrt(constants.half_rate_bytes * message_bytes)
        return constants.start_s + self.hop_s + smoothed / rate


def group_of(cluster: Cluster, num_devices: int, distance: int, constants: LayoutConstants) -> Group:
    """A group of devices whose ranks are ``distance`` apart; ranks fill one node after the other.

    Args:
        cluster: The devices and links.
        num_devices: Devices of the group.
        distance: Distance of the ranks of neighbours.
        constants: Fitted constants.

    Raises:
        UnknownDeviceError: A link that is needed is not known.
    """
    if num_devices == 1:
        return Group(num_devices=1, constants=constants)
    per_node = cluster.num_devices_per_node
    inside = min(num_devices, max(1, per_node // distance))
    nodes = -(-num_devices // inside)
    intra_rate = inter_rate = device_rate = float("inf")
    hop_s = 0.0
    if inside > 1:
        intra = require_link(cluster.intra_link, f"the {cluster.device.name} of a node", "--intra")
        intra_rate = intra.usable_bytes_per_s
        hop_s = constants.hop_s
    if nodes > 1:
        inter = require_link(cluster.inter_link, "the nodes", "--inter", example_network(cluster.device))
        whole = inter.usable_bytes_per_s * cluster.num_inter_links
        inter_rate, device_rate = whole * inside / per_node, whole / per_node
        # A tree or a ring per rail: nodes are passed one after the other, devices of a node at the same time.
        hop_s = (hop_s * (inside - 1) + inter.latency_s * constants.network_hops * (nodes - 1)) / (
            num_devices - 1
        )
    return Group(
        num_devices=num_devices,
        num_nodes=nodes,
        intra_bytes_per_s=intra_rate,
        inter_bytes_per_s=inter_rate,
        device_inter_bytes_per_s=device_rate,
        hop_s=hop_s,
        constants=constants,
    )


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
        inter = require_link(inter, "the nodes", "--inter", example_network(cluster.device))
    # A link that nothing crosses is infinitely fast, so that it is never the slowest one.
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
