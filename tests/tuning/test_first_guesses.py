"""What the cost model has a study try first."""

import pytest

from forerun.profiling.profile import Profile, StepParts
from forerun.tuning.space import space_of
from forerun.tuning.speed_law import expected_rate, first_guesses

SPACE = space_of(
    {
        "parameters": {
            "batch_size": {"values": [8, 32]},
            "num_workers": {"values": [0, 1, 3]},
            "num_threads": {"values": [1, 2, 4]},
            "channels_last": {"values": [False, True]},
        }
    }
)
BASE = {"batch_size": 8, "num_workers": 0, "num_threads": 4, "channels_last": False}


def profile(device: str) -> Profile:
    """A step of 80 ms, 60 of them waiting for eight samples that the main process decodes; four cores."""
    parts = StepParts(input_wait_s=0.06, copy_s=0.0, kernels_s=0.015, host_s=0.005)
    return Profile(
        command=("train.py",),
        outcome="done",
        status=0,
        num_steps=40,
        num_steady_steps=39,
        step_time_s=0.08,
        step_time_median_s=0.08,
        throughput_samples_per_s=100.0,
        batch_size=8.0,
        parts=parts,
        loader_wait_s=0.06,
        has_window=True,
        top_operators=(),
        wall_s=5.0,
        phases_s={},
        device=device,
        device_busy_fraction=None,
        cpu_utilisation=0.5,
        cpu_s_per_step=0.1,
        num_usable_cores=4.0,
        peak_memory_bytes=1,
        device_peak_bytes=None,
        sensors={},
        loader={"num_workers": 0},
        optimizer={},
        num_ranks=1,
        epochs=None,
        steps_per_epoch=None,
        job_time_s=None,
        time_left_s=None,
    )


def test_the_script_as_it_is_has_the_rate_of_its_profile():
    assert expected_rate(profile("cuda:0"), BASE, BASE) == pytest.approx(100.0, rel=0.01)


def test_a_run_that_waits_for_its_input_gets_workers_and_helping_settings_first():
    best, unhelped, *others = first_guesses(SPACE, profile("cuda:0"), BASE)
    assert (best["num_workers"], best["channels_last"], best["num_threads"]) == (3, True, 4)
    assert (unhelped["num_workers"], unhelped["channels_last"]) == (3, False)
    assert best not in others


def test_on_a_processor_the_workers_have_cores_of_their_own():
    for guess in first_guesses(SPACE, profile("cpu"), BASE):
        if guess["channels_last"] and guess["num_workers"]:
            assert guess["num_threads"] == {1: 2, 3: 1}[guess["num_workers"]]
