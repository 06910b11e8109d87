"""The questions as tools of the Model Context Protocol, for agents and editors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError
from mcp.types import ToolAnnotations
from pydantic import ValidationError

from forerun import __version__
from forerun.base.answers import plain
from forerun.base.errors import ForerunError, UsageError
from forerun.base.received import in_a_line
from forerun.prediction.models import kept_model_names, model_names
from forerun.question.devices import find_device, load_catalog
from forerun.question.model import flat_names
from forerun.question.options import LayoutOptions, RunOptions, ScaleOptions
from forerun.question.settings import declared
from forerun.search.advise import advise
from forerun.search.layouts import layouts
from forerun.search.options import PlanOptions
from forerun.search.plan import plan
from forerun.search.predict import predict
from forerun.search.scale import scale
from forerun.surface.web.questions import options_of, wrong_values
from forerun.surface.web.reach import Reach, joined, question

_INSTRUCTIONS = (
    "Predicts training runs before they are run. Models: torchvision:resnet50, timm:NAME, llama-3.1-8b, hf:FILE.json, "
    "capture:FILE. Devices: names of the tool hardware. Other settings are those of 'forerun predict', by "
    "their names in Python, in 'settings': optimizer, layout, compile, image_size, accumulation, num_devices. "
)
_RUNS_NO_CODE = "No code of a user is run: a model in FILE.py needs a server started with --allow-code DIR. "


class _OneLineServer(MCPServer[Any]):
    """A server that refuses a call in one line: the expectation, the value given, and the next step."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """The answer of a tool."""
        try:
            if (tool := _BY_NAME.get(name)) is not None:
                _refuse_unknown(tool, arguments)
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:
            kind = type(error.__cause__).__name__
            raise UnexpectedToolError(f"internal error in the tool {name}: {kind}; report it") from error
        except ToolError as error:
            cause = error.__cause__
            words = wrong_values(cause.errors(), ()) if isinstance(cause, ValidationError) else str(error)
            if tool is None:
                words += f"; the tools are {', '.join(_BY_NAME)}"
            elif isinstance(cause, ValidationError):
                example = (tool.__doc__ or "").partition("Example: ")[2].strip().rstrip(".")
                words += f"; call {name} as in {example}"
            raise ToolError(in_a_line(words)) from None


def _refuse_unknown(tool: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuses an argument that the tool lacks, which the library would leave out without a word."""
    known = [part.name for part in _named_parts(tool)]
    for name in arguments.keys() - set(known):
        place = "; other settings stand in 'settings'" if "settings" in known else ""
        raise ToolError(f"expected the arguments {', '.join(known)}, got {name[:60]!r}{place}")


def _named_parts(tool: Callable[..., Any]) -> list[inspect.Parameter]:
    parts = inspect.signature(tool, eval_str=True).parameters.values()
    return [part for part in parts if part.kind is not part.VAR_KEYWORD]


def make_server(code: Path | None = None) -> MCPServer[Any]:
    """The server with its tools.

    Args:
        code: Folder whose code is run to build models; None runs none.
    """
    runs = f"Models may be {code}/FILE.py:factory, whose code is run here. " if code else _RUNS_NO_CODE
    server = _OneLineServer("forerun", instructions=_INSTRUCTIONS + runs, version=__version__)
    reach = Reach(files=Path.cwd(), code=code)
    for name, tool in _BY_NAME.items():
        options = _TOOLS[tool]
        # Code that builds a model can do anything to this machine: a tool that runs it is not read-only.
        reads_only = code is None or options is None
        server.tool(
            name=name,
            description=(tool.__doc__ or "") + ("" if options is None else f" {runs}"),
            annotations=ToolAnnotations(read_only_hint=reads_only, open_world_hint=False),
        )(_told(tool, reach, options))
    return server


def _told(tool: Callable[..., Any], reach: Reach, options: type | None) -> Callable[..., Any]:
    """A tool that checks its question first, and tells the agent what was wrong with it, and the next step."""
    known = {} if options is None else declared(options)

    @functools.wraps(tool)
    def told(**arguments: Any) -> Any:
        try:
            given = joined(arguments, arguments.pop("settings", None))
            reach.check(given, known)
            return tool(**given)
        except ForerunError as error:
            raise ToolError(str(error)) from error
        except TypeError as error:  # a value of another type than the setting has
            strange = [
                f"{name} = {value}" for name, value in given.items() if isinstance(value, Mapping | list)
            ]
            raise ToolError(
                f"expected settings as in 'forerun predict', got {(strange or [str(error)])[-1]}; see the examples"
            ) from error

    signature = inspect.signature(tool, eval_str=True)
    vars(told)["__signature__"] = signature.replace(parameters=_named_parts(tool))
    return told


