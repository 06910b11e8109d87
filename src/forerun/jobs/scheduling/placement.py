"""Nodes of each job: Optimus' theorem (fewest servers, even spread), the fewest nodes for all-reduce, first fit."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.jobs.scheduling.job import (
    Allocation,
    DataParallelTraining,
    ScheduledJob,
    ServerTraining,
    SharedCluster,
    training_demand,
)
from forerun.jobs.scheduling.policy import JobView


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Share of a job on one node.

    Attributes:
        node: Number of the node in the cluster.
        num_workers, num_servers: Workers (devices) and servers there.
    """

    node: int
    num_workers: int
    num_servers: int = 0


Placement = tuple[NodeShare, ...]
"""Devices of a job on each node."""

Placer = Callable[
    [SharedCluster, Mapping[str, ScheduledJob], Mapping[str, Allocation], Mapping[str, Placement]],
    dict[str, Placement],
]
"""Cluster, jobs and allocations by name, and placements to keep; returns a placement for each job that has room."""


def pack(
    cluster: SharedCluster,
    jobs: Mapping[str, ScheduledJob],
    given: Mapping[str, Allocation],
    kept: Mapping[str, Placement],
) -> dict[str, Placement]:
    """Places each job on the fewest nodes.

    Data-parallel jobs fill nodes from the fullest that has room, large jobs first; jobs with servers are spread evenly
    over the fewest, emptiest nodes, small jobs first.

    With synchronous training and equal nodes, the time to exchange parameters is shortest on the fewest nodes that
    hold the job, with as many servers and as many workers on each: every task then has the most partners on its own
    node, where nothing crosses the network. A job with servers for whose even spread there is no room is spread as
    it fits, and may end smaller.

    Source: Peng et al. 2018, "Optimus", EuroSys, theorem 1 and section 4.2.
    """
    state = _Nodes(cluster)
    placed = {name: state.keep(jobs[name], kept[name]) for name in given if name in kept}
    new = [name for name in given if name not in placed]
    plain = [name for name in new if not isinstance(jobs[name].training, ServerTraining)]
    # Small jobs still fit into the gaps that large ones leave, not the other way round.
    for name in sorted(plain, key=lambda n: -given[n].num_workers):
        found = state.fewest_nodes(jobs[name], given[name])
        if found:
            placed[name] = found
    with_servers = [name for name in new if isinstance(jobs[name].training, ServerTraining)]
    for name in sorted(with_servers, key=lambda n: given[n].num_workers + given[n].num_servers):
        found = state.even_spread(jobs[name], given[name])
        if found:
            placed[name] = found
    return placed


def first_fit(
    cluster: SharedCluster,
    jobs: Mapping[str, ScheduledJob],
    given: Mapping[str, Allocation],
    kept: Mapping[str, Placement],
) -> dict[str, Placement]:
    """Places each task on the first node with room, jobs in the order given, to compare the theorem with."""
    state = _Nodes(cluster)
    placed = {name: state.keep(jobs[name], kept[name]) for name in given if name in kept}
    for name in given:
        if name not in placed:
            found = state.first_room(jobs[name], given[name])
            if found:
                placed[name] = found
    return placed


