"""Every setting of the steps that ``measure_model`` times, declared once for Python and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypedDict

from forerun.question.settings import Setting

__all__ = ["BatchSizes", "ImageSize", "Precisions", "StepOptions", "StepSettings"]

ImageSize = Annotated[int | None, Setting(help="Height and width of images [pixels].", group="model")]
BatchSizes = Annotated[
    Sequence[int] | None,
    Setting(help="Samples of one step.", group="run", default="32", metavar="32,64"),
]
Precisions = Annotated[
    Sequence[str] | None,
    Setting(
        help="Precisions, as in predict.",
        group="run",
        default="fp32",
        metavar="NAME,NAME",
        flag="precision",
    ),
]
"""Settings that other measurements share."""


class StepOptions(TypedDict, total=False):
    """Which steps of a model are measured."""

    batch_sizes: BatchSizes
    precisions: Precisions
    layouts: Annotated[
        Sequence[str] | None,
        Setting(
            help="Memory order of images: nchw, nhwc or both.",
            group="run",
            default="the framework's own",
            metavar="NAME,NAME",
            flag="layout",
        ),
    ]
    compiles: Annotated[
        Sequence[bool] | None,
        Setting(
            help="Without torch.compile (in Keras XLA), with it, or both.",
            group="run",
            default="no",
            metavar="no,yes",
            flag="compile",
        ),
    ]
    optimizer: Annotated[
        str | None,
        Setting(
            help="Optimizer, as in predict.",
            group="run",
            default="sgd, under parameter servers sgd-plain",
            metavar="NAME",
        ),
    ]
    phase: Annotated[
        str | None,
        Setting(
            help="Part of a step: train, forward or inference.", group="run", default="train", metavar="NAME"
        ),
    ]
    image_size: ImageSize
    input_shape: Annotated[
        Sequence[int] | None,
        Setting(help="Shape of one sample, without the batch.", group="model", metavar="3,224,224"),
    ]
    sequence_length: Annotated[int | None, Setting(help="Tokens of one sample.", group="model")]
    num_devices: Annotated[
        int | None,
        Setting(
            help="Devices that share the work, each with the batch size; processes on a processor.",
            group="sharing",
            default="1",
        ),
    ]
    strategy: Annotated[
        str | None,
        Setting(help="How several devices share it: ddp.", group="sharing", default="ddp", metavar="NAME"),
    ]
    framework: Annotated[
        str | None,
        Setting(
            help="Framework: pytorch or keras.",
            group="software",
            default="that of the model",
            metavar="NAME",
        ),
    ]
    num_servers: Annotated[
        int | None,
        Setting(
            help="With keras: servers of a ParameterServerStrategy, local processes.",
            group="sharing",
            default="0",
            flag="parameter-servers",
        ),
    ]
    num_workers: Annotated[
        int | None,
        Setting(
            help="Workers of the parameter servers, each with the batch size.",
            group="sharing",
            default="2",
            flag="workers",
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The steps of one question; names and meaning are those of ``StepOptions``."""

    batch_sizes: Sequence[int] = (32,)
    precisions: Sequence[str] = ("fp32",)
    layouts: Sequence[str] | None = None
    compiles: Sequence[bool] = (False,)
    optimizer: str | None = None
    phase: str = "train"
    image_size: int | None = None
    input_shape: Sequence[int] | None = None
    sequence_length: int | None = None
    num_devices: int = 1
    strategy: str = "ddp"
    framework: str | None = None
    num_servers: int = 0
    num_workers: int = 2
