"""Diagnoses over HTTP and by agents: of numbers and traces, never of a command."""

import anyio
import mcp
import pytest
from fastapi.testclient import TestClient

import forerun
from forerun.surface.web.agent import make_server
from forerun.surface.web.app import make_app
from studies.scripts.diagnose import write_trace

QUESTION = {"model": "mnist-cnn", "device": "t4", "measured": "0.5 s"}


def call(arguments):
    async def conversation():
        async with mcp.Client(make_server()) as client:
            return await client.call_tool("diagnose", arguments)

    return anyio.run(conversation)


def test_http_answers_what_the_package_answers():
    with TestClient(make_app(), base_url="http://localhost") as client:
        answer = client.post("/diagnose", json={**QUESTION, "batch_size": 64, "gpu_utilization": 0.2})
        assert answer.json() == forerun.diagnose(**QUESTION, batch_size=64, gpu_utilization=0.2).as_dict()
        for wrong in ({"measured": "soon"}, {"command": ["true"]}, {"trace": "t.json"}, {"measured": 0.0}):
            refused = client.post("/diagnose", json={**QUESTION, **wrong})
            assert refused.status_code in (400, 422)
            assert list(refused.json()) == ["error"]
        as_file = {"content-type": "application/octet-stream"}
        log = client.post("/traces", content=b"time: 8.9 data_time: 7.4\n" * 3, headers=as_file)
        assert log.json()["diagnosis"]["causes"][0]["cause"] == "data loader"


def test_agents_ask_about_numbers_and_traces_of_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (path,) = write_trace(tmp_path, "recompilation", "gpt", seed=3)
    found = call({"trace": [path.name]})
    assert found.structured_content["causes"][0]["cause"] == "recompilation"
    assert call({**QUESTION, "settings": {"batch_size": 64}}).structured_content["verdict"] == "slow"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"trace": ["/etc/passwd"]}, "outside the working folder"),
        ({"trace": ["../trace.json.gz"]}, "outside the working folder"),
        ({"settings": {"command": ["touch", "made"]}}, "no command is run here"),
        ({"settings": {"trace": ["/etc/passwd"]}}, "outside the working folder"),
        ({"settings": {"num_steps": 3}}, "no command is run here"),
    ],
)
def test_agents_reach_no_other_file_and_run_nothing(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    found = call(arguments)
    assert found.is_error
    assert words in found.content[0].text
    assert list(tmp_path.iterdir()) == []
