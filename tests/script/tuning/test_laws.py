"""Laws of a trial's memory, and the configurations that a study tries first by the cost model."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from forerun.script.tuning.laws import MemoryPoint, expected_rate, first_guesses, predicted_memory_bytes
from forerun.script.tuning.space import space_of
from made_profiles import made_profile

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


def test_the_script_as_it_is_has_the_rate_of_its_profile():
    assert expected_rate(made_profile("cuda:0"), BASE, BASE) == pytest.approx(100.0, rel=0.01)


def test_a_run_that_waits_for_its_input_gets_workers_and_helping_settings_first():
    best, unhelped, *others = first_guesses(SPACE, made_profile("cuda:0"), BASE)
    assert (best["num_workers"], best["channels_last"], best["num_threads"]) == (3, True, 4)
    assert (unhelped["num_workers"], unhelped["channels_last"]) == (3, False)
    assert best not in others


def test_on_a_processor_the_workers_have_cores_of_their_own():
    for guess in first_guesses(SPACE, made_profile("cpu"), BASE):
        if guess["channels_last"] and guess["num_workers"]:
            assert guess["num_threads"] == {1: 2, 3: 1}[guess["num_workers"]]


MB = 1e6
OWN_BATCH = {"batch_size": 8}


def point(batch: int, workers: int = 0) -> MemoryPoint:
    return MemoryPoint(
        values={"batch_size": batch, "num_workers": workers},
        start_bytes=400 * MB,
        peak_bytes=(450 + 3 * batch + 120 * workers) * MB,
    )


@settings(deadline=None)
@given(
    st.integers(8, 4096),
    st.integers(0, 4),
    st.lists(st.sampled_from([8, 16, 32, 64]), min_size=1, max_size=5),
)
def test_what_would_not_fit_is_never_called_small(batch, workers, seen):
    # One size does not tell what grows with the batch; to smaller ones than it the law does not hold, and need not.
    assume(len(set(seen)) > 1 or batch >= min(seen))
    points = [point(size) for size in seen]
    actual = (450 + 3 * batch + 120 * workers) * MB
    expected = predicted_memory_bytes(points, {"batch_size": batch, "num_workers": workers}, OWN_BATCH)
    assert expected >= actual


@settings(deadline=None)
@given(st.integers(8, 2048), st.integers(0, 3))
def test_a_larger_batch_never_needs_less(batch, workers):
    points = [point(8), point(32), point(64, 1)]

    def expected(size: int) -> float:
        return predicted_memory_bytes(points, {"batch_size": size, "num_workers": workers}, OWN_BATCH)

    assert expected(batch) <= expected(2 * batch)


def test_before_any_trial_nothing_is_known():
    assert predicted_memory_bytes([], {"batch_size": 8}, OWN_BATCH) is None
