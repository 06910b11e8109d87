"""The journal of a study after full disks, torn records and other damage."""

import re
import resource
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


def opened(folder, said=None):
    return TrialStore(
        folder, SPEED, {}, sampler="random", seed=0, say=[].append if said is None else said.append
    )


def one_trial(store, value=1.0):
    trial = store.ask()
    store.tell(trial, [value], {**RECORD, "values": suggest(trial, SPACE)})


def test_a_torn_last_record_is_cut_kept_aside_and_reported(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    whole = store.path.read_bytes()
    for cut in (1, 20, 60):
        store.path.write_bytes(whole[:-cut])
        said = []
        again = opened(tmp_path, said)
        assert len(said) == 1
        assert "was cut off" in said[0]
        assert (tmp_path / "journal.torn").exists()
        # Its figures were written: the trial is finished, and not run again.
        assert again.study.get_trials()[0].state.name == "RUNNING"
        again._running_elsewhere = lambda again=again: [(again.study.get_trials()[0], False)]
        assert again.claim_lost_trials() == 0
        assert [trial.values for trial in again.trials()] == [[1.0]]


def test_other_damage_is_an_error_that_names_the_line(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    lines = store.path.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:9] + b"\0" + lines[2][10:]
    store.path.write_bytes(b"".join(lines))
    with pytest.raises(RecordError, match=r"journal\.log, line 3: expected a JSON record"):
        opened(tmp_path)


def test_a_flipped_bit_of_a_figure_is_an_error_and_a_line_without_a_checksum_is_read(tmp_path):
    store = opened(tmp_path)
    one_trial(store, 1.5)
    text = store.path.read_text()
    store.path.write_text(text.replace("1.5", "1.7"))
    with pytest.raises(RecordError, match=r"journal\.log, line \d+: expected a JSON record"):
        opened(tmp_path)
    store.path.write_text(re.sub(r',"crc32":"\w{8}"}', "}", text))
    assert [trial.values for trial in opened(tmp_path).trials()] == [[1.5]]


def test_a_disk_that_fills_up_at_any_byte_costs_one_trial_and_no_record(tmp_path):
    store = opened(tmp_path)
    one_trial(store)
    began = store.path.stat().st_size
    one_trial(store)
    trial_bytes = store.path.stat().st_size - began
    limits, num_failed = resource.getrlimit(resource.RLIMIT_FSIZE), 0
    for index in range(50):
        size, known = store.path.stat().st_size, len(store.trials())
        # The kernel takes the bytes up to the limit and refuses the rest, as a full disk does.
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1 + index * trial_bytes // 50, limits[1]))
        try:
            one_trial(store)
        except FailureError as error:
            num_failed += "run the same command again" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        said = []
        store = opened(tmp_path, said)
        assert said == []
        assert store.path.read_bytes().endswith(b"}\n")
        assert len(store.trials()) >= known
    assert num_failed >= 45
    one_trial(store)
    assert len(opened(tmp_path).trials()) >= 3


def test_the_lock_of_a_dead_session_is_free_at_once(tmp_path):
    store = opened(tmp_path)
    code = (
        "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire(); "
        "print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "journal.lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    # What an earlier version's dead session leaves behind is no lock any more.
    (tmp_path / "journal.log.lock").symlink_to(tmp_path / "journal.log")
    holder.kill()
    holder.wait()
    holder.stdout.close()
    began_s = time.monotonic()
    one_trial(store)
    assert time.monotonic() - began_s < 20  # Optuna's own lock waits for thirty seconds
