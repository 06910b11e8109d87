"""The study of faults in a short form: nothing acknowledged is lost, no damage passes for data."""

from __future__ import annotations

import pytest

from studies.faults.bad_inputs import bad_cases, bad_input_table, run_cases
from studies.faults.hostile_scripts import run_script
from studies.faults.stores import (
    disk_full,
    find_binaries,
    flipped_bits,
    killed_writers,
    restarted_server,
    running_server,
)

BAD_ENDS = ("lost", "twice", "changed", "damaged", "refused", "not written")


def check(found):
    assert found["acknowledged"] > 0
    assert {name: found[name] for name in BAD_ENDS} == dict.fromkeys(BAD_ENDS, 0)


def test_killed_writers_lose_nothing(tmp_path):
    check(killed_writers(lambda _: str(tmp_path / "killed.sqlite"), 3))


def test_a_full_disk_loses_nothing(tmp_path):
    check(disk_full(tmp_path, 3, seed=1))


def test_a_flipped_bit_is_repaired_or_reported_or_outside_the_data(tmp_path):
    found = flipped_bits(tmp_path, 25)
    fine = (
        "outside the data",
        "left out and reported",
        "index repaired and reported",
        "refused with an error",
    )
    assert sum(found[name] for name in fine) == found["faults"] == 25


def test_a_server_that_restarts_under_two_writers_has_everything(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    pytest.importorskip("psycopg")
    if find_binaries() is None:
        pytest.skip("PostgreSQL is not installed (apt-get install postgresql)")
    with running_server() as server:
        check(restarted_server(server, 1, away_s=0.2))


def test_bad_values_of_every_command_are_refused_in_one_line(tmp_path):
    cases = bad_cases(700)
    assert cases == bad_cases(700)
    assert {"predict", "plan", "records list", "measure grid", "tune"} <= {case.command for case in cases}
    quick = [
        case for case in cases if case.must_fail and case.command.startswith(("measure", "hardware", "plan"))
    ][:6]
    judged = run_cases(quick, tmp_path, with_good=False)
    assert [(case.words, ended.err, fault) for case, ended, fault in judged if fault] == []
    assert bad_input_table(judged)[-1].startswith("| all | 6 | 6 | 0 | 0 |")


@pytest.mark.parametrize(
    ("verb", "script", "words"),
    [
        ("capture", "a child without its variables", "written to graph.forerun"),
        ("capture", "SIGKILL to its parent", "cannot be captured"),
        ("profile", "a child that ignores SIGTERM", ""),
        ("profile", "os._exit in a step", "exit status 3"),
    ],
)
def test_a_hostile_script_leaves_nothing_and_is_told_in_a_line(tmp_path, verb, script, words):
    told = run_script(verb, script, tmp_path / "place")
    assert told.faults == ()
    assert words in told.words
