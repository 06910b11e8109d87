"""Settings of whatever is measured: each stands once, on the field that holds it, for Python and the command line.

The help of a command reads this module, so nothing here loads NumPy or a framework.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from forerun.base.errors import InvalidSetupError, near_matches
from forerun.evidence.measurement.jobs import Protocol
from forerun.evidence.measurement.layer_figures import LAYER_KINDS
from forerun.question.settings import setting
from forerun.question.setup import Layout, Precision

_OPTIMIZER = {"help": "Optimizer, as in predict.", "group": "run", "metavar": "NAME"}
_PRECISION = {"help": "Precision, as in predict.", "group": "run", "metavar": "NAME"}
_PRECISIONS = {
    "help": "Precisions, as in predict.",
    "group": "run",
    "default": "fp32",
    "metavar": "NAME,NAME",
    "flag": "precision",
}
_CONVOLUTIONS = {
    "help": "Arithmetic of convolutions in fp32: fp32 or tf32.",
    "group": "run",
    "default": "that of the precision",
    "metavar": "NAME",
}
_LAYOUTS = {
    "help": "Memory order of images: nchw, nhwc or both.",
    "group": "run",
    "metavar": "NAME,NAME",
    "flag": "layout",
}
_COMPILES = {"group": "run", "default": "no", "metavar": "no,yes", "flag": "compile"}
_BATCH_SIZES = {"help": "Samples of one step.", "group": "run", "default": "32", "metavar": "32,64"}
_IMAGE_SIZE = {"help": "Height and width of images [pixels].", "group": "model"}
_FRAMEWORK = {"help": "Framework: pytorch, or keras on TensorFlow.", "group": "software", "metavar": "NAME"}
_OWN_LAYOUT = "nchw, and nhwc for keras"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a session measures, and where its records go."""

    device: str = setting(
        "cpu", help="Device of this machine to measure on.", group="device", metavar="cpu|cuda:N"
    )
    records: str | None = setting(
        None,
        help="Where records go.",
        group="output",
        default="FORERUN_RECORDS, or a file of yours",
        metavar="FILE|URL",
    )
    occasion: str = setting(
        "",
        help="Name of the session: the same one resumes, a new one repeats.",
        group="output",
        metavar="NAME",
    )
    ray: str | None = setting(
        None, help="Run the jobs on the nodes of a Ray cluster.", group="device", metavar="auto|ADDRESS"
    )


