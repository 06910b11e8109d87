"""Time of single collectives as functions of message, devices, latency and bandwidth.

Symbols: n devices, message of m bytes on every device, latency a of one hop [s], usable bandwidth B of one link in one
direction [bytes/s]. Contention between collectives and the additions themselves are left out.
"""

from __future__ import annotations

from math import ceil, log2

from forerun.base.errors import InvalidSetupError

__all__ = [
    "all_gather_time_s",
    "broadcast_time_s",
    "hierarchical_all_reduce_time_s",
    "one_to_all_time_s",
    "reduce_scatter_time_s",
    "ring_all_reduce_time_s",
    "tree_all_reduce_time_s",
]


def _check(message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float) -> None:
    if num_devices < 1:
        raise InvalidSetupError(
            f"the number of devices must be at least 1, got {num_devices}; give a positive number"
        )
    if not message_bytes >= 0:
        raise InvalidSetupError(f"a message must have zero or more bytes, got {message_bytes}")
    if not (latency_s >= 0 and bandwidth_bytes_per_s > 0):
        raise InvalidSetupError(
            f"a link needs a latency of zero or more and a bandwidth above zero, got {latency_s} s and "
            f"{bandwidth_bytes_per_s} bytes/s"
        )


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
    _check(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s)
    rounds = 2 * (num_devices - 1)
    return rounds * (latency_s + message_bytes / (num_devices * bandwidth_bytes_per_s))


def tree_all_reduce_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time of one all-reduce by a double binary tree, reduce and broadcast pipelined [s].

    t = 2 * ceil(log2 n) * a + 2 * m / B; 0 for one device. The two trees use both directions of a link, so that every
    byte crosses it twice; arguments as in ``ring_all_reduce_time_s``.

    Source: Sanders, Speck and Traeff 2009, Parallel Computing 35(12).
    """
    _check(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s)
    if num_devices == 1:
        return 0.0
    return 2 * ceil(log2(num_devices)) * latency_s + 2 * message_bytes / bandwidth_bytes_per_s


def reduce_scatter_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time of one ring reduce-scatter of m bytes, after which each device holds m/n [s]: half a ring all-reduce.

    t = (n-1) * (a + m / (n * B)).
    """
    return ring_all_reduce_time_s(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s) / 2


def all_gather_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time of one ring all-gather, after which each device holds m bytes [s]: the other half of an all-reduce.

    t = (n-1) * (a + m / (n * B)).
    """
    return ring_all_reduce_time_s(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s) / 2


def broadcast_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time of one pipelined broadcast along a chain [s].

    t = (n-1) * a + m / B; 0 for one device. The pieces are small enough that filling the pipe costs latency only.
    """
    _check(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s)
    if num_devices == 1:
        return 0.0
    return (num_devices - 1) * latency_s + message_bytes / bandwidth_bytes_per_s


def one_to_all_time_s(
    message_bytes: float, num_devices: int, latency_s: float, bandwidth_bytes_per_s: float
) -> float:
    """Time in which one device sends m bytes to each other device over its one link, one after the other [s].

    t = (n-1) * (a + m / B). Sending from all to one takes as long.
    """
    _check(message_bytes, num_devices, latency_s, bandwidth_bytes_per_s)
    return (num_devices - 1) * (latency_s + message_bytes / bandwidth_bytes_per_s)


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
