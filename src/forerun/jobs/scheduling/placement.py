"""Nodes of each job: the fewest, and jobs that come together on fewer when that pays."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from forerun.jobs.scheduling.job import Allocation, ScheduledJob, SharedCluster
from forerun.jobs.scheduling.policy import JobView


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Share of a job on one node.

    Attributes:
        node: Number of the node in the cluster.
        num_workers: Devices there.
    """

    node: int
    num_workers: int


Placement = tuple[NodeShare, ...]
"""Devices of a job on each node."""


def pack(
    cluster: SharedCluster,
    jobs: Mapping[str, ScheduledJob],
    given: Mapping[str, Allocation],
    kept: Mapping[str, Placement],
) -> dict[str, Placement]:
    """Places each job on the fewest nodes: they are filled from the fullest that has room, large jobs first.

    Args:
        cluster: The cluster.
        jobs: Jobs by name.
        given: What each is given.
        kept: Placements of jobs that stay where they are.

    Returns:
        A placement for each job that has room.
    """
    state = _Nodes(cluster)
    placed = {name: state.keep(kept[name]) for name in given if name in kept}
    new = [name for name in given if name not in placed]
    # Small jobs still fit into the gaps that large ones leave, not the other way round.
    for name in sorted(new, key=lambda n: -given[n].num_workers):
        found = state.fewest_nodes(jobs[name], given[name])
        if found:
            placed[name] = found
    return placed


class _Nodes:
    """Free devices of every node."""

    def __init__(self, cluster: SharedCluster) -> None:
        self.cluster = cluster
        self.devices = [size for group in cluster.groups for size in group.node_sizes]
        self._kinds = [group.device for group in cluster.groups for _ in group.node_sizes]
        # Nodes by free devices, for each kind: what is out of date is dropped when it is met.
        self._by_devices: dict[str, list[list[int]]] = {
            group.device: [[] for _ in range(group.devices_per_node + 1)] for group in cluster.groups
        }
        for node, (kind, size) in enumerate(zip(self._kinds, self.devices, strict=True)):
            self._by_devices[kind][size].append(node)

    def keep(self, placement: Placement) -> Placement:
        """Takes the room of a job that stays where it is."""
        for share in placement:
            self._take(share)
        return placement

    def give_back(self, placement: Placement) -> None:
        """Frees the room of a job again."""
        for share in placement:
            self._take(share, sign=-1)

    def fewest_nodes(self, job: ScheduledJob, given: Allocation) -> Placement:
        """Devices on as few nodes as possible, leaving the least odd room behind; empty if there is no room."""
        left = given.num_workers
        found: list[NodeShare] = []
        while left:
            node = self._tightest(given.device, left)
            whole = 0 if node is None else min(left, self.devices[node]) // job.part * job.part
            if node is None or not whole:
                self.give_back(tuple(found))
                return ()
            share = NodeShare(node, whole)
            self._take(share)
            found.append(share)
            left -= share.num_workers
        return tuple(found)

    def _tightest(self, kind: str, wanted: int) -> int | None:
        """The node with the fewest free devices that are enough; else the one with most."""
        heaps = self._by_devices[kind]
        enough = range(min(wanted, len(heaps) - 1), len(heaps))
        # Where no node holds all, the one with most free devices is filled, and the rest goes elsewhere.
        for count in (*enough, *range(enough.start - 1, 0, -1)):
            heap = heaps[count]
            # A node is in the heap of every number it ever had free; it counts only in that of the present one.
            while heap and self.devices[heap[0]] != count:
                heapq.heappop(heap)
            if heap:
                return int(heap[0])
        return None

    def _take(self, share: NodeShare, sign: int = 1) -> None:
        node = share.node
        self.devices[node] -= sign * share.num_workers
        heapq.heappush(self._by_devices[self._kinds[node]][self.devices[node]], node)


def placed_remaining_s(view: JobView, given: Allocation, num_nodes: int, cluster: SharedCluster) -> float:
    """Time to the end on so many nodes [s]; a policy reckons with the fewest that hold the job."""
    training = view.job.training
    left_s = view.remaining_s(given)
    speed, n = training.speeds[given.device], given.num_workers
    batch = view.curves[given.device].batch_size(n) or training.batch_size
    here = speed(n, num_nodes, batch)
    packed = speed(n, _fewest(n, given.device, cluster), batch)
    return left_s * packed / here if here > 0 else left_s


