"""Sums of timelines, parts of steps and what follows from them."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.script.command_words import command_arguments, with_arguments
from forerun.script.diagnosis.causes import fed_step_time_s
from forerun.script.profile import advise
from forerun.script.profiling.profile import Profile, parts_of_step
from forerun.script.profiling.step_hooks import num_samples_of
from forerun.script.profiling.watch import covered, minus
from made_profiles import made_profile

SPANS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda s: (s[0], s[0] + s[1])), max_size=12
)
TIMES = st.floats(0.0, 10.0)


@given(SPANS, SPANS)
def test_spans_are_sets_of_points(first, second):
    def points(spans):
        return {point for begin, end in spans for point in range(int(begin), int(end))}

    assert points(covered(first)) == points(first)
    assert points(minus(covered(first), covered(second))) == points(first) - points(second)


@given(TIMES, TIMES, TIMES, TIMES, TIMES, st.booleans())
def test_parts_add_up_to_the_step(step_s, wait_s, kernels_s, copy_s, traced_wait_s, on_device):
    window = {
        "wall_s": kernels_s + copy_s + traced_wait_s + 1.0,
        "num_steps": 3,
        "kernels_s": kernels_s,
        "copy_s": copy_s,
        "wait_s": traced_wait_s,
        "on_device": on_device,
    }
    for known in (window, None):
        parts = parts_of_step(step_s, wait_s, known)
        assert parts.step_s == pytest.approx(step_s, abs=1e-9)
        assert min(parts.input_wait_s, parts.copy_s, parts.kernels_s, parts.host_s) >= -1e-12


@given(TIMES, TIMES, st.integers(1, 64), st.integers(1, 16), TIMES)
def test_more_workers_never_make_a_step_slower(compute_s, cost_s, samples, cores, core_s):
    steps = [
        fed_step_time_s(
            compute_s=compute_s,
            sample_cost_s=cost_s,
            num_samples=samples,
            num_workers=workers,
            num_cores=cores,
            core_s=core_s,
        )
        for workers in range(1, 9)
    ]
    assert steps == sorted(steps, reverse=True)
    assert min(steps) >= compute_s


def test_samples_are_found_in_any_batch():
    class Tensor:
        def __init__(self, *shape):
            self.shape = shape

    assert num_samples_of([Tensor(8, 3), Tensor(8)]) == 8
    assert num_samples_of({"name": "text", "pixels": Tensor(5, 2)}) == 5
    assert num_samples_of("text") == 0


def test_a_busy_machine_is_called_busy_and_nothing_else_is_judged():
    found = advise(made_profile("cpu", busy_machine_fraction=0.4))
    assert found.bottleneck == "machine"
    assert "no core in 40 % of its steps" in found.reason
    assert found.change == {}
    assert advise(made_profile("cpu", busy_machine_fraction=None)).bottleneck == "input"


def test_advice_fits_the_tensors():
    computing = {"wait_s": 0.0, "kernels_s": 0.08, "host_s": 0.0}
    assert advise(made_profile("cuda:0", **computing)).change == {"amp": "bf16", "channels_last": True}
    for seen in (False, None):
        found = advise(made_profile("cuda:0", has_images=seen, **computing))
        assert found.change == {"amp": "bf16"}
        assert "channels_last" not in found.words
    assert advise(made_profile("cpu", has_images=False, **computing)).change == {}


def test_batch_advice_is_in_the_loaders_unit_under_accumulation():
    waiting = {"wait_s": 0.0, "kernels_s": 0.03, "host_s": 0.05}
    # Eight samples a step are two batches of four.
    found = advise(made_profile("cuda:0", batches_per_step=2.0, **waiting))
    assert found.change == {"batch_size": 16}
    found = advise(made_profile("cuda:0", batches_per_step=8.0, **waiting))
    assert found.change == {"batch_size": 4}
    assert "accumulate 2 batches instead of 8" in found.words


def test_a_profile_is_read_again():
    profile = made_profile("cpu", notes=("a", "b"))
    profile = replace(profile, advice=advise(profile))
    assert Profile.of(json.loads(json.dumps(profile.as_dict()))) == profile


def test_arguments_are_set_in_the_way_in_which_a_command_has_them():
    hydra = ("python", "train.py", "model=gpt", "optim.lr=0.1", "--config-name=small")
    assert [(a.flag, a.value) for a in command_arguments(hydra)] == [
        ("model=", "gpt"),
        ("optim.lr=", "0.1"),
        ("--config-name=", "small"),
    ]
    assert with_arguments(hydra, {"optim.lr=": 0.2})[-1] == "optim.lr=0.2"
    nano = ("python", "train.py", "--batch_size=4", "--compile=False")
    assert with_arguments(nano, {"--batch_size": 8, "--compile": True})[2:] == (
        "--batch_size=8",
        "--compile=True",
    )
    assert with_arguments(("train.py", "--lr", "1"), {"--lr=": 2})[1:] == ("--lr=2",)


def test_a_profile_draws_its_parts_which_add_up_to_a_sample():
    profile = made_profile("cpu")
    (axes,) = profile.plot().axes
    drawn_ms = sum(bar.get_width() for bar in axes.patches)
    assert drawn_ms == pytest.approx(1e3 * profile.parts.step_s / profile.batch_size)
