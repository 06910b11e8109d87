"""Published steps of a network: found by what they are, and as sharp as the systems allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import forerun
from forerun.cost.time.weights import load_weights, shipped_weights_path
from forerun.prediction.estimate import Provenance
from forerun.prediction.published import (
    KIN,
    posterior_of_kin,
    posterior_of_system,
    published_rows,
    rows_of_architecture,
)
from forerun.prediction.step import points_of, predict_steps, prepare, timed_steps
from forerun.question.devices import find_device
from forerun.question.model import ModelRequest
from forerun.question.saving import Saving
from forerun.question.setup import TrainingSetup
from forerun.tracing.trace import trace

A100 = {"device": "a100-sxm4-40gb", "batch_size": 256, "precision": "amp"}
LAMBDA_MS_AT_256 = 494.9 * 256 / 720
"""Lambda's ResNet-50 on an A100 SXM4 40GB, AMP, NCHW, PyTorch 1.13: 494.9 ms for 720 images."""


AMP = TrainingSetup(batch_size_per_device=256, precision="amp")


def traced():
    return trace(ModelRequest(model="torchvision:resnet50"), AMP)


@pytest.fixture(scope="module")
def resnet():
    return forerun.predict("torchvision:resnet50", **A100)


def test_the_posterior_is_that_of_the_joint_gaussian():
    residuals, apart = np.array([0.1, -0.05, 0.2]), np.array([0.0, 0.01, 0.04])
    mean, variance = posterior_of_system(residuals, apart, 0.03, 0.01)
    joint = np.full((4, 4), 0.03) + np.diag([0.01, *(0.01 + apart)])
    known = np.linalg.solve(joint[1:, 1:], np.column_stack([residuals, joint[1:, 0]]))
    assert mean == pytest.approx(joint[0, 1:] @ known[:, 0])
    assert variance == pytest.approx(joint[0, 0] - joint[0, 1:] @ known[:, 1])
    # However many systems were measured, the next one differs from them.
    assert posterior_of_system(np.zeros(10_000), np.zeros(10_000), 0.03, 0.01)[1] == pytest.approx(
        0.01, rel=1e-3
    )


def test_rows_on_other_boards_of_an_architecture_say_what_the_joint_gaussian_says():
    residuals, variances = np.array([0.1, -0.05, 0.2, 0.3]), np.array([0.01, 0.02, 0.04, 0.01])
    boards, model = [2, 0, 2, 3], 0.03
    mean, variance = posterior_of_kin(residuals, variances, np.array(boards), model)
    alike = np.array(
        [[1.0 if one == other else KIN for other in ("asked", *boards)] for one in ("asked", *boards)]
    )
    joint = model * alike + np.diag([0.0, *variances])
    known = np.linalg.solve(joint[1:, 1:], np.column_stack([residuals, joint[1:, 0]]))
    assert mean == pytest.approx(joint[0, 1:] @ known[:, 0])
    assert variance == pytest.approx(joint[0, 0] - joint[0, 1:] @ known[:, 1])


def test_a_board_that_nobody_measured_learns_from_its_kin_and_says_so(resnet):
    board, weights = find_device("rtx-4080"), load_weights(shipped_weights_path())
    graph = traced()
    kin = {row.device for row in rows_of_architecture(graph, board, AMP)}
    assert not published_rows(graph, board, AMP)
    assert kin
    assert {find_device(name).architecture for name in kin} == {board.architecture}
    known = prepare(graph)
    alone = prepare(replace(graph, num_parameters=graph.num_parameters - 2_000_000))
    steps = [predict_steps(model, board, [AMP], weights)[0] for model in (known, alone)]
    spans = [np.log(step.step_s.high / step.step_s.value) for step in steps]
    assert (set(steps[0].kin), steps[1].kin) == (kin, ())
    assert spans[0] < spans[1]
    # What no rows of its own confirm is no sharper than what they do.
    assert spans[0] > np.log(resnet.step_time_s.high / resnet.step_time_s.value)
    assert steps[0].provenance == steps[1].provenance
    found = forerun.predict("torchvision:resnet50", **{**A100, "device": board.name})
    assert any("boards of the same architecture" in note for note in found.notes)
    assert not any("boards of the same architecture" in note for note in resnet.notes)


def test_the_question_of_the_readme_is_as_sharp_as_its_rows(resnet):
    step = resnet.step_time_s
    assert resnet.provenance is Provenance.PUBLISHED
    assert step.high / step.value < 1.3
    assert step.low < LAMBDA_MS_AT_256 / 1e3 < step.high
    assert all(step.low < row.at_this_batch_s < step.high for row in resnet.published)
    assert any(row.batch_size == 720 and row.step_time_s == pytest.approx(0.4949) for row in resnet.published)
    assert any("lambdal/deeplearning-benchmark" in note for note in resnet.notes)
    assert 0 < resnet.error_sources.unknown_system < step.high / step.value - 1
    assert sum(part.time_s for part in resnet.breakdown) == pytest.approx(step.value)


