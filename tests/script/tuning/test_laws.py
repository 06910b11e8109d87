"""What the cost model has a study try first."""

import pytest

from forerun.script.tuning.laws import expected_rate, first_guesses
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
