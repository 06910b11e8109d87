"""Optimus' theorem by trying everything, and parameters on servers."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.schedule.optimus_study import (
    Tasks,
    assign_blocks,
    assign_by_threshold,
    balance,
    even_spread,
    first_fit,
    step_s,
    transfer_time_s,
)


def splits(total, parts):
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in splits(total - first, parts - 1):
            yield (first, *rest)


@pytest.mark.parametrize(("workers", "servers"), [(2, 2), (4, 2), (4, 4), (6, 4)])
def test_theorem_1_even_spread_over_the_fewest_servers_is_fastest(workers, servers):
    """All ways to put a job on three nodes with room for half of it each."""
    room = (workers + servers + 1) // 2

    def time_s(w, p):
        shares = [Tasks(a, b) for a, b in zip(w, p, strict=True) if a + b]
        return transfer_time_s(shares, 1e8, 1e8)

    best = min(
        time_s(w, p)
        for w, p in product(splits(workers, 3), splits(servers, 3))
        if all(a + b <= room for a, b in zip(w, p, strict=True))
    )
    even = time_s((workers // 2, workers // 2, 0), (servers // 2, servers // 2, 0))
    assert even == pytest.approx(best)


def test_optimus_form_with_its_published_coefficients():
    # Peng et al. 2018, table 2, synchronous training of ResNet-50 with eight workers and twelve servers.
    step = step_s(np.array((1.02, 2.78, 4.92, 0.00, 0.02)), Tasks(8, 12))
    assert step == pytest.approx(1.02 / 8 + 2.78 + 4.92 * 8 / 12 + 0.02 * 12)


def test_everything_on_one_node_transfers_nothing():
    assert transfer_time_s([Tasks(3, 2)], 1e8, 1e8) == 0.0


def test_tasks_are_spread_evenly_where_there_is_room():
    free = np.tile((2.0, 16.0, 48.0), (3, 1))
    assert even_spread(free, Tasks(4, 2)) == {0: Tasks(2, 1), 1: Tasks(2, 1)}
    free[0, 0] = 1
    # The other way round there would be no room for a worker.
    assert even_spread(free, Tasks(5, 3)) == first_fit(free, Tasks(5, 3)) == {0: (1, 3), 1: (2, 0), 2: (2, 0)}
    assert first_fit(free, Tasks(6, 1)) == {}


@given(sizes=st.lists(st.integers(1, 5_000_000), min_size=1, max_size=60), num_servers=st.integers(1, 12))
def test_no_parameter_is_lost(sizes, num_servers):
    for held in (assign_blocks(sizes, num_servers), assign_by_threshold(sizes, num_servers)):
        assert len(held) == num_servers
        assert sum(map(sum, held)) == sum(sizes)


def test_resnet50_on_ten_servers_as_published():
    """Optimus, section 5.3: the size gap falls from 3.6 M to 0.1 M and the request gap to 1, with fewer requests."""
    from studies.schedule.optimus_study import resnet50_blocks

    sizes = resnet50_blocks()
    assert (len(sizes), sum(sizes)) == (161, 25_557_032)
    ours, theirs = balance(assign_blocks(sizes, 10)), balance(assign_by_threshold(sizes, 10))
    assert round(ours.size_gap / 1e6, 1) == 0.1 < theirs.size_gap / 1e6
    assert ours.request_gap <= 1 < theirs.request_gap
    assert ours.num_requests < theirs.num_requests
