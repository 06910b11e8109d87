"""Questions asked over HTTP and as tools of agents, help texts, and calibrations from files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from forerun.surface.cli.main import app

__all__ = ["CALLS"]

HELP_WIDTH = 100

CNN = "cnn:depth=2,base_filters=32"

LAYOUT = {
    "precision": "bf16",
    "optimizer": "adamw",
    "sequence_length": 256,
    "parallel": "tp=2,dp=2",
    "strategy": "zero1",
}

REQUESTS: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "http-predict": (
        "POST", "/predict",
        {"model": CNN, "device": "t4", "batch_size": 64, "precision": "amp", "dataset": "cifar10", "epochs": 3,
         "price_usd_per_hour": 0.5},
    ),
    "http-predict-layout": (
        "POST", "/predict", {"model": "gpt:depth=2,width=128,vocabulary=1000", "device": "4xh100-sxm", **LAYOUT},
    ),
    "http-scale": (
        "POST", "/scale",
        {"model": CNN, "device": "a100-sxm4-40gb", "num_devices": [1, 2, 8], "strategy": "fsdp", "scaling": "both"},
    ),
    "http-plan": (
        "POST", "/plan",
        {"models": [CNN, "mnist-cnn"], "devices": ["t4", "l4"], "batch_sizes": [64, 128], "dataset": "cifar10",
         "within": ["memory<=8GB"], "search": "compile", "price_usd_per_hour": 1.0, "num_points": 3, "max_rejected": 2},
    ),
    "http-wrong-device": ("POST", "/predict", {"model": CNN, "device": "t44"}),
    "http-wrong-setting": ("POST", "/predict", {"model": CNN, "device": "t4", "batch_sise": 64}),
    "http-configs": ("POST", "/configs", {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2}),
    "http-hardware": ("GET", "/hardware", {}),
    "http-models": ("GET", "/models", {}),
    "http-datasets": ("GET", "/datasets", {}),
}  # fmt: skip

TOOLS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "mcp-predict": ("predict", {"model": CNN, "device": "t4", "batch_size": 64, "dataset": "cifar10", "epochs": 2}),
    "mcp-predict-too-large": ("predict", {"model": "mnist-cnn", "device": "t4", "batch_size": 400_000}),
    "mcp-predict-wrong": ("predict", {"model": "torchvision:resnet5", "device": "t4"}),
    "mcp-scale": ("scale", {"model": CNN, "device": "v100-sxm2-16gb", "num_devices": [1, 4], "batch_size": 64}),
    "mcp-plan": (
        "plan",
        {"models": CNN, "devices": "t4,l4", "within": "time<=2h",
         "settings": {"dataset": "cifar10", "batch_sizes": [64], "price_usd_per_hour": 1.0}},
    ),
    "mcp-hardware": ("hardware", {"device": "h100-sxm"}),
}  # fmt: skip


def _request(method: str, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    from fastapi.testclient import TestClient

    from forerun.surface.web.app import make_app

    with TestClient(make_app(), base_url="http://localhost") as client:
        answer = client.request(method, path, json=dict(body) if method == "POST" else None)
    return {"status": answer.status_code, "answer": answer.json()}


def _call_tool(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import anyio
    import mcp

    from forerun.surface.web.agent import make_server

    async def conversation() -> Any:
        async with mcp.Client(make_server()) as client:
            return await client.call_tool(tool, arguments)

    found = anyio.run(conversation)
    if found.is_error:
        return {"error": found.content[0].text}
    assert json.loads(found.content[0].text) == found.structured_content
    return dict(found.structured_content)


def _tools() -> dict[str, Any]:
    """Names, descriptions and schemas of the tools."""
    import anyio
    import mcp

    from forerun.surface.web.agent import make_server

    async def conversation() -> Any:
        async with mcp.Client(make_server()) as client:
            return await client.list_tools()

    return {
        tool.name: {"description": tool.description, "input": tool.input_schema, "output": tool.output_schema}
        for tool in anyio.run(conversation).tools
    }


def _calibrated(records: str, device: str, out: str, question: str) -> dict[str, Any]:
    """A calibration from a file of measured steps, and the answer to a question that goes by it."""
    words = ["calibrate", "--from", records, "--device", device, "--out", out, "--json"]
    calibration = _json(words)
    del calibration["duration_s"]
    return {
        "calibration": calibration,
        "predicted": _json([*question.split(), "--calibration", out, "--json"]),
    }


def _json(words: list[str]) -> dict[str, Any]:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{words}: {done.stderr or done.exception}"
    return dict(json.loads(done.stdout))


def _written(name: str, words: list[str]) -> dict[str, Any]:
    """The answer of a command that writes a file, and the text of that file."""
    done = CliRunner().invoke(app, [*words, "--out", name])
    assert done.exit_code == 0, f"{words}: {done.stderr or done.exception}"
    return {"lines": Path(name).read_text(encoding="utf-8").splitlines()}


def _help(words: tuple[str, ...]) -> dict[str, Any]:
    """The help of a command and of those below it, line by line."""
    return {" ".join(each): _help_lines(each) for each in _below(words)}


def _below(words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    for name in _subcommands(words):
        yield from _below((*words, name))


def _subcommands(words: tuple[str, ...]) -> list[str]:
    command: Any = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return sorted(getattr(command, "commands", ()))


def _help_lines(words: tuple[str, ...]) -> list[str]:
    done = CliRunner().invoke(app, [*words, "--help"], terminal_width=HELP_WIDTH, color=False)
    assert done.exit_code == 0, f"{words}: {done.stderr or done.exception}"
    return [line.rstrip() for line in done.stdout.splitlines()]


CALLS: Mapping[str, Callable[[], dict[str, Any]]] = {
    **{name: functools.partial(_request, *request) for name, request in REQUESTS.items()},
    **{name: functools.partial(_call_tool, *call) for name, call in TOOLS.items()},
    "mcp-tools": _tools,
    "calibrate-layouts": functools.partial(
        _calibrated, "layout-steps.csv", "h100-sxm", "cluster.json",
        "predict gpt:depth=2,width=256,vocabulary=1000 --on 8xh100-sxm --parallel tp=2,dp=4 --strategy zero1"
        " --precision bf16 --sequence-length 256 --batch-size 4",
    ),
    "calibrate-steps": functools.partial(
        _calibrated, "device-steps.csv", "rtx-3090", "rtx-3090.safetensors",
        f"predict {CNN} --on rtx-3090 --batch-size 64 --optimizer adam",
    ),
    "report-markdown": functools.partial(_written, "report.md", ["report", "answers/plan-ranges.json"]),
    "help": lambda: {"lines": _help_lines(())},
    **{f"help-{name}": functools.partial(_help, (name,)) for name in _subcommands(())},
}  # fmt: skip
