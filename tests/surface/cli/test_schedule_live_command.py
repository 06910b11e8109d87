"""``forerun schedule live``: the page, the object, and one line for what cannot be meant."""

import json
from pathlib import Path

import pytest
from command_line import invoke

from live_documents import NOW_S, SINFO, SQUEUE


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "slurm.json"
    path.write_text(json.dumps({"squeue": SQUEUE, "sinfo": SINFO, "read_at_s": NOW_S}), encoding="utf-8")
    return str(path)


def test_the_page_ends_in_commands_that_were_not_run(recorded):
    result = invoke("schedule", "live", recorded)
    assert result.exit_code == 0, result.output
    for words in (
        "slurm, 1x4xt4+1x2xt4, policy foresight",
        "keeps",
        "start",
        "To bring it about (nothing was run)",
    ):
        assert words in result.output
    assert result.stdout.splitlines()[-1] == "scontrol release 8"


def test_the_object(recorded):
    result = invoke("schedule", "live", recorded, "--policy", "srtf", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["system"], found["policy"]) == ("slurm", "srtf")
    assert {job["job"]: job["action"] for job in found["jobs"]} == {"7": "keep", "8": "start"}
    assert found["commands"][-1] == "scontrol release 8"


def test_applied_commands_that_fail_are_named(recorded, monkeypatch, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho access denied >&2\nexit 1\n", encoding="utf-8")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    result = invoke("schedule", "live", recorded, "--apply")
    assert result.exit_code == 1
    assert "failed: access denied; 1 command(s) after it were not run" in result.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("RECORDED", "--cluster", "1x1xt4"), "no such option: --cluster"),
        (("RECORDED", "--watch", "soon"), "--watch: expected a duration"),
        (("RECORDED", "--watch", "0s"), "--watch: expected a second or more"),
        (("RECORDED", "--watch", "5m", "--json"), "leave one of the two out"),
        (("RECORDED", "--policy", "srtf,fifo"), "unknown policy 'srtf,fifo'"),
        (("nowhere.json",), "slurm, ray:URL or a file"),
    ],
)
def test_what_cannot_be_meant_is_one_line_and_status_2(recorded, words, message):
    result = invoke("schedule", "live", *(recorded if word == "RECORDED" else word for word in words))
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_document_that_is_cut_off_is_one_line_and_status_1(recorded):
    path = Path(recorded)
    path.write_text(path.read_text(encoding="utf-8")[:500], encoding="utf-8")
    result = invoke("schedule", "live", recorded)
    assert result.exit_code == 1
    assert (
        "slurm.json is no whole JSON document: it ends after 500 characters, in the middle" in result.stderr
    )
    assert len(result.stderr.strip().splitlines()) == 1
