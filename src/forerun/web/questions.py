"""What may be asked over HTTP: strict types, bounds, and no names that reach into this machine's files."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from forerun.errors import UsageError

__all__ = [
    "MAX_HTTP_CANDIDATES",
    "PlanBody",
    "PredictBody",
    "ScaleBody",
    "check_device_name",
    "check_link_name",
    "check_model_name",
]

MAX_HTTP_CANDIDATES = 20_000

_MODEL = re.compile(r"(?:torchvision|timm):[A-Za-z0-9_.]+|[a-z][a-z0-9-]*(?::[a-z0-9_=,.|]*)?")
_DEVICE = re.compile(r"[A-Za-z0-9 ()_.+*×-]+")
_LINK = re.compile(r"[A-Za-z0-9 ().-]+")
_FAMILY_NUMBER = re.compile(r"\d+")
_LARGEST_FAMILY_NUMBER = 4096
_LARGEST_DEPTH = 512

Precision = Literal["fp32", "tf32", "amp", "amp-bf16", "bf16", "fp16"]
Layout = Literal["nchw", "nhwc"]
BatchSize = Annotated[int, Field(ge=1, le=65_536)]
ImageSize = Annotated[int, Field(ge=1, le=1024)]
Name = Annotated[str, Field(min_length=1, max_length=200)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
NumDevices = Annotated[int, Field(ge=1, le=4096)]
Strategy = Literal["ddp", "zero1", "zero2", "fsdp", "mirrored"]


def check_model_name(model: str) -> str:
    """A model's name, if it names a model of a library or a family and no file.

    Raises:
        UsageError: It names a file or code, or is no name at all.
    """
    text = model.strip()
    if text.startswith(("hf:", "onnx:", "keras:")) or ".py" in text or "/" in text or "\\" in text:
        raise UsageError(
            f"'{text}' names a file: over HTTP only families, torchvision: and timm: models are answered; "
            "use the command line for files and code of your own"
        )
    if not _MODEL.fullmatch(text):
        raise UsageError(
            f"expected a family such as cnn:depth=4, torchvision:NAME or timm:NAME, got '{text}'; see /models"
        )
    if not text.startswith(("torchvision:", "timm:")):
        _check_family_size(text)
    return text


def _check_family_size(text: str) -> None:
    # A network of thousands of layers would keep the tracer busy for minutes.
    numbers = [int(number) for number in _FAMILY_NUMBER.findall(text.partition(":")[2])]
    largest = _LARGEST_DEPTH if text.startswith("cifar-resnet:") else _LARGEST_FAMILY_NUMBER
    if any(number > largest for number in numbers):
        raise UsageError(
            f"sizes above {largest} are not answered over HTTP, got '{text}'; use the command line"
        )


def check_device_name(device: str) -> str:
    """A device's name, if it can only be one of the catalogue.

    Raises:
        UsageError: It names a file or this machine.
    """
    text = device.strip()
    if text.lower().endswith(".toml") or not _DEVICE.fullmatch(text):
        raise UsageError(f"expected a device of the catalogue, got '{text}'; see /hardware")
    if text.lower() == "here":
        raise UsageError("'here' is not answered over HTTP; name the device, see /hardware")
    return text


def check_link_name(link: str | None) -> str | None:
    """A link's name, if it can only be one of the catalogue.

    Raises:
        UsageError: It names a file.
    """
    if link is None:
        return None
    text = link.strip()
    if text.lower().endswith(".toml") or not _LINK.fullmatch(text):
        raise UsageError(f"expected a link of the catalogue such as infiniband-hdr, got '{text}'")
    return text


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _whole_floats(cls, value: Any) -> Any:
        # JSON knows one kind of number: a slider may send 32.0 for 32.
        return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


class _RunBody(_Body):
    """What a question about one run says, whatever is asked of it."""

    model: Name = Field(examples=["torchvision:resnet50"])
    device: Name = Field(examples=["a100-sxm4-40gb"])
    batch_size: BatchSize = 32
    precision: Precision = "fp32"
    layout: Layout | None = None
    compile: bool = False
    optimizer: Annotated[str, Field(max_length=20)] = "sgd"
    image_size: ImageSize | None = None
    sequence_length: Annotated[int, Field(ge=1, le=8192)] | None = None
    dataset: Annotated[str, Field(max_length=40)] | None = None
    dataset_size: Annotated[int, Field(ge=1, le=10**12)] | None = None
    epochs: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    price_usd_per_hour: Price | None = None
    num_nodes: NumDevices | None = None
    strategy: Strategy = "ddp"
    intra: Name | None = None
    inter: Name | None = None

    def arguments(self) -> dict[str, Any]:
        """Arguments of the package's function.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries.
        """
        found = self.model_dump(by_alias=True)
        found["model"] = check_model_name(self.model)
        found["device"] = check_device_name(self.device)
        found["intra"] = check_link_name(self.intra)
        found["inter"] = check_link_name(self.inter)
        return found


class PredictBody(_RunBody):
    """A question as ``forerun predict`` takes it; names are those of ``forerun.predict``."""

    num_devices: NumDevices | None = None
    phase: Literal["train", "forward", "inference"] = "train"
    validation_size: Annotated[int, Field(ge=0, le=10**12)] | None = None
    validate_: bool = Field(default=False, alias="validate")
    startup_s: Seconds = 0.0
    checkpoint_s: Seconds = 0.0


class ScaleBody(_RunBody):
    """A question as ``forerun scale`` takes it for devices; names are those of ``forerun.scale``."""

    num_devices: Annotated[list[NumDevices], Field(min_length=1, max_length=64)] = [1, 2, 4, 8]
    scaling: Literal["weak", "strong", "both"] = "weak"
    algorithm: Literal["auto", "ring", "tree", "hierarchical"] = "auto"
    bucket_mb: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)] = 25.0
    num_accumulation_steps: Annotated[int, Field(ge=1, le=10_000)] = 1
    sync_batch_norm: bool = False
    coefficient_of_variation: Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)] | None = None


class PlanBody(_Body):
    """A question as ``forerun plan`` takes it; names are those of ``forerun.plan``."""

    models: Annotated[list[Name], Field(min_length=1, max_length=16)] = Field(examples=[["cnn:depth=2..4"]])
    devices: Annotated[list[Name], Field(min_length=1, max_length=24)] = Field(examples=[["t4", "l4"]])
    batch_sizes: Annotated[list[BatchSize], Field(min_length=1, max_length=1024)] = [32, 64, 128]
    precisions: Annotated[list[Precision], Field(min_length=1, max_length=6)] = ["fp32", "amp"]
    layouts: Annotated[list[Layout], Field(min_length=1, max_length=2)] | None = None
    image_sizes: Annotated[list[ImageSize], Field(max_length=8)] = []
    within: Annotated[list[Annotated[str, Field(max_length=80)]], Field(max_length=12)] = []
    minimize: Literal["time", "cost", "energy", "co2"] = "time"
    optimizer: Annotated[str, Field(max_length=20)] = "sgd"
    dataset: Annotated[str, Field(max_length=40)] | None = None
    dataset_size: Annotated[int, Field(ge=1, le=10**12)] | None = None
    epochs: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    validation_size: Annotated[int, Field(ge=0, le=10**12)] = 0
    price_usd_per_hour: Price | dict[Name, Price] | None = None
    price_kinds: Annotated[
        list[Literal["on-demand", "spot", "reserved-1y", "reserved-3y"]], Field(min_length=1, max_length=4)
    ] = ["on-demand"]
    providers: Annotated[list[Annotated[str, Field(max_length=20)]], Field(max_length=10)] = []
    co2_g_per_kwh: Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)] | None = None
    power_limit_w: Annotated[float, Field(gt=0, le=1e4, allow_inf_nan=False)] | None = None
    num_points: Annotated[int, Field(ge=1, le=50)] = 12
    max_rejected: Annotated[int, Field(ge=0, le=1000)] = 50
    exact: bool = Field(
        default=True,
        description="Whether listed candidates are evaluated once more as predict does; without, an answer takes "
        "a tenth of the time, and memory is within some per cent.",
    )

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``forerun.plan``.

        Raises:
            UsageError: A name reaches beyond the catalogue and the libraries, or there are too many candidates.
        """
        from forerun.planner.space import expand_models

        found = self.model_dump()
        models = expand_models(";".join(check_model_name(model) for model in self.models))
        found["devices"] = [check_device_name(device) for device in self.devices]
        configurations = (
            len(models) * len(self.precisions) * len(self.layouts or [None]) * max(1, len(self.image_sizes))
        )
        if configurations > 64:
            raise UsageError(
                f"at most 64 combinations of model, precision, layout and image size are answered over HTTP, got "
                f"{configurations}"
            )
        count = configurations * len(self.devices) * len(self.batch_sizes)
        if count > MAX_HTTP_CANDIDATES:
            raise UsageError(
                f"at most {MAX_HTTP_CANDIDATES:,} candidates are answered over HTTP, got {count:,}"
            )
        found["models"] = models
        return found
