"""Placement: packing, and jobs on more nodes than they need."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_cases import job, view

from forerun.jobs.scheduling.job import Allocation, parse_cluster
from forerun.jobs.scheduling.placement import NodeShare, consolidate, pack, placed_remaining_s

CLUSTER = parse_cluster("2x4xt4")
SPREAD = (NodeShare(0, 2), NodeShare(1, 2))
FOUR = Allocation("t4", 4)


def test_data_parallel_jobs_fill_the_tightest_node_that_is_enough():
    cluster = parse_cluster("3x4xt4")
    jobs = {name: job(name) for name in "abc"}
    given_ = {"a": Allocation("t4", 4), "b": Allocation("t4", 3), "c": Allocation("t4", 1)}
    placed = pack(cluster, jobs, given_, {})
    assert len({share.node for name in "bc" for share in placed[name]}) == 1
    assert all(len(placed[name]) == 1 for name in "abc")


def test_who_stays_keeps_its_nodes():
    cluster = parse_cluster("2x4xt4")
    jobs = {name: job(name) for name in "ab"}
    kept = {"b": (NodeShare(0, 2),)}
    placed = pack(cluster, jobs, {"a": Allocation("t4", 4), "b": Allocation("t4", 2)}, kept)
    assert placed == {"b": (NodeShare(0, 2),), "a": (NodeShare(1, 4),)}


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8))
def test_no_node_is_overfull_and_who_is_placed_is_placed_whole(sizes):
    cluster = parse_cluster("3x4xt4+2x2xv100")
    jobs = {f"j{i}": job(f"j{i}") for i in range(len(sizes))}
    given_ = {name: Allocation("t4", size) for name, size in zip(jobs, sizes, strict=True)}
    placed = pack(cluster, jobs, given_, {})
    used = [0] * 5
    for name, placement in placed.items():
        assert sum(s.num_workers for s in placement) == given_[name].num_workers
        for share in placement:
            used[share.node] += share.num_workers
    assert used[3:] == [0, 0]
    assert max(used) <= 4
    if sum(sizes) <= 12:
        assert len(placed) == len(sizes)


def after(of, current, others=()):
    views = [view(of, CLUSTER, current=current)]
    given, placed = {"a": FOUR}, {"a": SPREAD, **dict(others)}
    consolidate(views, CLUSTER, given, placed)
    return placed["a"]


def test_more_nodes_take_longer_than_a_policy_reckons_with():
    of = view(job(num_workers=4, sync_s=0.3), CLUSTER)
    assert placed_remaining_s(of, FOUR, 1, CLUSTER) == of.remaining_s(FOUR)
    assert placed_remaining_s(of, FOUR, 2, CLUSTER) > 1.5 * of.remaining_s(FOUR)


def test_a_job_is_brought_together_where_that_pays_its_restart():
    of = job(num_workers=4, sync_s=0.3, is_elastic=False, restart_s=10.0)
    assert after(of, FOUR) == (NodeShare(0, 4),)
    dear = job(num_workers=4, sync_s=0.3, is_elastic=False, restart_s=1e5)
    assert after(dear, FOUR) == SPREAD
    # One that only starts pays nothing.
    assert after(dear, None) == (NodeShare(0, 4),)


def test_there_must_be_room():
    of = job(num_workers=4, sync_s=0.3, is_elastic=False)
    others = [("b", (NodeShare(0, 2),)), ("c", (NodeShare(1, 2),))]
    assert after(of, None, others) == SPREAD


@pytest.mark.parametrize(
    ("restart_s", "is_held", "comes_together"),
    [(10.0, False, True), (1e5, False, False), (10.0, True, False)],
)
def test_jobs_of_one_node_make_room_where_that_pays_their_restarts(restart_s, is_held, comes_together):
    sizes = {"a": 4, "b": 2, "c": 2}
    jobs = {
        name: job(name, num_workers=n, sync_s=0.3, is_elastic=False, restart_s=restart_s)
        for name, n in sizes.items()
    }
    given = {name: Allocation("t4", n) for name, n in sizes.items()}
    placed = {"a": SPREAD, "b": (NodeShare(0, 2),), "c": (NodeShare(1, 2),)}
    views = [
        view(of, CLUSTER, i, current=given[name], is_held=is_held and name != "a")
        for i, (name, of) in enumerate(jobs.items())
    ]
    consolidate(views, CLUSTER, given, placed)
    used = [0] * CLUSTER.num_nodes
    for name, placement in placed.items():
        assert sum(share.num_workers for share in placement) == sizes[name]
        for share in placement:
            used[share.node] += share.num_workers
    assert max(used) <= 4
    assert [len(placed[name]) for name in sizes] == ([1, 1, 1] if comes_together else [2, 1, 1])
