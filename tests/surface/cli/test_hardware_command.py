import json

import pytest
from command_line import invoke, run

from forerun.question.devices import find_device, load_catalog


def test_list_json_holds_the_whole_catalogue():
    result = invoke("hardware", "list", "--json")
    assert result.exit_code == 0
    assert [device["name"] for device in json.loads(result.stdout)["devices"]] == list(load_catalog())


def test_list_in_a_pipe_has_one_line_per_device():
    done = run("hardware", "list", COLUMNS="140")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2 + len(load_catalog())


@pytest.mark.parametrize("name", ["a100-sxm4-40gb", "NVIDIA A100-SXM4-40GB", "A100 SXM 40GB"])
def test_show_json_is_the_device_under_any_of_its_names(name):
    shown = json.loads(invoke("hardware", "show", name, "--json").stdout)
    assert shown["name"] == "a100-sxm4-40gb"
    assert shown["memory_bytes"] == find_device(name).memory_bytes
    assert shown["sources"]


def test_show_reads_a_device_file_and_refuses_a_missing_one(tmp_path):
    result = invoke("hardware", "show", str(tmp_path / "mine.toml"), "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "mine.toml" in result.stderr


def test_unknown_device_lists_near_matches():
    result = invoke("hardware", "show", "rtx9090")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "did you mean rtx-5090" in result.stderr


def test_here_describes_this_machine():
    host = json.loads(invoke("hardware", "here", "--json").stdout)
    assert host["memory_total_bytes"] > 0
    assert host["cpu"]["model"] in invoke("hardware", "here").stdout.replace("\n", " ")


@pytest.mark.parametrize("words", [["hardware"], []])
def test_without_a_command_the_help_is_shown(words):
    result = invoke(*words)
    assert result.exit_code == 0
    assert "Commands:" in result.stdout
