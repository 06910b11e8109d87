"""Designs of layers: even, within limits, reproducible."""

from itertools import islice

import numpy as np
import pytest
import torch
from scipy.stats import qmc

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement import layer_design
from forerun.evidence.measurement.layer_design import Axis, axes_of, design_layers, unit_points
from forerun.evidence.measurement.layer_figures import LAYER_KINDS, layer_figures
from forerun.evidence.measurement.layer_modules import build_layer
from forerun.evidence.measurement.settings import LayerDesign
from forerun.evidence.records.measurement import JobKind


def first_points(num_axes, num_points, seed):
    return np.asarray(list(islice(unit_points(num_axes, seed), num_points)))


@pytest.mark.parametrize("num_axes", [4, 9])
def test_points_fill_space_better_than_random_ones(num_axes):
    points = first_points(num_axes, 256, seed=1)
    rng = np.random.default_rng(0)
    random = [qmc.discrepancy(rng.random(points.shape)) for _ in range(10)]
    assert qmc.discrepancy(points) < 0.5 * min(random)


def test_every_bin_of_a_pair_of_sizes_is_visited():
    points = first_points(6, 256, seed=2)
    counts, *_ = np.histogram2d(points[:, 0], points[:, 3], bins=8, range=[[0, 1], [0, 1]])
    random = np.random.default_rng(0).random((256, 2))
    random_counts, *_ = np.histogram2d(random[:, 0], random[:, 1], bins=8, range=[[0, 1], [0, 1]])
    assert counts.min() >= 1
    assert counts.std() < random_counts.std()


def test_an_axis_reaches_both_ends_and_is_even_on_its_scale():
    axis = Axis(name="n", low=1, high=512)
    values = np.asarray([axis.at(u) for u in (np.arange(4000) + 0.5) / 4000])
    assert (values.min(), values.max()) == (1, 512)
    below = [np.mean(values <= edge) for edge in (4, 32, 256)]
    assert below == pytest.approx([0.27, 0.57, 0.9], abs=0.04)  # of log2: 2.2, 5.0 and 8.0 of 9
    kernel = Axis(name="kernel", high=7, is_log=False)
    assert {kernel.at((i + 0.5) / 7) for i in range(7)} == set(range(1, 8))
    assert Axis(name="b", values=(False, True)).at(0.6) is True


def test_jobs_stay_within_the_limits_and_differ():
    design = LayerDesign(num_layers=220, max_flops=1e8, max_bytes=1e7)
    jobs = [job for job in design_layers(design) if job.subject != "null"]
    assert len({job.to_json() for job in jobs}) == len(jobs) == 220
    for job in jobs:
        share = 3 if job.parameters["mode"] == "train_step" else 1
        assert share * job.parameters["flops"] <= 1e8
        assert job.parameters["input_bytes"] + job.parameters["output_bytes"] <= 1e7
        assert job.parameters["flops"] == layer_figures(job.subject, job.parameters).flops
        assert job.kind is JobKind.LAYER
    counts = {kind: sum(job.subject == kind for job in jobs) for kind in LAYER_KINDS}
    assert set(counts.values()) == {20, 0}  # 0: the null layer is beside them


def test_kinds_take_turns_behind_the_null_layer():
    jobs = design_layers(LayerDesign(kinds=("dense", "conv2d"), num_layers=6))
    assert [job.subject for job in jobs] == ["null", "null", *["dense", "conv2d"] * 3]
    assert {job.parameters["mode"] for job in jobs[:2]} == {"forward", "train_step"}


def test_only_what_is_updated_has_an_optimizer():
    for job in design_layers(LayerDesign(num_layers=110, max_flops=1e8, max_bytes=1e7)):
        if job.parameters["mode"] == "forward" or job.subject in ("max_pool", "avg_pool", "null"):
            assert job.parameters["optimizer"] == "none"


def test_a_seed_repeats_and_a_longer_design_begins_alike():
    short = LayerDesign(kinds=("conv2d",), num_layers=10, with_null=False)
    jobs = design_layers(short)
    assert jobs == design_layers(short)
    longer = design_layers(LayerDesign(kinds=("conv2d",), num_layers=30, with_null=False))
    assert longer[:10] == jobs
    assert jobs != design_layers(LayerDesign(kinds=("conv2d",), num_layers=10, with_null=False, seed=1))


def test_the_ranges_of_justus_hold_his_limits():
    design = LayerDesign(kinds=("conv2d", "dense"), num_layers=100, ranges="justus", with_null=False)
    for job in design_layers(design):
        asked = job.parameters
        assert 1 <= asked["batch_size"] <= 64
        if job.subject == "conv2d":
            assert asked["in_size"] * max(asked["in_features"], asked["out_features"]) < 10_000
            assert asked["kernel"] <= 7
            assert asked["stride"] <= 4
        else:
            assert max(asked["in_features"], asked["out_features"]) <= 4096
    widest = next(
        a
        for a in axes_of("dense", "wide", modes=("forward",), optimizers=("none",))
        if a.name == "in_features"
    )
    assert widest.high == 8192


def test_whatever_is_designed_can_be_built_and_has_the_shapes_it_is_said_to_have():
    for job in design_layers(LayerDesign(num_layers=77, max_flops=3e6, max_bytes=1e6, seed=5)):
        figures = layer_figures(job.subject, job.parameters)
        layer = build_layer(job.subject, job.parameters).eval()
        assert sum(p.numel() for p in layer.parameters()) == figures.num_parameters
        with torch.no_grad():
            assert tuple(layer(torch.ones(figures.input_shape)).shape) == figures.output_shape


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kinds": ("conv3d",)}, "unknown layer 'conv3d'; did you mean"),
        ({"ranges": "narrow"}, "justus, wide"),
        ({"num_layers": 0}, "at least one layer"),
    ],
)
def test_impossible_designs_are_refused(changed, message):
    with pytest.raises(InvalidSetupError, match=message):
        LayerDesign(**changed)


def test_limits_that_leave_too_few_layers_say_so(monkeypatch):
    monkeypatch.setattr(layer_design, "_LAST_EXPONENT", 10)  # all 131,072 points take seconds
    with pytest.raises(InvalidSetupError, match="allow more of both"):
        design_layers(LayerDesign(kinds=("batch_norm",), num_layers=50, max_flops=20, max_bytes=40))


def test_layers_as_in_networks_have_their_sizes():
    design = LayerDesign(num_layers=220, ranges="networks", max_flops=1e9, max_bytes=1e8, with_null=False)
    jobs = design_layers(design)
    convolutions = [job.parameters for job in jobs if job.subject == "conv2d"]
    assert {asked["kernel"] for asked in convolutions} == {1, 3, 5, 7}
    assert {asked["stride"] for asked in convolutions} == {1, 2}
    assert all(asked["in_features"] % 8 == 0 and asked["out_features"] % 8 == 0 for asked in convolutions)
    assert {asked["padding"] for asked in convolutions} == {"same"}
    assert {job.parameters["padding"] for job in jobs if job.subject == "max_pool"} == {"same", "valid"}


def test_unknown_ranges_are_refused():
    with pytest.raises(InvalidSetupError, match="justus, wide, networks"):
        LayerDesign(ranges="narrow")