SYSTEM_A_SIZES: Mapping[str, Sequence[int]] = {"depth": (2, 3, 4), "base_filters": (32, 64)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values to combine, and settings that all trainings share; the defaults are system A's.

    Attributes:
        sizes: Keys of the family of networks with the values each takes.
    """

    sizes: Mapping[str, Sequence[int]] = field(default_factory=lambda: dict(SYSTEM_A_SIZES))
    network: str = setting(
        "cnn",
        help="Family of networks: cnn, cifar-resnet, mnist-cnn ...",
        group="model",
        metavar="FAMILY",
    )
    batch_sizes: Sequence[int] = setting(
        (32, 64, 128), help="Images of one step.", group="run", default="32,64,128", metavar="32,64"
    )
    precisions: Sequence[Precision] = setting((Precision.FP32,), **_PRECISIONS)
    layouts: Sequence[Layout] = setting((Layout.NCHW,), default=_OWN_LAYOUT, **_LAYOUTS)
    compiles: Sequence[bool] = setting((False,), help="Without torch.compile, with it, or both.", **_COMPILES)
    image_size: int = setting(32, help="Height and width of the images [pixels].", group="model")
    optimizer: str = setting("adam", **_OPTIMIZER)
    dataset: str = setting(
        "cifar10",
        help="Images: cifar10, mnist (28 pixels), pcam (96), synthetic or digits.",
        group="job",
        metavar="NAME",
    )
    num_epochs: int = setting(3, help="Epochs of each training.", group="job", flag="epochs")
    num_steps: int | None = setting(
        None, help="Cut each epoch to so many steps and extrapolate to the whole.", group="job", flag="steps"
    )
    num_workers: int = setting(
        0, help="Processes that prepare batches.", group="input", default="0", flag="loader-workers"
    )
    seed: int = setting(
        0, help="Seed of weights, order and synthetic images.", group="job", default="0", low=0
    )
    framework: str = setting("pytorch", **_FRAMEWORK)
    num_replicas: int = setting(
        1,
        help="With keras: replicas of a MirroredStrategy, each with a batch of its own.",
        group="sharing",
        flag="replicas",
    )

    def __post_init__(self) -> None:
        axes = {**self.sizes, "batch size": self.batch_sizes, "precision": self.precisions}
        for name, values in {**axes, "layout": self.layouts, "compile": self.compiles}.items():
            if not values:
                raise InvalidSetupError(f"expected at least one value of {name} in the grid, got none")
            if len(set(values)) < len(values):
                raise InvalidSetupError(
                    f"expected different values of {name} in the grid, got {list(values)}; leave repeats out: "
                    "a repeat on another day needs its own occasion"
                )
        if self.framework not in ("pytorch", "keras"):
            raise InvalidSetupError(f"expected framework pytorch or keras, got {self.framework!r}")
        if self.num_replicas < 1 or (self.num_replicas > 1 and self.framework != "keras"):
            raise InvalidSetupError(
                f"expected one replica, or more with framework keras, got {self.num_replicas} with {self.framework}"
            )
        if self.num_epochs < 0 or (self.num_steps is not None and self.num_steps < 1):
            raise InvalidSetupError(
                f"expected epochs of at least 0 and steps of at least 1, got {self.num_epochs} and {self.num_steps}"
            )


RANGES = ("justus", "wide", "networks")
"""Names of the ranges of sizes of layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDesign:
    """Kinds and number of layers to measure, and their limits.

    Attributes:
        optimizers: Optimizers of training steps, all equally likely.
        with_null: True measures the null layer, in each mode, as well.
        copies: Number of equal layers in one step, each with its own weights and input; the limits hold for their sum.
    """

    kinds: Sequence[str] = setting(
        tuple(kind for kind in LAYER_KINDS if kind != "null"),
        help="Kinds of layers: conv2d, dense, batch_norm ...",
        group="main",
        default="all",
        metavar="NAME,NAME",
    )
    num_layers: int = setting(1100, help="Layers of all kinds together.", group="main")
    ranges: str = setting(
        "wide",
        help="Ranges of sizes: justus (the published ones), wide, or networks (as in image networks).",
        group="main",
        metavar="NAME",
    )
    modes: Sequence[str] = setting(
        ("forward", "train_step"),
        help="What is timed: forward, train_step or both.",
        group="main",
        default="forward,train_step",
        metavar="NAME,NAME",
        flag="mode",
    )
    optimizers: Sequence[str] = ("none", "sgd-plain", "momentum", "adam", "rmsprop", "adagrad", "adadelta")
    precision: str = setting("fp32", **_PRECISION)
    layout: str = setting(
        "nchw",
        help="Memory order of images: nchw or nhwc.",
        group="run",
        default=_OWN_LAYOUT,
        metavar="NAME",
    )
    # Within the default limits hardly any step takes more than 100 ms on one core of a present processor.
    max_flops: float = setting(
        4e9, help="Most work of one step [10^9 FLOP].", group="limits", name="max_gflop", unit=1e9
    )
    max_bytes: float = setting(
        2e8, help="Most memory of one step [10^6 bytes].", group="limits", name="max_mb", unit=1e6
    )
    seed: int = setting(0, help="Another seed measures other layers.", group="main", default="0", low=0)
    with_null: bool = True
    copies: int = 1
    framework: str = setting("pytorch", **_FRAMEWORK)

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in LAYER_KINDS:
                raise InvalidSetupError(
                    f"unknown layer '{kind}'{near_matches(kind, LAYER_KINDS)}; expected one of {', '.join(LAYER_KINDS)}"
                )
        if self.ranges not in RANGES:
            raise InvalidSetupError(f"expected ranges {', '.join(RANGES)}, got '{self.ranges}'")
        if self.framework not in ("pytorch", "keras") or (self.framework == "keras" and self.copies != 1):
            raise InvalidSetupError(
                f"expected framework pytorch, or keras with one copy of each layer, got {self.framework!r} with "
                f"{self.copies}"
            )
        if self.num_layers < 1 or not self.kinds or not self.modes:
            raise InvalidSetupError(
                f"expected at least one layer, kind and mode, got {self.num_layers} of {list(self.kinds)}, "
                f"{list(self.modes)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """Steps of a model; of batch sizes, precisions, layouts and compiles all combinations are measured."""

    batch_sizes: Sequence[int] = setting((32,), **_BATCH_SIZES)
    precisions: Sequence[str] = setting(("fp32",), **_PRECISIONS)
    convolution_precision: str | None = setting(None, **_CONVOLUTIONS)
    layouts: Sequence[str] | None = setting(None, default="the framework's own", **_LAYOUTS)
    compiles: Sequence[bool] = setting(
        (False,), help="Without torch.compile (in Keras XLA), with it, or both.", **_COMPILES
    )
    optimizer: str | None = setting(None, default="sgd, under parameter servers sgd-plain", **_OPTIMIZER)
    phase: str = setting(
        "train", help="Part of a step: train, forward or inference.", group="run", metavar="NAME"
    )
    image_size: int | None = setting(None, **_IMAGE_SIZE)
    input_shape: Sequence[int] | None = setting(
        None, help="Shape of one sample, without the batch.", group="model", metavar="3,224,224"
    )
    sequence_length: int | None = setting(None, help="Tokens of one sample.", group="model")
    num_devices: int = setting(
        1,
        help="Devices that share the work, each with the batch size; processes on a processor.",
        group="sharing",
    )
    strategy: str = setting("ddp", help="How several devices share it: ddp.", group="sharing", metavar="NAME")
    framework: str | None = setting(
        None,
        help="Framework: pytorch or keras.",
        group="software",
        default="that of the model",
        metavar="NAME",
    )
    num_servers: int = setting(
        0,
        help="With keras: servers of a ParameterServerStrategy, local processes.",
        group="sharing",
        default="0",
        flag="parameter-servers",
    )
    num_workers: int = setting(
        2,
        help="Workers of the parameter servers, each with the batch size.",
        group="sharing",
        flag="workers",
    )


class StepOptions(TypedDict, total=False):
    """The fields of ``StepSettings``, for type checkers."""

    batch_sizes: Sequence[int] | None
    precisions: Sequence[str] | None
    convolution_precision: str | None
    layouts: Sequence[str] | None
    compiles: Sequence[bool] | None
    optimizer: str | None
    phase: str | None
    image_size: int | None
    input_shape: Sequence[int] | None
    sequence_length: int | None
    num_devices: int | None
    strategy: str | None
    framework: str | None
    num_servers: int | None
    num_workers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSetup:
    """Settings of a training for a learning curve.

    Attributes:
        model: Model as ``predict`` names it.
    """

    model: str
    dataset: str = setting(
        "cifar10",
        help="Images: cifar10 (downloaded through torchvision, shifted by up to four pixels and mirrored in "
        "training), mnist and pcam (PatchCamelyon; both downloaded too), digits (scikit-learn's 1,797 scans, "
        "resized) or synthetic.",
        group="job",
        metavar="NAME",
    )
    num_images: int | None = setting(
        None,
        help="The first so many training images only; a fifth as many, 256 or more, are held out.",
        group="job",
    )
    batch_size: int = setting(128, help="Images of one step.", group="run")
    num_epochs: int = setting(30, help="Epochs at most.", group="job", flag="epochs")
    learning_rate: float = setting(0.1, help="Highest learning rate.", group="run")
    optimizer: str = setting(
        "sgd", help="sgd (momentum 0.9, weight decay 5e-4) or adam.", group="run", metavar="NAME"
    )
    image_size: int = setting(
        32,
        help="Height and width of the images [pixels].",
        group="model",
        default="those of the dataset, 32 for digits and synthetic",
    )
    seed: int = setting(0, help="Seed of weights, order and images.", group="run", default="0", low=0)
    device: str = setting("cpu", help="Device: cpu or cuda:N.", group="device", metavar="DEVICE")
    with_gradient_noise: bool = setting(
        False,
        help="Do each step in two halves and print the gradient noise scale, the batch size that is still "
        "worth its steps.",
        group="main",
        flag="gradient-noise",
    )

    def __post_init__(self) -> None:
        from forerun.evidence.measurement.datasets import check_dataset

        for name in ("batch_size", "num_epochs", "learning_rate"):
            if not getattr(self, name) > 0:
                raise InvalidSetupError(
                    f"{name.replace('_', ' ')} must be above zero, got {getattr(self, name)}"
                )
        if self.optimizer not in ("sgd", "adam"):
            raise InvalidSetupError(f"a curve is trained with sgd or adam, got '{self.optimizer}'")
        if self.with_gradient_noise and self.batch_size < 4:
            raise InvalidSetupError(
                f"gradient noise needs a batch of four images or more, to be halved, got {self.batch_size}"
            )
        check_dataset(self.dataset, self.image_size)


# The questions of the commands: their options are the settings of their parts, in this order.


@dataclass(frozen=True, kw_only=True)
class LinkQuestion:
    """A link to measure."""

    place: Place
    protocol: Protocol


@dataclass(frozen=True, kw_only=True)
class GridQuestion(LinkQuestion):
    """Trainings to measure."""

    grid: Grid


@dataclass(frozen=True, kw_only=True)
class LayerQuestion(LinkQuestion):
    """Layers to measure alone."""

    design: LayerDesign


@dataclass(frozen=True, kw_only=True)
class ModelQuestion(LinkQuestion):
    """Steps of a model to measure."""

    steps: StepSettings


@dataclass(frozen=True, kw_only=True)
class CompositionQuestion(LinkQuestion):
    """Networks to measure beside their layers."""

    batch_sizes: Sequence[int] = setting((32,), **_BATCH_SIZES)
    image_size: int | None = setting(None, **_IMAGE_SIZE)
    optimizer: str = setting("adam", **_OPTIMIZER)
    precision: str = setting("fp32", **_PRECISION)


@dataclass(frozen=True, kw_only=True)
class CurveQuestion:
    """A training for its curve."""

    setup: CurveSetup
    schedule: str | None = setting(
        None,
        help="Learning rate from first to last epoch, as in forecast.",
        group="run",
        default="a cosine over all epochs",
        metavar="WORDS",
    )
    target: str | None = setting(
        None, help="End the run when it is reached.", group="target", metavar="METRIC>=VALUE"
    )
    steps_out: Path | None = setting(
        None,
        help="A row per step as well: epoch, step, loss and acc, as forecast law reads them.",
        group="output",
        metavar="FILE.csv",
    )
