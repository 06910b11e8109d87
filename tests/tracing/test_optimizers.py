"""Optimizers run for real on meta tensors: state, names, granularity."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from traced_steps import allocated_bytes, record, setup_of

from forerun.base.errors import InvalidSetupError
from forerun.graph.graph import AllocationKind, StepPart
from forerun.question.setup import OptimizerImplementation
from forerun.tracing.optimizers import OPTIMIZERS, make_optimizer

PARAMETERS = 8 * 16 + 16


def state_bytes(name):
    raw = record(nn.Linear(8, 16), (8,), optimizer=name)
    return sum(size for size in allocated_bytes(raw, AllocationKind.OPTIMIZER_STATE) if size > 4)


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("sgd-plain", 0),
        ("sgd", 1),
        ("momentum", 1),
        ("nesterov", 1),
        ("adam", 2),
        ("adamw", 2),
        ("rmsprop", 1),
        ("adagrad", 1),
        ("adadelta", 2),
        ("nadam", 2),
        ("adamax", 2),
    ],
)
def test_copies_of_the_weights_in_the_state(name, copies):
    assert state_bytes(name) == copies * 4 * PARAMETERS


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (
            "adamw-8bit",
            [4 * 64, 4 * 64, 4 * 2 * 32, 8192, 8192],
        ),  # two scales for each 256 weights; fp32 biases
        ("adafactor", [4 * 128, 4 * 64, 4 * 64]),  # rows, columns; biases
        ("lion", [4 * 8192, 4 * 64]),
        ("muon", [4 * 8192, 4 * 64, 4 * 64]),  # AdamW for the biases
    ],
)
def test_states_of_optimizers_of_large_models(name, sizes):
    raw = record(nn.Linear(128, 64), (128,), optimizer=name)
    assert sorted(allocated_bytes(raw, AllocationKind.OPTIMIZER_STATE)) == sorted(sizes)


def test_every_optimizer_is_covered_above():
    tests = (test_copies_of_the_weights_in_the_state, test_states_of_optimizers_of_large_models)
    assert {name for test in tests for name, _ in test.pytestmark[0].args[1]} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_updates_in_a_step(name):
    raw = record(nn.Linear(8, 16), (8,), optimizer=name)
    assert any(row.step_part is StepPart.OPTIMIZER for row in raw.rows)
    assert raw.unsupported == frozenset()


def test_none_updates_nothing():
    raw = record(nn.Linear(8, 16), (8,), optimizer="none")
    assert not any(row.step_part is StepPart.OPTIMIZER for row in raw.rows)


def test_a_model_without_weights_needs_no_optimizer():
    assert make_optimizer(setup_of(optimizer="adam"), []) is None


def test_a_loop_launches_kernels_for_every_tensor():
    def launches(kind):
        setup = {"optimizer": "sgd", "optimizer_implementation": OptimizerImplementation(kind)}
        raw = record(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5))), (8,), **setup)
        return sum(row.cost.count for row in raw.rows if row.step_part is StepPart.OPTIMIZER)

    assert launches("for-loop") == 10 * launches("foreach")


def test_an_unknown_optimizer_is_refused_with_near_matches():
    with pytest.raises(InvalidSetupError, match=r"unknown optimizer 'adamW2'; did you mean .*adamw"):
        make_optimizer(setup_of(optimizer="adamW2"), [nn.Parameter(torch.empty(2, device="meta"))])
