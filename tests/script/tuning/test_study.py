"""The journal of a study: lost trials, constraints, fronts, sharing."""

import multiprocessing
import os

import pytest

from forerun.base.errors import UsageError
from forerun.script.tuning.options import parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialResult

SPACE = space_of(
    {"parameters": {"num_workers": {"values": [0, 1, 2, 3]}, "channels_last": {"values": [False, True]}}}
)
DONE = {
    "is_feasible": True,
    "result": TrialResult(outcome="done").as_dict(),
    "values": {},
    "source": "sampler",
}
LOST = {**DONE, "is_feasible": False, "violation": 2.0}


def store(folder, objectives="speed", identity="same"):
    return TrialStore(folder, parse_objectives(objectives), {"command": identity}, seed=0)


def _die_in_a_trial(folder):
    mine = store(folder)
    mine.enqueue({"num_workers": 3, "channels_last": True}, "cost model")
    mine.ask()
    os._exit(1)


def test_a_trial_of_a_dead_process_is_queued_again(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die_in_a_trial, args=(tmp_path,))
    process.start()
    process.join()
    mine = store(tmp_path)
    assert mine.is_resumed
    assert mine.claim_lost_trials() == 1
    assert mine.claim_lost_trials() == 0
    trial = mine.ask()
    assert suggest(trial, SPACE) == {"num_workers": 3, "channels_last": True}
    assert trial.user_attrs["source"] == "cost model"


def test_a_trial_of_a_living_process_is_left_alone(tmp_path):
    first, second = store(tmp_path), store(tmp_path)
    first.ask()
    assert second.claim_lost_trials() == 0


def test_two_sessions_see_each_others_trials(tmp_path):
    first, second = store(tmp_path), store(tmp_path)
    for mine, value in ((first, 1.0), (second, 2.0)):
        trial = mine.ask()
        suggest(trial, SPACE)
        mine.tell(trial, [value], DONE)
    assert [trial.values[0] for trial in first.trials()] == [1.0, 2.0]
    assert [trial.number for trial in second.front()] == [1]


def test_what_did_not_fit_is_a_violated_constraint_and_no_failure(tmp_path):
    mine = store(tmp_path)
    trial = mine.ask()
    suggest(trial, SPACE)
    mine.tell(trial, [None], LOST)
    (told,) = mine.trials()
    assert told.state.name == "COMPLETE"
    assert told.values == [0.0]
    assert max(told.constraints.values()) == 2.0
    assert mine.front() == []


def test_a_front_holds_what_nothing_beats(tmp_path):
    mine = store(tmp_path, "accuracy,time")
    for accuracy, time_s in ((0.9, 10.0), (0.8, 5.0), (0.7, 8.0)):
        trial = mine.ask()
        suggest(trial, SPACE)
        mine.tell(trial, [accuracy, time_s], DONE)
    assert [trial.number for trial in mine.front()] == [0, 1]


def test_another_command_does_not_resume_a_study(tmp_path):
    store(tmp_path)
    with pytest.raises(UsageError, match="has another command"):
        store(tmp_path, identity="other")
