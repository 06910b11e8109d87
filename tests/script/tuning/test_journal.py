"""The journal of a study after full disks and other damage."""

import resource
import sqlite3
import subprocess
import sys
import time

import pytest

from forerun.base.errors import FailureError, RecordError
from forerun.script.tuning.options import parse_objectives
from forerun.script.tuning.space import space_of
from forerun.script.tuning.study import TrialStore, suggest
from forerun.script.tuning.trial import TrialResult

SPEED = parse_objectives("speed")
SPACE = space_of({"parameters": {"num_workers": {"min": 0, "max": 1000}}})
RECORD = {"result": TrialResult(outcome="done").as_dict(), "is_feasible": True, "source": "sampler"}


def opened(folder):
    return TrialStore(folder, SPEED, {}, sampler="random", seed=0)


def one_trial(store, value=1.0):
    trial = store.ask()
    store.tell(trial, [value], {**RECORD, "values": suggest(trial, SPACE)})


def test_a_trial_whose_figures_were_written_is_finished_and_not_run_again(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    with sqlite3.connect(store.path) as journal:  # its session died before it could say so
        journal.execute("DELETE FROM log WHERE number = (SELECT max(number) FROM log)")
    again = opened(tmp_path)
    assert again.study.get_trials()[0].state.name == "RUNNING"
    again._running_elsewhere = lambda: [(again.study.get_trials()[0], False)]
    assert again.claim_lost_trials() == 0
    assert [trial.values for trial in again.trials()] == [[1.0]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole.replace(b"1.5", b"1.7"),
        lambda whole: b"SQLite formas 3" + whole[15:],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole.replace(b"log", b"lug"),
    ],
)
def test_damage_is_an_error_and_no_other_figure(tmp_path, damage):
    store = opened(tmp_path)
    one_trial(store, 1.5)
    store.path.write_bytes(damage(store.path.read_bytes()))
    with pytest.raises((RecordError, FailureError), match=r"journal of (a|the) study .*journal\.sqlite"):
        opened(tmp_path)


def test_a_record_that_is_gone_is_an_error_that_names_it(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    with sqlite3.connect(store.path) as journal:
        journal.execute("DELETE FROM log WHERE number = 3")
    with pytest.raises(RecordError, match="record 3 has another checksum, or is missing"):
        opened(tmp_path)


def test_a_disk_that_fills_up_at_any_byte_costs_one_trial_and_no_record(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    limits, num_failed = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    for index in range(30):
        size, known = store.path.stat().st_size, len(store.trials())
        # The kernel takes the bytes up to the limit and refuses the rest, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1 + index * 50, limits[1]))
        try:
            for _ in range(20):
                one_trial(store)
        except FailureError as error:
            num_failed += "run the same command again" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        store = opened(tmp_path)
        assert len(store.trials()) >= known
    assert num_failed >= 25
    one_trial(store)
    assert len(opened(tmp_path).trials()) >= 3


def test_the_lock_of_a_dead_session_is_free_at_once(tmp_path):
    store = opened(tmp_path)
    code = (
        "import sqlite3, sys, time; journal = sqlite3.connect(sys.argv[1]); journal.execute('BEGIN EXCLUSIVE'); "
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    holder.kill()
    holder.wait()
    holder.stdout.close()
    began_s = time.monotonic()
    one_trial(store)
    assert time.monotonic() - began_s < 20