class _Nodes:
    """Free devices, cores and memory of every node."""

    def __init__(self, cluster: SharedCluster) -> None:
        self.cluster = cluster
        groups = [group for group in cluster.groups for _ in range(group.num_nodes)]
        self.devices = [size for group in cluster.groups for size in group.node_sizes]
        self.cores = [group.cpu_cores_per_node for group in groups]
        self.memory = [group.memory_bytes_per_node for group in groups]
        # Nodes by free devices, for each kind: what is out of date is dropped when it is met.
        self._by_devices: dict[str, list[list[int]]] = {}
        self._by_cores: dict[str, list[tuple[float, int]]] = {}
        for group in cluster.groups:
            first = cluster.first_node(group.device)
            nodes = range(first, first + group.num_nodes)
            heaps: list[list[int]] = [[] for _ in range(group.devices_per_node + 1)]
            for node in nodes:
                heaps[self.devices[node]].append(node)
            self._by_devices[group.device] = heaps
            self._by_cores[group.device] = [(-group.cpu_cores_per_node, node) for node in nodes]

    def keep(self, job: ScheduledJob, placement: Placement) -> Placement:
        """Takes the room of a job that stays where it is."""
        for share in placement:
            self._take(job, share)
        return placement

    def give_back(self, job: ScheduledJob, placement: Placement) -> None:
        """Frees the room of a job again."""
        for share in placement:
            self._take(job, share, sign=-1)

    def fewest_nodes(self, job: ScheduledJob, given: Allocation) -> Placement:
        """Devices on as few nodes as possible, leaving the least odd room behind; empty if there is no room."""
        left = given.num_workers
        found: list[NodeShare] = []
        while left:
            node = self._tightest(given.device, left)
            whole = 0 if node is None else min(left, self.devices[node]) // job.part * job.part
            if node is None or not whole:
                self.give_back(job, tuple(found))
                return ()
            share = NodeShare(node, whole)
            self._take(job, share)
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

    def even_spread(self, job: ScheduledJob, given: Allocation) -> Placement:
        """The smallest k so that the k nodes with most free cores hold an even split; else whatever fits."""
        heap = self._by_cores[given.device]
        candidates: list[int] = []
        found: Placement = ()
        while not found and (node := self._emptiest(heap, candidates)) is not None:
            candidates.append(node)
            found = self._split(job, given, candidates)
        self.keep(job, found)
        # They were taken off the heap to be looked at, and may serve the next job.
        for node in candidates:
            heapq.heappush(heap, (-self.cores[node], node))
        return found or self._alternating(job, given, candidates)

    def _emptiest(self, heap: list[tuple[float, int]], taken: list[int]) -> int | None:
        while heap:
            cores, node = heapq.heappop(heap)
            # A node is in the heap with every number it ever had free; only the present one counts.
            if -cores == self.cores[node] and node not in taken:
                return node
        return None

    def _split(self, job: ScheduledJob, given: Allocation, nodes: list[int]) -> Placement:
        """An even split over these nodes, empty if one of them has no room for its part."""
        k = len(nodes)
        if k > max(given.num_workers, given.num_servers):
            return ()
        shares = []
        for i, node in enumerate(nodes):
            workers = given.num_workers // k + (i < given.num_workers % k)
            # Servers left over go where workers are fewer.
            servers = given.num_servers // k + (k - 1 - i < given.num_servers % k)
            share = NodeShare(node, workers, servers)
            if not self._has_room(job, share):
                return ()
            shares.append(share)
        return tuple(shares)

    def _alternating(self, job: ScheduledJob, given: Allocation, nodes: list[int]) -> Placement:
        """Servers and workers in turn wherever there is room; empty unless one of each is placed."""
        counts: dict[int, list[int]] = {}
        left = [given.num_workers, given.num_servers]
        kind = 1
        while any(left):
            # Servers near their workers: a node full of servers would have all traffic on its link.
            kind = 1 - kind if left[1 - kind] else kind
            if not left[kind]:
                break
            one = (1, 0) if kind == 0 else (0, 1)
            node = next((n for n in nodes if self._has_room(job, NodeShare(n, *one))), None)
            if node is None:
                break
            self._take(job, NodeShare(node, *one))
            counts.setdefault(node, [0, 0])[kind] += 1
            left[kind] -= 1
        found = _placement(counts)
        if sum(s.num_workers for s in found) and sum(s.num_servers for s in found):
            return found
        self.give_back(job, found)
        return ()

    def first_room(self, job: ScheduledJob, given: Allocation) -> Placement:
        """Each task on the first node with room; empty if one has none."""
        group = self.cluster.group(given.device)
        first = self.cluster.first_node(given.device)
        counts: dict[int, list[int]] = {}
        for one, number in (((1, 0), given.num_workers), ((0, 1), given.num_servers)):
            node, end = first, first + group.num_nodes
            for _ in range(number):
                while node < end and not self._has_room(job, NodeShare(node, *one)):
                    node += 1
                if node == end:
                    self.give_back(job, _placement(counts))
                    return ()
                self._take(job, NodeShare(node, *one))
                counts.setdefault(node, [0, 0])[one[1]] += 1
        return _placement(counts)

    def _has_room(self, job: ScheduledJob, share: NodeShare) -> bool:
        devices, cores, memory = training_demand(job.training, share.num_workers, share.num_servers)
        node = share.node
        return devices <= self.devices[node] and cores <= self.cores[node] and memory <= self.memory[node]

    def _take(self, job: ScheduledJob, share: NodeShare, sign: int = 1) -> None:
        devices, cores, memory = training_demand(job.training, share.num_workers, share.num_servers)
        node = share.node
        self.devices[node] -= sign * int(devices)
        self.cores[node] -= sign * cores
        self.memory[node] -= sign * memory
        kind = self._kind(node)
        heapq.heappush(self._by_devices[kind][self.devices[node]], node)
        if cores:
            heapq.heappush(self._by_cores[kind], (-self.cores[node], node))

    def _kind(self, node: int) -> str:
        groups = self.cluster.groups
        if len(groups) == 1:
            return groups[0].device
        for group in groups:
            if node < group.num_nodes:
                return group.device
            node -= group.num_nodes
        raise AssertionError("a node beyond the cluster")


