"""Options that the commands of ``forerun measure`` share, and the parsing of their lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, TypedDict, TypeVar

import typer

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.step_options import BatchSizes, ImageSize, Precisions, StepOptions
from forerun.question.settings import Setting

__all__ = [
    "CompositionOptions",
    "CsvOption",
    "CurveOptions",
    "FrameworkOption",
    "GridOptions",
    "LayerOptions",
    "ModelOptions",
    "SessionOptions",
    "ThreadsOption",
    "parse_counts",
    "parse_flags",
    "parse_sizes",
    "parse_whole_numbers",
    "parse_words",
    "session_of",
    "timing_of",
]

FrameworkOption = Annotated[str, typer.Option(metavar="NAME", help="pytorch, or keras on TensorFlow.")]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of a processor; all cores if not given.")]
CsvOption = Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write a table as well.")]


_Framework = Annotated[
    str | None,
    Setting(
        help="Framework: pytorch, or keras on TensorFlow.",
        group="software",
        default="pytorch",
        metavar="NAME",
    ),
]
_Precision = Annotated[
    str | None, Setting(help="Precision, as in predict.", group="run", default="fp32", metavar="NAME")
]


class SessionOptions(TypedDict, total=False):
    """Where a session measures, where its records go, and how steps are timed."""

    device: Annotated[
        str | None,
        Setting(
            help="Device of this machine to measure on.", group="device", default="cpu", metavar="cpu|cuda:N"
        ),
    ]
    records: Annotated[
        str | None,
        Setting(
            help="Where records go.",
            group="output",
            default="FORERUN_RECORDS, or a file of yours",
            metavar="FILE|URL",
        ),
    ]
    occasion: Annotated[
        str | None,
        Setting(
            help="Name of the session: the same one resumes, a new one repeats.",
            group="output",
            metavar="NAME",
        ),
    ]
    num_repetitions: Annotated[
        int | None,
        Setting(
            help="Timed repetitions of a step; at least 3.",
            group="timing",
            default="20; of layers 50, of compositions 30",
            flag="repetitions",
        ),
    ]
    max_seconds: Annotated[
        float | None,
        Setting(
            help="Most time of warm-up, and of repetitions, of one job [s].",
            group="timing",
            default="30; of layers and compositions 5",
        ),
    ]
    timeout_s: Annotated[
        float | None,
        Setting(
            help="A job that takes longer is ended [s].",
            group="timing",
            default="900; of grids 3600, of layers and links 300",
        ),
    ]
    num_threads: Annotated[
        int | None,
        Setting(help="Threads of a processor.", group="timing", default="one for each core", flag="threads"),
    ]


class _RayOptions(SessionOptions, total=False):
    ray: Annotated[
        str | None,
        Setting(help="Run the jobs on the nodes of a Ray cluster.", group="device", metavar="auto|ADDRESS"),
    ]


class GridOptions(_RayOptions, total=False):
    """Settings of the trainings of a grid."""

    network: Annotated[
        str | None,
        Setting(
            help="Family of networks: cnn, cifar-resnet, mnist-cnn ...",
            group="model",
            default="cnn",
            metavar="FAMILY",
        ),
    ]
    batch_sizes: Annotated[
        Sequence[int] | None,
        Setting(help="Images of one step.", group="run", default="32,64,128", metavar="32,64"),
    ]
    precisions: Precisions
    layouts: Annotated[
        Sequence[str] | None,
        Setting(
            help="Memory order of images: nchw, nhwc or both.",
            group="run",
            default="nchw, and nhwc for keras",
            metavar="NAME,NAME",
            flag="layout",
        ),
    ]
    compiles: Annotated[
        Sequence[bool] | None,
        Setting(
            help="Without torch.compile, with it, or both.",
            group="run",
            default="no",
            metavar="no,yes",
            flag="compile",
        ),
    ]
    image_size: Annotated[
        int | None, Setting(help="Height and width of the images [pixels].", group="model", default="32")
    ]
    optimizer: Annotated[
        str | None,
        Setting(help="Optimizer, as in predict.", group="run", default="adam", metavar="NAME"),
    ]
    dataset: Annotated[
        str | None,
        Setting(
            help="Images: cifar10, mnist (28 pixels), pcam (96), synthetic or digits.",
            group="job",
            default="cifar10",
            metavar="NAME",
        ),
    ]
    num_epochs: Annotated[
        int | None, Setting(help="Epochs of each training.", group="job", default="3", flag="epochs")
    ]
    num_steps: Annotated[
        int | None,
        Setting(
            help="Cut each epoch to so many steps and extrapolate to the whole.", group="job", flag="steps"
        ),
    ]
    num_workers: Annotated[
        int | None,
        Setting(help="Processes that prepare batches.", group="input", default="0", flag="loader-workers"),
    ]
    seed: Annotated[
        int | None,
        Setting(help="Seed of weights, order and synthetic images.", group="job", default="0", low=0),
    ]
    framework: _Framework
    num_replicas: Annotated[
        int | None,
        Setting(
            help="With keras: replicas of a MirroredStrategy, each with a batch of its own.",
            group="sharing",
            default="1",
            flag="replicas",
        ),
    ]


class LayerOptions(_RayOptions, total=False):
    """Which layers are measured alone."""

    kinds: Annotated[
        Sequence[str] | None,
        Setting(
            help="Kinds of layers: conv2d, dense, batch_norm ...",
            group="main",
            default="all",
            metavar="NAME,NAME",
        ),
    ]
    num_layers: Annotated[
        int | None, Setting(help="Layers of all kinds together.", group="main", default="1100")
    ]
    ranges: Annotated[
        str | None,
        Setting(
            help="Ranges of sizes: justus (the published ones), wide, or networks (as in image networks).",
            group="main",
            default="wide",
            metavar="NAME",
        ),
    ]
    modes: Annotated[
        Sequence[str] | None,
        Setting(
            help="What is timed: forward, train_step or both.",
            group="main",
            default="forward,train_step",
            metavar="NAME,NAME",
            flag="mode",
        ),
    ]
    precision: _Precision
    layout: Annotated[
        str | None,
        Setting(
            help="Memory order of images: nchw or nhwc.",
            group="run",
            default="nchw, and nhwc for keras",
            metavar="NAME",
        ),
    ]
    framework: _Framework
    max_gflop: Annotated[
        float | None, Setting(help="Most work of one step [10^9 FLOP].", group="limits", default="4")
    ]
    max_mb: Annotated[
        float | None, Setting(help="Most memory of one step [10^6 bytes].", group="limits", default="200")
    ]
    seed: Annotated[
        int | None, Setting(help="Another seed measures other layers.", group="main", default="0", low=0)
    ]


class ModelOptions(_RayOptions, StepOptions, total=False):
    """Which steps of a model are measured, and where."""


class CompositionOptions(SessionOptions, total=False):
    """Which networks are measured beside their layers."""

    batch_sizes: BatchSizes
    image_size: ImageSize
    optimizer: Annotated[
        str | None,
        Setting(help="Optimizer, as in predict.", group="run", default="adam", metavar="NAME"),
    ]
    precision: _Precision


class CurveOptions(TypedDict, total=False):
    """Settings of a training for its curve on the command line."""

    dataset: Annotated[
        str | None,
        Setting(
            help="Images: cifar10 (downloaded through torchvision, shifted by up to four pixels and mirrored in "
            "training), mnist and pcam (PatchCamelyon; both downloaded too), digits (scikit-learn's 1,797 scans, "
            "resized) or synthetic.",
            group="job",
            default="cifar10",
            metavar="NAME",
        ),
    ]
    num_images: Annotated[
        int | None,
        Setting(
            help="The first so many training images only; a fifth as many, 256 or more, are held out.",
            group="job",
        ),
    ]
    image_size: Annotated[
        int | None,
        Setting(
            help="Height and width of the images [pixels].",
            group="model",
            default="those of the dataset, 32 for digits and synthetic",
        ),
    ]
    num_epochs: Annotated[
        int | None, Setting(help="Epochs at most.", group="job", default="30", flag="epochs")
    ]
    batch_size: Annotated[int | None, Setting(help="Images of one step.", group="run", default="128")]
    learning_rate: Annotated[float | None, Setting(help="Highest learning rate.", group="run", default="0.1")]
    schedule: Annotated[
        str | None,
        Setting(
            help="Learning rate from first to last epoch, as in forecast.",
            group="run",
            default="a cosine over all epochs",
            metavar="WORDS",
        ),
    ]
    optimizer: Annotated[
        str | None,
        Setting(
            help="sgd (momentum 0.9, weight decay 5e-4) or adam.", group="run", default="sgd", metavar="NAME"
        ),
    ]
    seed: Annotated[
        int | None, Setting(help="Seed of weights, order and images.", group="run", default="0", low=0)
    ]
    device: Annotated[
        str | None,
        Setting(help="Device: cpu or cuda:N.", group="device", default="cpu", metavar="DEVICE"),
    ]
    target: Annotated[
        str | None,
        Setting(help="End the run when it is reached.", group="target", metavar="METRIC>=VALUE"),
    ]
    steps_out: Annotated[
        Path | None,
        Setting(
            help="A row per step as well: epoch, step, loss and acc, as forecast law reads them.",
            group="output",
            metavar="FILE.csv",
        ),
    ]
    with_gradient_noise: Annotated[
        bool | None,
        Setting(
            help="Do each step in two halves and print the gradient noise scale, the batch size that is still "
            "worth its steps.",
            group="main",
            flag="gradient-noise",
        ),
    ]


_WHERE = ("device", "records", "occasion", "ray")
_TIMING = ("num_repetitions", "max_seconds", "timeout_s", "num_threads")


def session_of(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes out of the settings where a session measures and where its records go."""
    return {name: settings.pop(name) for name in _WHERE if name in settings}


def timing_of(settings: dict[str, Any], **usual: float) -> dict[str, Any]:
    """Takes out of the settings how steps are timed; ``usual`` where they do not say."""
    return {**usual, **{name: settings.pop(name) for name in _TIMING if name in settings}}


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


def parse_counts(text: str) -> list[int]:
    """Whole numbers from zero on, separated by commas; none of an empty text.

    >>> parse_counts("0,1,2")
    [0, 1, 2]
    """
    try:
        return [int(word) for word in text.split(",") if word.strip()]
    except ValueError:
        raise InvalidSetupError(
            f"workers must be whole numbers separated by commas, such as 0,1,2, got '{text}'"
        ) from None
