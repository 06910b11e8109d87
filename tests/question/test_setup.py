"""Training setups: what is allowed, and what a precision means."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from forerun.base.errors import InvalidSetupError
from forerun.question.setup import MAX_BATCH_SIZE, Layout, Phase, Precision, TrainingSetup


@pytest.mark.parametrize("size", [1, 2, 10_000, MAX_BATCH_SIZE])
def test_batch_sizes_within_reason(size):
    assert TrainingSetup(batch_size_per_device=size).batch_size_per_device == size


@pytest.mark.parametrize("size", [0, -1, MAX_BATCH_SIZE + 1, 10**9])
def test_batch_sizes_that_cannot_be_meant(size):
    with pytest.raises(InvalidSetupError, match=rf"batch size must be at .* got {size}"):
        TrainingSetup(batch_size_per_device=size)


@pytest.mark.parametrize(
    ("precision", "is_autocast", "is_half"),
    [
        ("fp32", False, False),
        ("tf32", False, False),
        ("amp", True, True),
        ("amp-bf16", True, True),
        ("bf16", False, True),
        ("fp16", False, True),
        ("fp8", False, True),
        ("fp64", False, False),
    ],
)
def test_precisions(precision, is_autocast, is_half):
    chosen = Precision(precision)
    assert (chosen.is_autocast, chosen.is_half) == (is_autocast, is_half)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"phase": "generate"}, "generation are not answered in fp64"),
        ({"convolution_precision": "tf32"}, "beside precision fp64"),
    ],
)
def test_what_fp64_does_not_go_with(asked, words):
    with pytest.raises(InvalidSetupError, match=words):
        TrainingSetup(precision="fp64", **asked)


def test_every_precision_is_covered_above():
    assert {row[0] for row in test_precisions.pytestmark[0].args[1]} == set(Precision)


def test_a_setup_is_frozen_and_hashable():
    setup = TrainingSetup()
    with pytest.raises(FrozenInstanceError):
        setup.compile = True
    assert hash(setup) == hash(TrainingSetup())
    assert {setup, TrainingSetup(layout=Layout.NHWC), TrainingSetup(phase=Phase.FORWARD)} - {setup}


def test_choices_may_be_words():
    setup = TrainingSetup(precision="amp", layout="nhwc", phase="forward", optimizer_implementation="fused")
    assert setup.precision is Precision.AMP
    assert setup.layout is Layout.NHWC
    assert setup.phase is Phase.FORWARD
    assert setup == TrainingSetup(
        precision=Precision.AMP, layout=Layout.NHWC, phase=Phase.FORWARD, optimizer_implementation="fused"
    )


@pytest.mark.parametrize(
    ("name", "word", "known"),
    [("precision", "fp12", "fp32, tf32"), ("layout", "NCWH", "nchw, nhwc"), ("phase", 3, "train, forward")],
)
def test_unknown_words_are_refused(name, word, known):
    with pytest.raises(InvalidSetupError, match=known):
        TrainingSetup(**{name: word})


def test_convolutions_take_the_precision_of_the_step_unless_they_have_one():
    assert TrainingSetup(precision="tf32").of_convolutions is Precision.TF32
    assert TrainingSetup(precision="amp").of_convolutions is Precision.FP32
    assert TrainingSetup(convolution_precision="tf32").of_convolutions is Precision.TF32
    assert TrainingSetup(precision="tf32", convolution_precision="tf32") == TrainingSetup(precision="tf32")
    assert TrainingSetup(convolution_precision="fp32") != TrainingSetup()  # PyTorch's own is TF32
    with pytest.raises(InvalidSetupError, match="fp32 or tf32, got bf16"):
        TrainingSetup(convolution_precision="bf16")
