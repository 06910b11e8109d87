"""Every word of a question about a run: types here, declarations on the fields that hold the settings.

Declared here are only the words that no field holds as they are given: devices, links and prices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar, get_type_hints

from forerun.question.job import InputPipeline, Job, JobOptions, LoaderOptions, Samples, SamplesOptions
from forerun.question.model import ModelOptions, ModelRequest
from forerun.question.saving import SavingOptions
from forerun.question.settings import Setting, declared, held_by
from forerun.question.setup import SetupOptions, Software, SoftwareOptions, TrainingSetup
from forerun.question.sharing import Sharing, SharingOptions

MODEL_HELP = (
    "Model: torchvision:NAME, timm:NAME, an architecture such as llama-3.1-8b, hf:ORG/NAME, hf:CONFIG.json, "
    "keras:NAME, keras:FILE.keras, onnx:FILE.onnx, a family such as cnn:depth=4,base_filters=64, "
    "path/to/file.py:factory, or capture:FILE of 'forerun capture'."
)
DEVICE_HELP = (
    "Device: catalogue name (see 'forerun hardware list'), driver's name, TOML file or 'here'; several devices as "
    "8xNAME or NODESxDEVICESxNAME, such as 4x8xh100-sxm."
)


_number = partial(Setting, group="device", low=1, high=100_000, http_high=4096)


class CommonOptions(
    ModelOptions,
    SetupOptions,
    SavingOptions,
    SharingOptions,
    JobOptions,
    SamplesOptions,
    LoaderOptions,
    SoftwareOptions,
    total=False,
):
    """Settings that every question about a run may have."""

    intra: Annotated[
        str | None,
        Setting(
            help="Link between the devices of a node: a name such as nvlink-3, or a TOML file.",
            group="device",
            default="the usual link of such boards",
            metavar="LINK",
        ),
    ]
    inter: Annotated[
        str | None,
        Setting(
            help="Link between nodes: a name such as ethernet-25g or 8xinfiniband-hdr, or a TOML file.",
            group="device",
            metavar="LINK",
        ),
    ]


class _SingleOptions(CommonOptions, total=False):
    """Settings that a run and a scaling curve share, and a plan has in the plural."""

    image_size: int | None
    batch_size: int | None
    precision: str | None
    layout: str | None
    num_nodes: Annotated[
        int | None,
        _number(
            help="Number of nodes (machines) that hold the devices.",
            words="the number of nodes",
            default="as --on says, or one",
            flag="nodes",
        ),
    ]
    price_usd_per_hour: Annotated[
        float | None,
        Setting(
            help="Price of one device [US dollars per hour].",
            words="price of a device [USD/h]",
            group="price",
            metavar="1.89/h",
            low=0,
            high=1e6,
            flag="price",
        ),
    ]


class RunOptions(_SingleOptions, total=False):
    """The settings of a run besides its model and device; a setting that is None or left out has its default."""

    num_devices: Annotated[
        int | None,
        _number(
            help="Number of devices, if the name of the device does not say it.",
            words="the number of devices",
            default="1",
        ),
    ]


class ScaleOptions(_SingleOptions, total=False):
    """The settings of a scaling curve: those of a run, with many numbers of devices."""

    num_devices: Annotated[
        Sequence[int] | None,
        _number(
            help="Numbers of devices: a list such as 1,2,4,8, or a range such as 1:8.",
            words="the number of devices",
            default="1,2,4 ... up to the devices of --on, or 8",
            metavar="1,2,4,8",
            flag="devices",
        ),
    ]
    scaling: Annotated[
        str | None,
        Setting(
            help="Batch size that stays fixed: that of one device (weak), that of all devices (strong), or both.",
            group="sharing",
            default="weak",
            metavar="NAME",
            choices=("weak", "strong", "both"),
        ),
    ]


class LayoutOptions(RunOptions, total=False):
    """The settings of a search for layouts: those of a run, and the samples of a step."""

    global_batch: Annotated[
        int | None,
        Setting(
            help="Samples of one step, over all devices together.",
            words="global batch",
            group="sharing",
            default="the batch size of a device times all devices",
            low=1,
            high=10_000_000,
            http_high=1_000_000,
        ),
    ]
    top: Annotated[
        int | None,
        Setting(help="Number of layouts to show.", group="output", default="5", low=1, high=1000),
    ]
    write: Annotated[
        str | None,
        Setting(
            help="Print the best layout for torchrun, fsdp, accelerate, deepspeed, torchtitan or megatron.",
            group="output",
            metavar="NAME",
            choices=("torchrun", "fsdp", "accelerate", "deepspeed", "torchtitan", "megatron"),
        ),
    ]


PARTS = (ModelRequest, TrainingSetup, Sharing, Job, Samples, InputPipeline, Software)
"""Parts of a run that hold its settings."""

held_by(*PARTS)

_COMMON = (
    "batch_size", "precision", "image_size", "sequence_length", "num_devices", "optimizer", "compile", "lora",
    "recompute", "dataset", "epochs", "price_usd_per_hour",
)  # fmt: skip
"""Settings that most questions name."""

_Call = TypeVar("_Call", bound=Callable[..., Any])


def with_common_settings(options: type) -> Callable[[_Call], _Call]:
    """Shows the settings that most questions name in the signature and docstring of a call that takes ``**options``.

    Type checkers read all settings from the typed dictionary; a notebook and ``help`` read what is shown here.

    >>> @with_common_settings(RunOptions)
    ... def ask(model: str, **options: object) -> None:
    ...     "Asks."
    >>> str(inspect.signature(ask).parameters["epochs"])
    'epochs: float | None = None'

    Args:
        options: The typed dictionary of the settings.
    """

    def show(call: _Call) -> _Call:
        *own, rest = inspect.signature(call).parameters.values()
        hints, known = get_type_hints(options), declared(options)
        common = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hints[name])
            for name in _COMMON
        ]
        vars(call)["__signature__"] = inspect.signature(call).replace(parameters=[*own, *common, rest])
        lines = "".join(f"{name}: {known[name].setting.help}\n        " for name in _COMMON)
        call.__doc__ = (call.__doc__ or "").replace("        options: ", f"        {lines}options: ")
        return call

    return show
