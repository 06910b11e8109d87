"""Options that the commands of ``forerun measure`` share, and the parsing of their lists."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from forerun.cli.options import AXIS_HELP, DEVICE_HERE_HELP, EPOCHS_HELP, SEED_HELP, SETTING_HELP
from forerun.errors import InvalidSetupError

__all__ = [
    "BatchSizesOption",
    "CompileOption",
    "CsvOption",
    "DatasetOption",
    "DeviceOption",
    "EpochsOption",
    "FrameworkOption",
    "ImageSizeOption",
    "LayoutsOption",
    "MaxSecondsOption",
    "OccasionOption",
    "OptimizerOption",
    "PrecisionOption",
    "PrecisionsOption",
    "RayOption",
    "RepetitionsOption",
    "SeedOption",
    "ThreadsOption",
    "TimeoutOption",
    "parse_flags",
    "parse_sizes",
    "parse_whole_numbers",
    "parse_words",
]

BatchSizesOption = Annotated[
    str, typer.Option(metavar="32,64", help="Batch sizes of one device, separated by commas.")
]
PrecisionOption = Annotated[str, typer.Option(metavar="NAME", help=SETTING_HELP["precision"])]
PrecisionsOption = Annotated[str, typer.Option(metavar="NAME,NAME", help=AXIS_HELP["precisions"])]
LayoutsOption = Annotated[
    str | None,
    typer.Option(metavar="NAME,NAME", help=AXIS_HELP["layouts"], show_default="the framework's own"),
]
CompileOption = Annotated[
    str,
    typer.Option(
        metavar="no,yes",
        help="Without torch.compile (no), with it (yes), or both (no,yes); in Keras it is XLA.",
    ),
]
ImageSizeOption = Annotated[int | None, typer.Option(help=SETTING_HELP["image_size"])]
OptimizerOption = Annotated[str, typer.Option(metavar="NAME", help=SETTING_HELP["optimizer"])]
DatasetOption = Annotated[
    str, typer.Option(metavar="NAME", help="Images to train on: cifar10, synthetic or digits.")
]
SeedOption = Annotated[int, typer.Option(help=SEED_HELP)]
DeviceOption = Annotated[str, typer.Option(metavar="cpu|cuda:N", help=DEVICE_HERE_HELP)]
OccasionOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Name of this series of measurements: the same name resumes it, a new one repeats it.",
    ),
]
EpochsOption = Annotated[int, typer.Option(help=EPOCHS_HELP)]
FrameworkOption = Annotated[
    str, typer.Option(metavar="NAME", help="Framework: pytorch, or keras (on TensorFlow).")
]
RepetitionsOption = Annotated[int, typer.Option(help="Timed repetitions of one step, at least 3.")]
MaxSecondsOption = Annotated[
    float,
    typer.Option("--max-seconds", help="Longest time of one job's warm-up, and of its repetitions [s]."),
]
TimeoutOption = Annotated[float, typer.Option("--timeout-s", help="Time after which a job is ended [s].")]
ThreadsOption = Annotated[
    int | None, typer.Option(help="Threads of the processor.", show_default="one per core")
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="auto|HOST:PORT", help="Ray cluster whose nodes run the jobs: auto or HOST:PORT."),
]
CsvOption = Annotated[
    Path | None, typer.Option(metavar="FILE.csv", help="Write the measurements as a table as well.")
]

_Choice = TypeVar("_Choice", bound=StrEnum)
_FLAGS = {"no": False, "yes": True}


def parse_whole_numbers(name: str, text: str) -> list[int]:
    """Whole numbers above zero, separated by commas.

    >>> parse_whole_numbers("batch sizes", "32,64")
    [32, 64]
    """
    try:
        values = [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise InvalidSetupError(f"{name} must be whole numbers above zero, such as 32,64, got '{text}'")
    return values


def parse_words(name: str, text: str, kind: type[_Choice]) -> list[_Choice]:
    """Members of a choice, written as words separated by commas."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    try:
        values = [kind(word) for word in words]
    except ValueError:
        values = []
    if not values:
        raise InvalidSetupError(f"unknown {name} '{text}'; expected {', '.join(kind)}")
    return values


def parse_flags(text: str) -> list[bool]:
    """The flags ``no`` and ``yes``, one or both, separated by commas."""
    words = [word.strip().lower() for word in text.split(",")]
    if any(word not in _FLAGS for word in words):
        raise InvalidSetupError(f"expected --compile no, yes or no,yes, got '{text}'")
    return [_FLAGS[word] for word in words]


def parse_sizes(texts: Iterable[str]) -> dict[str, list[int]]:
    """Values of each key, from texts such as ``depth=2,3``.

    >>> parse_sizes(["depth=2,3", "base_filters=8"])
    {'depth': [2, 3], 'base_filters': [8]}
    """
    sizes: dict[str, list[int]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        if not equals or not key.strip():
            raise InvalidSetupError(f"expected --sizes such as depth=2,3,4, got '{text}'")
        sizes[key.strip()] = parse_whole_numbers(f"the sizes of {key.strip()}", values)
    return sizes
