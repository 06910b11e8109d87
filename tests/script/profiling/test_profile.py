"""Sums of timelines, parts of steps and what follows from them."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.script.command_words import command_arguments, with_arguments
from forerun.script.diagnosis.causes import causes_of, fed_step_time_s
from forerun.script.diagnosis.observation import Observation, of_profile
from forerun.script.profile import advise
from forerun.script.profiling.profile import Profile, memory_growth, parts_of_step, without_core
from forerun.script.profiling.step_hooks import num_samples_of
from made_profiles import made_profile

TIMES = st.floats(0.0, 10.0)


@given(TIMES, TIMES, TIMES, TIMES, TIMES, st.booleans())
def test_parts_add_up_to_the_step(step_s, wait_s, kernels_s, copy_s, traced_wait_s, on_device):
    window = Observation(
        step_s=kernels_s + copy_s + traced_wait_s + 1.0,
        is_on_gpu=on_device,
        busy_s=kernels_s,
        copy_s=copy_s,
        loader_s=traced_wait_s,
        host_s=1.0,
    )
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


def test_a_busy_machine_stands_behind_what_the_script_itself_can_change():
    for share in (0.8, 0.4, None):  # the loader takes three quarters of a step, stretched or not
        assert advise(of_profile(made_profile("cpu", busy_machine_fraction=share))).bottleneck == "input"
    computing = made_profile("cpu", wait_s=0.002, kernels_s=0.075, host_s=0.003, busy_machine_fraction=0.8)
    found = advise(of_profile(computing))
    assert found.bottleneck == "machine"
    assert "no core in 80 % of its steps" in found.evidence
    assert found.knobs == {}
    # Threads that wait for each other at every operator are stretched most: on a free machine the host is a tenth.
    stretched = Observation(step_s=0.08, is_on_gpu=False, busy_s=0.075, host_s=0.003, stretched_s=0.072)
    assert advise(of_profile(computing, stretched)).bottleneck == "machine"  # 4 % of a step are no advice
    assert causes_of(of_profile(computing, stretched))[0].cause == "host and launches"


def test_threads_beyond_the_cores_have_their_part_of_the_wait():
    def parts(num_threads, ranks=1, cpu_share=0.5):
        process = SimpleNamespace(
            thread=np.array([[0.0, 0.0, 0.0], [10.0, 4.0, 6.0]]), optimizers=[{"num_threads": num_threads}]
        )
        run = SimpleNamespace(num_ranks=ranks)
        return without_core(run, process, None, cpu_share, 2.0, is_on_cpu=True)

    assert parts(2) == (pytest.approx(0.6), 0.0)
    assert parts(24) == (pytest.approx(0.05), pytest.approx(0.55))
    assert parts(2, ranks=2) == (pytest.approx(0.3), pytest.approx(0.3))
    assert parts(24, cpu_share=0.99) == (0.0, pytest.approx(0.55))
    crowded = made_profile(
        "cpu", wait_s=0.0, kernels_s=0.08, optimizer={"num_threads": 24}, crowded_fraction=0.55
    )
    found = causes_of(of_profile(crowded))[0]
    assert (found.cause, found.knobs) == ("too many threads", {"num_threads": 4})


def test_memory_that_grows_with_the_steps_comes_first():
    names = ("is_traced", "device_bytes", "memory_bytes")

    def grown(own_bytes, device_bytes=lambda n: 0):
        rows = [(n < 5, device_bytes(n), 2**30 + own_bytes(n)) for n in range(40)]
        steps = np.array(rows, dtype=[(name, float) for name in names]).view(np.recarray)
        return memory_growth(SimpleNamespace(steps=steps, device_whole_bytes=2**31), 2**32)

    step_bytes, num_steps = grown(lambda n: 5 * 2**20 * n)
    assert step_bytes == pytest.approx(5 * 2**20)
    assert num_steps == pytest.approx((3 * 2**30 - 39 * step_bytes) / step_bytes)
    assert grown(lambda n: 2**20 * round(100 * np.sin(n))) == grown(lambda n: 0) == (0.0, None)
    # What stops to grow is a cache; a GPU is full first.
    assert grown(lambda n: 2**27 * min(n, 8)) == (0.0, None)
    assert grown(lambda n: 0, lambda n: 2**24 * (n + 1))[1] == pytest.approx(128 - 40)
    leaking = {"memory_growth_bytes": step_bytes, "num_steps_to_full": num_steps}
    assert advise(of_profile(made_profile("cpu", **leaking))).bottleneck == "memory"
    # A job that ends before is safe.
    assert advise(of_profile(made_profile("cpu", num_steps_of_job=200.0, **leaking))).bottleneck == "input"


def test_what_holds_a_script_up_is_a_cause_of_its_own():
    held = {"saving": 0.03, "collecting": 0.005, "between": 0.2}
    profile = made_profile("cpu", wait_s=0.0, kernels_s=0.04, host_s=0.04, held_s=held)
    found = {cause.cause: cause.cost_s for cause in causes_of(of_profile(profile))}
    assert list(found) == ["validation and other work between steps", "saving checkpoints", "host and launches",
                           "garbage collection"]  # fmt: skip
    assert found["saving checkpoints"] == pytest.approx(0.03)
    assert found["host and launches"] == pytest.approx(0.005)


def test_advice_fits_the_tensors():
    computing = {"wait_s": 0.0, "kernels_s": 0.08, "host_s": 0.0}
    assert advise(of_profile(made_profile("cuda:0", **computing))).knobs == {
        "amp": "bf16",
        "channels_last": True,
    }
    for seen in (False, None):
        found = advise(of_profile(made_profile("cuda:0", has_images=seen, **computing)))
        assert found.knobs == {"amp": "bf16"}
        assert "channels_last" not in found.change
    assert advise(of_profile(made_profile("cpu", has_images=False, **computing))).knobs == {}


def test_batch_advice_is_in_the_loaders_unit_under_accumulation():
    waiting = {"wait_s": 0.0, "kernels_s": 0.03, "host_s": 0.05}
    # Eight samples a step are two batches of four.
    found = advise(of_profile(made_profile("cuda:0", batches_per_step=2.0, **waiting)))
    assert found.knobs == {"batch_size": 16}
    found = advise(of_profile(made_profile("cuda:0", batches_per_step=8.0, **waiting)))
    assert found.knobs == {"batch_size": 4}
    assert "accumulate 2 batches instead of 8" in found.change


def test_a_profile_is_read_again():
    profile = made_profile("cpu", notes=("a", "b"))
    profile = replace(profile, advice=advise(of_profile(profile)))
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
