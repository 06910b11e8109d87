"""Speed of parameter servers: Optimus' printed functions, first principles, designs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.adapters.classics.server_models import (
    OPTIMUS_ASYNCHRONOUS,
    OPTIMUS_SYNCHRONOUS,
    ParameterServerSetup,
    asynchronous_terms,
    candidate_points,
    parameter_server_step_s,
    propose_points,
    server_columns,
    synchronous_terms,
)
from forerun.base.errors import InvalidSetupError

SETUP = ParameterServerSetup(
    compute_s=4.0,
    fixed_compute_s=0.05,
    model_bytes=1.0379e8,
    server_bytes_per_s=1e9,
    update_s=0.02,
    latency_s=1e-4,
)


def optimus_s(workers, servers, batch=40):
    terms = synchronous_terms(workers, servers, batch)
    return sum(t * x for t, x in zip(OPTIMUS_SYNCHRONOUS, terms, strict=True))


def test_the_printed_function_is_fastest_where_the_paper_found_it():
    # Peng et al. 2018, figure of 20 containers: about 8 workers and 12 servers for ResNet-50.
    best = min(range(1, 20), key=lambda w: optimus_s(w, 20 - w))
    assert abs(best - 8) <= 1


def test_asynchronous_speed_of_2_and_4_servers_differs_rises_and_flattens():
    def speed(workers, servers):
        terms = asynchronous_terms(workers, servers)
        return workers / sum(t * x for t, x in zip(OPTIMUS_ASYNCHRONOUS, terms, strict=True))

    for servers, limit in ((2, 2 / 3.92), (4, 4 / 3.92)):
        speeds = [speed(w, servers) for w in range(1, 33)]
        assert all(a < b for a, b in itertools.pairwise(speeds))
        assert speeds[-1] < limit
        assert speeds[-1] - speeds[-2] < 0.05 * (speeds[1] - speeds[0])
    assert speed(32, 4) > 1.5 * speed(32, 2)


@given(st.integers(1, 64), st.integers(1, 16), st.booleans())
def test_more_servers_move_the_model_faster_until_latency_counts(workers, servers, synchronous):
    free = ParameterServerSetup(compute_s=1.0, model_bytes=1e8, server_bytes_per_s=1e9)
    one = parameter_server_step_s(free, workers, servers, synchronous=synchronous)
    more = parameter_server_step_s(free, workers, servers + 1, synchronous=synchronous)
    assert more <= one * (1 + 1e-9)


@given(st.integers(1, 63), st.integers(1, 16))
def test_workers_and_servers_are_really_used(workers, servers):
    step_s = parameter_server_step_s(SETUP, workers, servers)
    assert step_s != parameter_server_step_s(SETUP, workers + 1, servers)
    assert step_s != parameter_server_step_s(SETUP, workers, servers + 1)


@given(st.integers(1, 64), st.integers(1, 16))
def test_asynchronous_throughput_never_beats_linear(workers, servers):
    alone = 1 / parameter_server_step_s(SETUP, 1, servers, synchronous=False)
    together = workers / parameter_server_step_s(SETUP, workers, servers, synchronous=False)
    assert together <= workers * alone * (1 + 1e-9)


@pytest.mark.parametrize(("workers", "servers"), [(0, 2), (-3, 2), (2, 0)])
def test_numbers_that_cannot_be_meant(workers, servers):
    with pytest.raises(AssertionError):
        parameter_server_step_s(SETUP, workers, servers)


@pytest.mark.parametrize("field", ["compute_s", "model_bytes", "update_s"])
def test_negative_times_are_refused(field):
    with pytest.raises(AssertionError):
        ParameterServerSetup(**{"compute_s": 1, "model_bytes": 1, "server_bytes_per_s": 1, field: -1})


def information(points):
    columns = server_columns(points, synchronous=True, batch=1.0)
    rows = columns / (columns @ np.maximum(OPTIMUS_SYNCHRONOUS, 1e-3))[:, None]
    return np.linalg.slogdet(rows.T @ rows)[1]


def test_designed_points_tell_more_than_random_ones():
    candidates = candidate_points(range(1, 17), range(1, 9))
    designed = information(propose_points(candidates, 8))
    rng = np.random.default_rng(0)
    drawn = [information([candidates[i] for i in rng.permutation(len(candidates))[:8]]) for _ in range(200)]
    assert designed > max(drawn)


def test_a_design_goes_on_from_what_was_measured():
    candidates = candidate_points(range(1, 9), range(1, 5))
    first = propose_points(candidates, 3)
    more = propose_points([p for p in candidates if p not in first], 3, measured=first)
    assert not set(more) & set(first)
    assert np.linalg.matrix_rank(server_columns((*first, *more), synchronous=True, batch=1.0)) == 5


@pytest.mark.parametrize(
    ("candidates", "number", "message"),
    [
        (candidate_points([1, 2], [1]), 3, "between 1 and 2 points of a design, got 3"),
        (candidate_points([1, 2], [1]), 0, "got 0"),
        (
            [p for n in range(1, 9) for p in candidate_points([n], [n])],
            6,
            "cannot tell the coefficients apart",
        ),
    ],
)
def test_designs_that_cannot_be_made(candidates, number, message):
    with pytest.raises(InvalidSetupError, match=message):
        propose_points(candidates, number)
