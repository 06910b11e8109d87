"""Options that the commands of ``forerun measure`` share, and the lists some of them take."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from forerun.errors import InvalidSetupError

__all__ = [
    "CsvOption",
    "DeviceOption",
    "EpochsOption",
    "FrameworkOption",
    "MaxSecondsOption",
    "OccasionOption",
    "RayOption",
    "RecordsOption",
    "RepetitionsOption",
    "ThreadsOption",
    "TimeoutOption",
    "parse_flags",
    "parse_sizes",
    "parse_whole_numbers",
    "parse_words",
]

DeviceOption = Annotated[
    str, typer.Option(metavar="cpu|cuda:N", help="Device of this machine to measure on.")
]
RecordsOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|URL", help="Where records go; FORERUN_RECORDS or a file of yours if not given."
    ),
]
OccasionOption = Annotated[
    str, typer.Option(metavar="NAME", help="Name of the session: the same one resumes, a new one repeats.")
]
EpochsOption = Annotated[int, typer.Option(help="Epochs of each training.")]
FrameworkOption = Annotated[str, typer.Option(metavar="NAME", help="pytorch, or keras on TensorFlow.")]
RepetitionsOption = Annotated[int, typer.Option(help="Timed repetitions of a step; at least 3.")]
MaxSecondsOption = Annotated[
    float, typer.Option("--max-seconds", help="Most time of warm-up, and of repetitions, of one job [s].")
]
TimeoutOption = Annotated[float, typer.Option("--timeout-s", help="A job that takes longer is ended [s].")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of a processor; all cores if not given.")]
RayOption = Annotated[
    str | None, typer.Option(metavar="auto|ADDRESS", help="Run the jobs on the nodes of a Ray cluster.")
]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write a table as well.")]

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
    """Words of a choice, separated by commas."""
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    try:
        values = [kind(word) for word in words]
    except ValueError:
        values = []
    if not values:
        raise InvalidSetupError(f"unknown {name} '{text}'; expected {', '.join(kind)}")
    return values


def parse_flags(text: str) -> list[bool]:
    """Any of ``no`` and ``yes``, separated by commas."""
    words = [word.strip().lower() for word in text.split(",")]
    if any(word not in _FLAGS for word in words):
        raise InvalidSetupError(f"expected --compile no, yes or no,yes, got '{text}'")
    return [_FLAGS[word] for word in words]


def parse_sizes(texts: Iterable[str]) -> dict[str, list[int]]:
    """Keys with their values.

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
