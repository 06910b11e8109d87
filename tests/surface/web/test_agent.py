"""``forerun mcp``, asked by the SDK's own client over stdin and stdout."""

import os
import sys

import pytest

import forerun

mcp = pytest.importorskip("mcp")
anyio = pytest.importorskip("anyio")

LANGUAGE_MODEL = "llama-3.1-8b"
LORA = {"lora": 16, "sequence_length": 2048}


ACCURACIES = [0.31, 0.42, 0.50, 0.55, 0.58, 0.61, 0.63]


async def conversation():
    command = mcp.StdioServerParameters(
        command=sys.executable,
        args=["-m", "forerun", "mcp"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    async with mcp.Client(command) as client:
        tools = await client.list_tools()
        net = {"model": "torchvision:resnet50"}
        one = {"dataset": "imagenet", "batch_sizes": [32]}
        answers = [
            await client.call_tool("predict", {**net, "device": "t4", "batch_size": 1024}),
            await client.call_tool("hardware", {"device": "h100-sxm"}),
            await client.call_tool("scale", {**net, "device": "v100-sxm2-16gb", "num_devices": [1, 2]}),
            await client.call_tool("plan", {"models": net["model"], "devices": "t4,l4", "settings": one}),
            await client.call_tool("predict", {"model": "torchvision:resnet5", "device": "t4"}),
            await client.call_tool(
                "predict", {"model": LANGUAGE_MODEL, "device": "h100-sxm", "settings": LORA}
            ),
        ]
        points = {"name": "a", "points": "1:100 2:190", "batch_size": 64, "steps": 9000}
        cluster = {"cluster": "2x4xt4"}
        of_jobs = [
            await client.call_tool("forecast", {"run": ACCURACIES, "target": "accuracy>=0.7", "epochs": 30}),
            await client.call_tool("forecast", {"run": "/etc/passwd"}),
            await client.call_tool("schedule", {**cluster, "jobs": [points]}),
            await client.call_tool("schedule", {**cluster, "jobs": [{**points, "table": "/etc/passwd"}]}),
            await client.call_tool("schedule", {**cluster, "jobs": [{**points, "model": "train.py:net"}]}),
        ]
    return {tool.name: tool for tool in tools.tools}, answers, of_jobs


@pytest.fixture(scope="module")
def said():
    return anyio.run(conversation)


def test_the_tools_are_the_questions(said):
    tools, *_ = said
    assert set(tools) == {
        "predict", "plan", "scale", "layouts", "advise", "diagnose", "forecast", "schedule", "compare", "hardware",
        "models",
    }  # fmt: skip
    assert all(tool.annotations.read_only_hint for tool in tools.values())
    assert "No code of a user is run" in tools["predict"].description


def test_the_answers_are_those_of_the_package(said):
    _, (fit, hardware, scale, plan, wrong, _), _ = said
    assert fit.structured_content["fits"] == "no"
    assert fit.structured_content["ways_to_fit"][0]["change"]["batch_size"] < 1024
    assert hardware.structured_content["devices"][0]["name"] == "h100-sxm"
    assert [point["num_devices"] for point in scale.structured_content["points"]] == [1, 2]
    assert plan.structured_content["chosen"]["device"] in ("t4", "l4")
    assert wrong.is_error
    assert "resnet50" in wrong.content[0].text


def test_the_defaults_of_a_language_model_are_those_of_the_package(said):
    _, (*_, found), _ = said
    expected = forerun.predict(LANGUAGE_MODEL, device="h100-sxm", **LORA)
    assert found.structured_content == expected.as_dict()
    assert expected.fits == "yes"


def test_forecasts_and_schedules_are_tools_that_read_no_strangers_files(said):
    *_, (run, outside, jobs, table, code) = said
    assert run.structured_content["metric"] == "accuracy"
    assert [one["policy"] for one in jobs.structured_content["policies"]] == ["foresight", "srtf", "fifo"]
    for refused, words in ((outside, "outside the working folder"), (table, "outside the working folder")):
        assert refused.is_error
        assert words in refused.content[0].text
    assert "which this server does not run" in code.content[0].text


def test_any_wrong_call_of_any_tool_is_one_line_that_says_what_to_do():
    from forerun.surface.web.agent import make_server

    server, strange = make_server(), (None, 5, "two\nlines", "x\0", "\ud800", [], [[1]], {}, {"a": {}}, 1e300)

    async def refusals():
        found = []
        for tool in await server.list_tools():
            needed, known = tool.input_schema.get("required", []), tool.input_schema["properties"]
            calls = [dict.fromkeys(needed[:-1], 5), {"unheard": 1}]
            calls += [{**dict.fromkeys(needed, "cnn"), name: value} for name in known for value in strange]
            for arguments in calls:
                try:
                    await server.call_tool(tool.name, arguments)
                except Exception as error:
                    found.append((tool.name, arguments, str(error)))
        return found

    found = anyio.run(refusals)
    assert len(found) > 200
    assert [
        one for one in found if not one[2].isprintable() or "internal error" in one[2] or len(one[2]) > 300
    ] == []
    said = [
        words
        for name, arguments, words in found
        if name == "scale" and arguments == {"model": 5, "device": 5}
    ]
    assert said[0].startswith(
        "model: expected a valid string, got 5; device: expected a valid string, got 5; num_dev"
    )
    assert 'call scale as in {"model": "torchvision:resnet50"' in said[0]