def test_a_step_that_waits_for_launches_learns_little_from_one_that_fills_the_device():
    model, device = prepare(traced()), find_device(A100["device"])
    setups = [replace(AMP, batch_size_per_device=size) for size in (1, 8, 128, 720)]
    steps = predict_steps(model, device, setups, load_weights(shipped_weights_path()))
    spans = [np.log(step.step_s.high / step.step_s.value) for step in steps]
    alone = [np.hypot(step.system_log_width, step.model_log_width) for step in steps]
    assert all(step.published for step in steps)
    assert spans == sorted(spans, reverse=True)
    assert spans[0] > 3 * spans[-1]
    assert spans == pytest.approx(alone)


def test_fewer_images_than_anybody_measured_are_less_certain_with_each_halving():
    model, device = prepare(traced()), find_device("rtx-4080")
    setups = [replace(AMP, batch_size_per_device=size, layout="nhwc") for size in (1, 3, 6, 12, 24)]
    steps = predict_steps(model, device, setups, load_weights(shipped_weights_path()))
    spans = [np.hypot(step.system_log_width, step.model_log_width) for step in steps]
    assert spans[0] > spans[1] > spans[2] > spans[3]
    assert spans[3] == pytest.approx(spans[4], rel=0.3)


CONVOLVED = ("resnet50", "mobilenet_v3_small", "squeezenet1_0", "vgg11", "densenet121")


@pytest.mark.parametrize("name", CONVOLVED)
def test_half_precision_throughout_is_no_slower_than_autocast(name):
    weights, devices = load_weights(shipped_weights_path()), [find_device(one) for one in HALF_DEVICES]
    for layout, compiles, phase in (
        ("nchw", False, "train"),
        ("nhwc", True, "train"),
        ("nchw", False, "inference"),
    ):
        steps, measured = [], []
        for precision in ("fp16", "amp"):
            setup = TrainingSetup(precision=precision, layout=layout, compile=compiles, phase=phase)
            model = prepare(trace(ModelRequest(model=f"torchvision:{name}"), setup))
            sizes = [replace(setup, batch_size_per_device=size) for size in (8, 128) for _ in devices]
            steps.append(timed_steps(model, devices * 2, sizes, weights).step_s)
            points = points_of(model, devices * 2, sizes, None)
            measured.append(np.array([weights.knows_settings(point) for point in points]))
        # Machines that measured one format alone are slower than those of the other, or quicker: theirs hold.
        both = measured[0] & (measured[1] | (phase == "inference"))
        assert (steps[0] <= 1.005 * steps[1])[~both].all()  # the graphs differ by a copy of the input
        assert not both.all()


HALF_DEVICES = (
    "a100-sxm4-40gb",
    "v100-sxm2-16gb",
    "t4",
    "a10",
    "rtx-6000-ada",
    "rtx-5090",
    "h100-sxm",
    "mi250x",
)


def test_boards_that_differ_in_their_size_of_memory_alone_answer_alike():
    model, weights = prepare(traced()), load_weights(shipped_weights_path())
    boards = [find_device(name) for name in ("v100-sxm2-16gb", "v100-sxm2-32gb", "v100-pcie-32gb")]
    for precision in ("amp", "fp32", "fp16"):
        setups = [replace(AMP, precision=precision, batch_size_per_device=64)] * len(boards)
        value, low, high = timed_steps(model, boards, setups, weights).ends_s()
        assert (value[0], low[0], high[0]) == pytest.approx((value[1], low[1], high[1]))
    assert published_rows(model.graph, boards[1], AMP) == published_rows(model.graph, boards[0], AMP)
    assert not published_rows(model.graph, boards[2], AMP)


def test_the_search_answers_the_same(resnet):
    where = {"devices": A100["device"], "batch_sizes": [256], "precisions": "amp"}
    found = forerun.plan("torchvision:resnet50", **where).chosen
    assert found.step_time_s.value == pytest.approx(resnet.step_time_s.value)
    assert found.step_time_s.high == pytest.approx(resnet.step_time_s.high)
    assert found.provenance == resnet.provenance


@pytest.mark.parametrize(
    "other",
    [
        {"compile": True},
        {"optimizer": "adamw"},
        {"layout": "nhwc"},
        {"precision": "fp32"},
        {"saving": Saving(recompute="full")},
        {"phase": "forward"},
    ],
)
def test_other_circumstances_are_other_steps(resnet, other):
    graph = traced()
    device, setup = find_device(A100["device"]), AMP
    assert published_rows(graph, device, setup)
    assert not published_rows(graph, device, replace(setup, **other))
    assert not published_rows(replace(graph, num_parameters=graph.num_parameters - 2_000_000), device, setup)
    assert not published_rows(replace(graph, input_shape=(3, 96, 96)), device, setup)


def test_a_part_of_a_network_and_a_calibrated_device_take_none():
    model, device = prepare(traced()), find_device(A100["device"])
    weights = load_weights(shipped_weights_path())
    whole, part = (
        predict_steps(one, device, [AMP], weights)[0] for one in (model, replace(model, is_whole=False))
    )
    assert whole.published
    assert not part.published
    assert part.step_s.high / part.step_s.value > whole.step_s.high / whole.step_s.value
