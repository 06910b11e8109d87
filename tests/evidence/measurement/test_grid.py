"""Grids: system A's eighteen jobs, and any other."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.layer_design import grid_jobs, spread_order
from forerun.evidence.measurement.settings import Grid
from forerun.evidence.records.measurement import JobKind
from forerun.question.setup import Layout, Precision


def test_the_default_grid_is_system_a():
    jobs = grid_jobs(Grid())
    asked = {(j.parameters["depth"], j.parameters["base_filters"], j.parameters["batch_size"]) for j in jobs}
    assert len(jobs) == 18
    assert asked == {(d, f, b) for d in (2, 3, 4) for f in (32, 64) for b in (32, 64, 128)}
    assert {job.kind for job in jobs} == {JobKind.TRAINING}
    assert jobs[0].subject == "cnn:depth=2,base_filters=32"
    first = jobs[0].parameters
    assert (first["num_epochs"], first["dataset"], first["optimizer"]) == (3, "cifar10", "adam")
    assert first["dataset_size"] == 50_000


def test_every_axis_multiplies():
    grid = Grid(
        network="cifar-resnet",
        sizes={"depth": (8, 14)},
        batch_sizes=(4, 8),
        precisions=(Precision.FP32, Precision.AMP),
        layouts=tuple(Layout),
        compiles=(False, True),
    )
    jobs = grid_jobs(grid)
    assert len({job.to_json() for job in jobs}) == len(jobs) == 32
    assert {job.subject for job in jobs} == {"cifar-resnet:depth=8", "cifar-resnet:depth=14"}
    assert grid_jobs(Grid(network="mnist-cnn", sizes={}, batch_sizes=(4,)))[0].subject == "mnist-cnn"


@given(st.integers(1, 200))
def test_the_order_loses_nothing_and_alternates_small_and_large(num_items):
    order = spread_order(list(range(num_items)))
    assert sorted(order) == list(range(num_items))
    # Any beginning covers the range: of the first k, neighbours are at most two of k equal parts apart.
    for k in (2, 4, 8):
        if num_items >= 2 * k:
            begun = [0, *sorted(order[:k]), num_items]
            assert max(b - a for a, b in pairwise(begun)) <= 2 * num_items / k + 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_sizes": ()}, "at least one value of batch size"),
        ({"batch_sizes": (8, 8)}, "different values of batch size"),
        ({"sizes": {"depth": ()}}, "at least one value of depth"),
        ({"num_epochs": -1}, "epochs of at least 0"),
        ({"num_steps": 0}, "steps of at least 1"),
    ],
)
def test_empty_and_repeated_axes_are_refused(changed, message):
    with pytest.raises(InvalidSetupError, match=message):
        Grid(**changed)
