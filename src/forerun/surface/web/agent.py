"""The questions as tools of the Model Context Protocol, for agents and editors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import BaseModel

from forerun import __version__
from forerun.base.errors import ForerunError
from forerun.prediction.estimate import Estimate, Interval
from forerun.question.devices import find_device, load_catalog
from forerun.search.advise import ways_to_fit
from forerun.search.plan import plan
from forerun.search.predict import predict
from forerun.search.scale import scale

__all__ = ["Quantity", "make_server"]

_INSTRUCTIONS = (
    "Predicts training runs before they are run. Models: torchvision:resnet50, timm:NAME, llama-3.1-8b, hf:FILE.json, "
    "path/to/file.py:factory. Devices: names of the tool hardware. Other settings are those of 'forerun predict', by "
    "their names in Python, in 'settings': optimizer, layout, compile, image_size, accumulation, num_devices."
)


class Quantity(BaseModel):
    """A value with the ends of its 90 % interval."""

    value: float
    low: float
    high: float


class WayToFit(BaseModel):
    """A change that makes a run fit."""

    words: str
    change: dict[str, Any]
    peak_memory_bytes: float


class Prediction(BaseModel):
    """Answer of the tool predict; a quantity that was not asked for or is not known is null."""

    model: str
    device: str
    fits: str | None
    step_time_s: Quantity
    throughput_samples_per_s: Quantity
    epoch_time_s: Quantity | None
    job_time_s: Quantity | None
    peak_memory_bytes: Quantity | None
    max_batch_size: Quantity | None
    cost_usd: Quantity | None
    energy_j: Quantity | None
    bound_by: str
    provenance: str
    notes: list[str]
    ways_to_fit: list[WayToFit]


class DeviceRow(BaseModel):
    """A device of the catalogue."""

    name: str
    title: str
    vendor: str
    kind: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: float


class DeviceList(BaseModel):
    """Devices of the catalogue."""

    devices: list[DeviceRow]


def make_server() -> MCPServer[Any]:
    """The server with its four tools; they read nothing but named files and change nothing."""
    server: MCPServer[Any] = MCPServer("forerun", instructions=_INSTRUCTIONS, version=__version__)
    reading = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (_predict, _plan, _scale, _hardware):
        server.tool(name=tool.__name__.removeprefix("_"), annotations=reading)(_told(tool))
    return server


def _told(tool: Callable[..., Any]) -> Callable[..., Any]:
    """A tool that tells the agent what was wrong with its question, and the next step."""

    @functools.wraps(tool)
    def told(*arguments: Any, **settings: Any) -> Any:
        try:
            return tool(*arguments, **settings)
        except ForerunError as error:
            raise ToolError(str(error)) from error

    return told


def _quantity(interval: Interval | None) -> Quantity | None:
    return None if interval is None else Quantity(value=interval.value, low=interval.low, high=interval.high)


def _predict(
    model: str,
    device: str,
    batch_size: int | None = None,
    precision: str | None = None,
    dataset: str | None = None,
    dataset_size: int | None = None,
    epochs: float | None = None,
    settings: dict[str, Any] | None = None,
) -> Prediction:
    """Time, memory, cost and energy of training a model on a device, each with a 90 % interval."""
    asked: dict[str, Any] = {
        "batch_size": batch_size,
        "precision": precision,
        "dataset": dataset,
        "dataset_size": dataset_size,
        "epochs": epochs,
        **(settings or {}),
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    estimate: Estimate = predict(model, device=device, **asked)
    quantities = (
        "step_time_s",
        "throughput_samples_per_s",
        "epoch_time_s",
        "job_time_s",
        "peak_memory_bytes",
        "max_batch_size",
        "cost_usd",
        "energy_j",
    )
    answer: dict[str, Any] = {name: _quantity(getattr(estimate, name)) for name in quantities}
    ways = [
        WayToFit(words=way.words, change=dict(way.change), peak_memory_bytes=way.peak_memory_bytes)
        for way in ways_to_fit(estimate)
    ]
    return Prediction(
        **answer,
        model=estimate.model,
        device=estimate.device,
        fits=estimate.fits,
        bound_by=estimate.bound_by,
        provenance=str(estimate.provenance),
        notes=list(estimate.notes),
        ways_to_fit=ways,
    )


def _plan(
    models: str,
    devices: str,
    within: str = "",
    minimize: str = "time",
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The best device, batch size and precision within limits such as 'time<=2h, cost<=20, memory<=24GB'."""
    asked: dict[str, Any] = {"within": within, "minimize": minimize, "max_rejected": 20, **(settings or {})}
    found = plan(models, devices=devices, **asked).as_dict()
    found.pop("candidates", None)  # rows for plots
    return found


def _scale(
    model: str,
    device: str,
    num_devices: list[int],
    batch_size: int | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Throughput and efficiency of training on more and more devices."""
    asked: dict[str, Any] = {} if batch_size is None else {"batch_size": batch_size}
    return scale(model, device=device, num_devices=num_devices, **asked, **(settings or {})).as_dict()


def _hardware(device: str | None = None) -> DeviceList:
    """The devices of the catalogue, or the one of a name."""
    found = load_catalog().values() if device is None else [find_device(device)]
    return DeviceList(
        devices=[
            DeviceRow(**{name: getattr(each, name) for name in DeviceRow.model_fields}) for each in found
        ]
    )