def _predict(
    model: str,
    device: str,
    batch_size: int | None = None,
    precision: str | None = None,
    dataset: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """Time, memory, cost and energy of training a model on a device, each with a 90 % interval.

    Example: {"model": "llama-3.1-8b", "device": "rtx-4090", "settings": {"lora": 16, "quantize": "nf4"}}.
    """
    given: dict[str, Any] = {
        "batch_size": batch_size,
        "precision": precision,
        "dataset": dataset,
        "dataset_size": dataset_size,
        "epochs": epochs,
    }
    return predict(model, device=device, **given, **asked).as_dict()


def _plan(
    models: str,
    devices: str,
    within: str = "",
    minimize: str = "time",
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """The best device, batch size and precision within limits such as 'time<=2h, cost<=20, memory<=24GB'.

    Example: {"models": "torchvision:resnet50", "devices": "t4,l4", "settings": {"dataset": "imagenet", "epochs": 20}}.
    """
    asked = {"max_rejected": 20, **asked}
    found = plan(models, devices=devices, within=within, minimize=minimize, **asked).as_dict()
    found.pop("candidates", None)  # rows for plots
    return found


def _scale(
    model: str,
    device: str,
    num_devices: list[int],
    batch_size: int | None = None,
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """Throughput and efficiency of training on more and more devices.

    Example: {"model": "torchvision:resnet50", "device": "v100-sxm2-16gb", "num_devices": [1, 2, 4, 8]}.
    """
    return scale(model, device=device, num_devices=num_devices, batch_size=batch_size, **asked).as_dict()


def _layouts(model: str, device: str, settings: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    """The best ways to divide a model among many devices: tensor, pipeline, context and data parallelism.

    Example: {"model": "llama-3.1-70b", "device": "4x8xh100-sxm", "settings": {"sequence_length": 8192}}.
    """
    return layouts(model, device=device, **asked).as_dict()


def _advise(model: str, device: str, settings: dict[str, Any] | None = None, **asked: Any) -> dict[str, Any]:
    """The three changes that help a run most, each predicted.

    Example: {"model": "torchvision:resnet50", "device": "a100-sxm4-40gb", "settings": {"batch_size": 64}}.
    """
    return advise(model, device=device, **asked).as_dict()


def _diagnose(
    model: str | None = None,
    device: str | None = None,
    measured: str | None = None,
    trace: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """A measured step, or traces of PyTorch's profiler, beside the prediction, and what makes the step slow.

    Example: {"model": "torchvision:resnet50", "device": "t4", "measured": "1.2 s", "settings": {"batch_size": 64}}.
    """
    others = sorted(asked.keys() - {"gpu_utilization", *declared(RunOptions)})
    if others:  # a command among them would be run
        raise UsageError(
            f"expected settings as in 'forerun predict', got '{others[0]}'; no command is run here"
        )
    found = question("diagnose")(model, device=device, measured=measured, trace=trace, **asked)
    return dict(found.as_dict())


def _forecast(
    run: str | list[float],
    target: str | None = None,
    schedule: str | None = None,
    epochs: float | None = None,
    history: list[str] | None = None,
    settings: dict[str, Any] | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """The end of a training run from its first epochs, and when it reaches a target.

    ``run`` is a CSV in the working folder, or the values of the metric, one an epoch; settings such as ``metric``,
    ``model`` and ``devices`` are those of ``forerun.forecast``.

    Example: {"run": [0.31, 0.42, 0.5, 0.55, 0.58, 0.61], "target": "accuracy>=0.7", "epochs": 30}.
    """
    given = {"target": target, "schedule": schedule, "epochs": epochs, "history": history or ()}
    return dict(question("forecast")(run, **given, **asked).as_dict())


def _schedule(
    jobs: list[dict[str, Any]],
    cluster: str,
    policies: list[str] | None = None,
    fair: float | None = None,
    intra: str | None = None,
    inter: str | None = None,
) -> dict[str, Any]:
    """The devices of each job now, the time when it is done, and a comparison of policies.

    Rows of jobs are those of a jobs file (docs/files.md); jobs of a model on several nodes need ``inter``, their link.

    Example: {"cluster": "2x4xt4", "jobs": [{"name": "a", "points": "1:100 2:190", "batch_size": 64, "steps": 9000}]}.
    """
    chosen = {} if policies is None else {"policies": policies}
    asked = {"cluster": cluster, "fair": fair, "intra": intra, "inter": inter, **chosen}
    return dict(question("schedule")(jobs, **asked).as_dict())


def _compare(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The differences of two runs and their reasons: time by kind of work, memory by part, money.

    Example: {"first": {"model": "cnn", "device": "t4"}, "second": {"model": "cnn", "device": "l4"}}.
    """
    return predict(**first).compare(predict(**second)).as_dict()


def _hardware(device: str | None = None) -> dict[str, Any]:
    """The devices of the catalogue, or the one of a name. Example: {"device": "h100-sxm"}."""
    found = load_catalog().values() if device is None else [find_device(device)]
    return {"devices": [{name: plain(getattr(each, name)) for name in _OF_DEVICE} for each in found]}


_OF_DEVICE = ("name", "title", "vendor", "kind", "memory_bytes", "memory_bandwidth_bytes_per_s")


def _models(word: str = "") -> dict[str, list[str]]:
    """The models that are known by name, or those with a word in it. Example: {"word": "resnet"}."""
    known = dict.fromkeys(flat_names(kept_model_names() or model_names()))
    return {"models": [name for name in known if word.lower() in name.lower()][:200]}


_TOOLS: Mapping[Callable[..., Any], type | None] = {
    _predict: RunOptions,
    _plan: PlanOptions,
    _scale: ScaleOptions,
    _layouts: LayoutOptions,
    _advise: RunOptions,
    _diagnose: RunOptions,
    _forecast: options_of("forecast", "run"),
    _schedule: RunOptions,
    _compare: RunOptions,
    _hardware: None,
    _models: None,
}
"""The tools, with the settings of those that trace a model."""
_BY_NAME = {tool.__name__.removeprefix("_"): tool for tool in _TOOLS}