def consolidate(
    views: Sequence[JobView],
    cluster: SharedCluster,
    given: dict[str, Allocation],
    placed: dict[str, Placement],
) -> None:
    """Moves jobs that lie on more nodes than they need, in place, where they are then done sooner.

    Each is offered fewer nodes of its kind and, if it starts now, as many devices of another kind. Where none are free,
    jobs of one node make room and get what it leaves. A running job pays its restart twice, as for any change of its
    own; one that makes room pays once.

    Args:
        views: Jobs as a policy sees them; those that are held stay.
        cluster: What there is.
        given: What each has, changed in place.
        placed: Where each is, changed in place.
    """

    def is_spread(view: JobView) -> bool:
        now = given.get(view.job.name)
        if now is None or view.is_held or view.job.part > 1:
            return False
        return len(placed.get(view.job.name, ())) > _fewest(now.num_workers, now.device, cluster)

    spread = [view for view in views if is_spread(view)]
    if not spread:
        return  # few decisions have such a job, and the room of a large cluster is dear to count
    state = _Nodes(cluster)
    for placement in placed.values():
        state.keep(placement)
    for view in spread:
        name = view.job.name
        now, where = given[name], placed[name]
        state.give_back(where)
        is_started = view.current is not None and view.current == now
        best_s = placed_remaining_s(view, now, len(where), cluster)
        price_s = 2 * view.job.restart_s if is_started else 0.0
        best = {name: where}
        for kind in view.curves:
            option = Allocation(kind, now.num_workers)
            if (view.current is not None and kind != now.device) or view.rate(option) <= 0:
                continue
            found = state.fewest_nodes(view.job, option)
            state.give_back(found)
            ways = [({name: found}, 0.0)] if found else []
            if len(found) != _fewest(option.num_workers, kind, cluster):
                ways += _cleared(view, option, views, state, given, placed)
            for moved, lost_s in ways:
                left_s = placed_remaining_s(view, option, len(moved[name]), cluster)
                left_s += price_s + lost_s / view.job.weight
                if left_s < best_s:
                    best_s, best, given[name] = left_s, moved, option
        for other in best.keys() - {name}:
            state.give_back(placed[other])
        placed |= best
        for other in best:
            state.keep(placed[other])


def _cleared(
    view: JobView,
    option: Allocation,
    views: Sequence[JobView],
    state: _Nodes,
    given: Mapping[str, Allocation],
    placed: Mapping[str, Placement],
) -> list[tuple[dict[str, Placement], float]]:
    """The fewest nodes for a job with new ones for those that make room, and the weighted restarts of these [s].

    The nodes that cost least to clear are taken; none where one of those that make room finds no single node.
    """
    group, first = state.cluster.group(option.device), state.cluster.first_node(option.device)
    on: dict[int, list[JobView]] = {node: [] for node in range(first, first + group.num_nodes)}
    for one in views:
        where = placed.get(one.job.name, ())
        is_movable = one is not view and not one.is_held
        if is_movable and len(where) == 1 and where[0].node in on:
            on[where[0].node].append(one)
    wanted = min(option.num_workers, group.devices_per_node)

    def lost_s(one: JobView) -> float:
        return one.job.restart_s * one.job.weight if one.current == given[one.job.name] else 0.0

    ways: list[tuple[float, int, list[JobView]]] = []
    for node, there in on.items():
        free, leaving = state.devices[node], list[JobView]()
        for one in sorted(there, key=lambda other: (lost_s(other), other.order)):
            if free < wanted:
                leaving.append(one)
                free += given[one.job.name].num_workers
        if free >= wanted:
            ways.append((sum(map(lost_s, leaving)), node, leaving))
    chosen = sorted(ways, key=lambda way: way[:2])[
        : _fewest(option.num_workers, option.device, state.cluster)
    ]
    if len(chosen) * wanted < option.num_workers:
        return []
    left = [option.num_workers - i * wanted for i in range(len(chosen))]
    place = tuple(NodeShare(node, min(n, wanted)) for n, (_, node, _) in zip(left, chosen, strict=True))
    movers = [one for _, _, leaving in chosen for one in leaving]
    for one in movers:
        state.give_back(placed[one.job.name])
    taken = [(view.job, state.keep(place))]
    largest_first = sorted(movers, key=lambda other: -given[other.job.name].num_workers)
    taken += [(one.job, state.fewest_nodes(one.job, given[one.job.name])) for one in largest_first]
    # Only a trial so far: whether it pays is asked later, so that all is put back.
    for _, new in taken:
        state.give_back(new)
    for one in movers:
        state.keep(placed[one.job.name])
    fits = all(len(new) == 1 for _, new in taken[1:])
    return [({job.name: new for job, new in taken}, sum(way[0] for way in chosen))] if fits else []


def _fewest(num_devices: int, kind: str, cluster: SharedCluster) -> int:
    return -(-num_devices // cluster.group(kind).devices_per_node)