def _placement(counts: Mapping[int, Sequence[int]]) -> Placement:
    """The placement with these numbers of workers and servers by node."""
    return tuple(NodeShare(node, w, p) for node, (w, p) in sorted(counts.items()))


def placed_remaining_s(view: JobView, given: Allocation, num_nodes: int, cluster: SharedCluster) -> float:
    """Time to the end on so many nodes [s]; a policy reckons with the fewest that hold the job."""
    training = view.job.training
    left_s = view.remaining_s(given)
    if not isinstance(training, DataParallelTraining):
        return left_s
    speed, n = training.speeds[given.device], given.num_workers
    batch = view.curves[given.device].batch_size(n) or training.batch_size
    here = speed(n, num_nodes, batch)
    packed = speed(n, _fewest(n, given.device, cluster), batch)
    return left_s * packed / here if here > 0 else left_s


def consolidate(
    views: Sequence[JobView],
    cluster: SharedCluster,
    jobs: Mapping[str, ScheduledJob],
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
        jobs: Jobs by name.
        given: What each has, changed in place.
        placed: Where each is, changed in place.
    """

    def is_spread(view: JobView) -> bool:
        now = given.get(view.job.name)
        if now is None or view.is_held or view.job.part > 1:
            return False
        if not isinstance(view.job.training, DataParallelTraining):
            return False
        return len(placed.get(view.job.name, ())) > _fewest(now.num_workers, now.device, cluster)

    spread = [view for view in views if is_spread(view)]
    if not spread:
        return  # few decisions have such a job, and the room of a large cluster is dear to count
    state = _Nodes(cluster)
    for name, placement in placed.items():
        state.keep(jobs[name], placement)
    for view in spread:
        name = view.job.name
        now, where = given[name], placed[name]
        state.give_back(view.job, where)
        is_started = view.current is not None and view.current == now
        best_s = placed_remaining_s(view, now, len(where), cluster)
        price_s = 2 * view.job.restart_s if is_started else 0.0
        best = {name: where}
        for kind in view.curves:
            option = Allocation(kind, now.num_workers)
            if (view.current is not None and kind != now.device) or view.rate(option) <= 0:
                continue
            found = state.fewest_nodes(view.job, option)
            state.give_back(view.job, found)
            ways = [({name: found}, 0.0)] if found else []
            if len(found) != _fewest(option.num_workers, kind, cluster):
                ways += _cleared(view, option, views, state, given, placed)
            for moved, lost_s in ways:
                left_s = placed_remaining_s(view, option, len(moved[name]), cluster)
                left_s += price_s + lost_s / view.job.weight
                if left_s < best_s:
                    best_s, best, given[name] = left_s, moved, option
        for other in best.keys() - {name}:
            state.give_back(jobs[other], placed[other])
        placed |= best
        for other in best:
            state.keep(jobs[other], placed[other])


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
        is_movable = (
            one is not view and not one.is_held and isinstance(one.job.training, DataParallelTraining)
        )
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
        state.give_back(one.job, placed[one.job.name])
    taken = [(view.job, state.keep(view.job, place))]
    largest_first = sorted(movers, key=lambda other: -given[other.job.name].num_workers)
    taken += [(one.job, state.fewest_nodes(one.job, given[one.job.name])) for one in largest_first]
    # Only a trial so far: whether it pays is asked later, so that all is put back.
    for job, new in taken:
        state.give_back(job, new)
    for one in movers:
        state.keep(one.job, placed[one.job.name])
    fits = all(len(new) == 1 for _, new in taken[1:])
    return [({job.name: new for job, new in taken}, sum(way[0] for way in chosen))] if fits else []


def _fewest(num_devices: int, kind: str, cluster: SharedCluster) -> int:
    return -(-num_devices // cluster.group(kind).devices_per_node)
