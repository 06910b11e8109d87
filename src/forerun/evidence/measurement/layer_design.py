"""Jobs of a design: layers with sizes that fill the space evenly, and every combination of a grid.

``justus``: the ranges of the public layer tables (Justus et al. 2018, arXiv 1811.11880, section 4): batch 1 to 64,
images of 1 to 512 pixels with in_size * channels below 10,000, kernel 1 to 7, stride 1 to 4, dense layers of 1 to 4096
features. ``wide``: to batch 256, without the limit on images. ``networks``: sizes of layers inside image networks, for
calibration: features in multiples of 8, odd kernels padded to keep the size, stride 1 more often than 2.

System A's grid is depth 2, 3, 4 x base_filters 32, 64 x batch size 32, 64, 128 of ``cnn`` on CIFAR-10: 18 jobs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product, zip_longest
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from forerun.base.errors import InvalidSetupError
from forerun.evidence.measurement.datasets import dataset_size
from forerun.evidence.measurement.jobs import MeasurementJob
from forerun.evidence.measurement.layer_figures import LayerFigures, layer_figures
from forerun.evidence.measurement.settings import Grid, LayerDesign
from forerun.evidence.records.measurement import JobKind, Scalar
from forerun.evidence.records.model_names import subject_family
from forerun.question.setup import Precision

IMAGE_LAYERS = (
    *("conv2d", "grouped_conv2d", "depthwise_conv2d"),
    *("batch_norm", "group_norm", "max_pool", "avg_pool"),
)
"""Kinds that read images."""

_WINDOWS = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "max_pool", "avg_pool")
_WITH_BIAS = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "dense", "attention", "lstm")
_WITH_ACTIVATION = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "dense")
_JUSTUS_WIDEST = 10_000
_KERNELS_IN_NETWORKS: dict[str, tuple[int, ...]] = {
    "conv2d": (1, 1, 3, 3, 5, 7),
    "grouped_conv2d": (3,),
    "depthwise_conv2d": (3, 3, 5, 7),
    "max_pool": (2, 3),
    "avg_pool": (2, 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One size or choice of a layer.

    Attributes:
        name: Name of the layer's parameter.
        low, high: Smallest and largest whole number, both included; not used if there are values.
        values: Choices, in place of a range of numbers.
        is_log: True if equal ratios are equally likely, not equal differences.
        multiple: Number of which all values are multiples.
    """

    name: str
    low: int = 1
    high: int = 1
    values: tuple[Scalar, ...] = ()
    is_log: bool = True
    multiple: int = 1

    def at(self, u: float) -> Scalar:
        """The value at a place of the unit interval, u in [0, 1)."""
        if self.values:
            return self.values[int(u * len(self.values))]
        if not self.is_log:
            return self.low + int(u * (self.high - self.low + 1))
        # Half a step beyond both ends, so that the ends are as likely as the numbers between.
        low, high = np.log(self.low - 0.5 if self.low > 1 else 0.5 * 2**0.5), np.log(self.high + 0.5)
        drawn = float(np.exp(low + u * (high - low)))
        return int(np.clip(self.multiple * round(drawn / self.multiple), self.low, self.high))


def axes_of(kind: str, ranges: str, *, modes: Sequence[str], optimizers: Sequence[str]) -> list[Axis]:
    """The axes of a kind of layer.

    Args:
        kind: Kind of layer, one of ``figures.LAYER_KINDS``.
        ranges: Name of the ranges, one of ``RANGES``.
        modes: Modes to measure: forward, train_step or both.
        optimizers: Optimizers of training steps.
    """
    axes = [*_sizes(kind, ranges), *_widths(kind, ranges)]
    if kind in _WITH_BIAS:
        axes += [Axis(name="use_bias", values=(False, True))]
    if kind in _WITH_ACTIVATION:
        activations = ("none", "relu") if ranges == "networks" else ("none", "relu", "tanh", "sigmoid")
        axes += [Axis(name="activation", values=activations)]
    axes += [Axis(name="mode", values=tuple(modes))]
    return [*axes, Axis(name="optimizer", values=tuple(optimizers))]


def _sizes(kind: str, ranges: str) -> list[Axis]:
    """Axes of batch, image and window."""
    is_network = ranges == "networks"
    axes = [Axis(name="batch_size", high=256 if ranges == "wide" else 64)]
    if kind in IMAGE_LAYERS:
        low, high = (4, 128) if is_network else (1, 512)
        axes += [Axis(name="in_size", low=low, high=high)]
    if kind in _WINDOWS and is_network:
        # Convolutions of networks keep the size of the image; of their pools many, as VGG's, have no padding.
        paddings = ("same", "valid") if kind.endswith("pool") else ("same",)
        axes += [
            Axis(name="kernel", values=_KERNELS_IN_NETWORKS[kind]),
            Axis(name="stride", values=(1, 1, 2)),
            Axis(name="padding", values=paddings),
        ]
    elif kind in _WINDOWS:
        axes += [Axis(name="kernel", high=7, is_log=False), Axis(name="stride", high=4, is_log=False)]
        axes += [Axis(name="padding", values=("same", "valid"))]
    return axes


def _widths(kind: str, ranges: str) -> list[Axis]:
    """Axes of features; if a number must be a multiple, the axes are that multiple and the features in each part."""
    widest = {"justus": _JUSTUS_WIDEST, "wide": 2048, "networks": 1024}[ranges]
    step = 8 if ranges == "networks" else 1
    inputs = Axis(name="in_features", low=step, high=widest, multiple=step)
    outputs = Axis(name="out_features", low=step, high=widest, multiple=step)
    tokens = Axis(name="sequence_length", high=1024)
    if kind == "conv2d":
        return [inputs, outputs]
    if kind in ("grouped_conv2d", "group_norm"):
        least = 4 if ranges == "networks" else 1
        groups = Axis(name="groups", low=2, high=64)
        each = [
            Axis(name=f"{side}_per_group", low=least, high=64, multiple=least)
            for side in ("inputs", "outputs")
        ]
        return [groups, *(each if kind == "grouped_conv2d" else each[:1])]
    if kind == "dense":
        widest = {"justus": 4096, "wide": 8192, "networks": 4096}[ranges]
        return [replace(inputs, high=widest), replace(outputs, high=widest)]
    if kind == "attention":
        return [tokens, Axis(name="num_heads", high=16), Axis(name="width_per_head", low=8, high=128)]
    if kind == "lstm":
        return [replace(tokens, high=128), replace(inputs, high=1024), replace(outputs, high=1024)]
    if kind == "layer_norm":
        return [tokens, replace(inputs, high=4096)]
    return [inputs]


_JUSTUS_IMAGE_LIMIT = 10_000
_TRAIN_WORK = 3  # a training step does the forward work, and twice that in the backward pass
_TRAIN_COPIES = 2  # activations and their gradients
_WEIGHT_COPIES = 4  # weights, gradients, two moments
_FIRST_EXPONENT = 8
_LAST_EXPONENT = 15

LAYERS_WITHOUT_WEIGHTS = ("max_pool", "avg_pool", "null")


def unit_points(num_axes: int, seed: int) -> Iterator[npt.NDArray[np.float64]]:
    """The first 2^15 points of a scrambled Sobol sequence, each (axes,) in [0, 1)."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(num_axes, scramble=True, rng=seed)
    # Blocks after which the number of points is a power of two: only then are they evenly spread.
    for exponent in (_FIRST_EXPONENT, *range(_FIRST_EXPONENT, _LAST_EXPONENT)):
        yield from np.asarray(sequence.random_base2(exponent))


def design_layers(design: LayerDesign) -> list[MeasurementJob]:
    """The jobs of a design; kinds take turns, and each kind covers its whole range early.

    Raises:
        InvalidSetupError: The limits leave hardly any layer of a kind.
    """
    counts = np.full(len(design.kinds), design.num_layers // len(design.kinds))
    counts[: design.num_layers % len(design.kinds)] += 1
    columns = [_jobs_of(kind, int(n), design) for kind, n in zip(design.kinds, counts, strict=True)]
    # A session that ends early then has some of every kind.
    mixed = [job for job in chain.from_iterable(zip_longest(*columns)) if job is not None]
    return [*_null_jobs(design), *mixed] if design.with_null else mixed


def _null_jobs(design: LayerDesign) -> Iterator[MeasurementJob]:
    for mode in design.modes:
        asked: dict[str, Scalar] = {"batch_size": 1, "in_features": 1, "mode": mode, "optimizer": "none"}
        yield layer_job("null", asked, precision=design.precision, layout=design.layout)


def _jobs_of(kind: str, num_layers: int, design: LayerDesign) -> list[MeasurementJob]:
    axes = axes_of(kind, design.ranges, modes=design.modes, optimizers=design.optimizers)
    # Not hash(), which Python salts anew in each process: a design must be the same on every machine.
    seed = zlib.crc32(f"{kind} {design.seed}".encode())
    jobs: dict[str, MeasurementJob] = {}
    for point in unit_points(len(axes), seed):
        if (job := _job_at(kind, axes, point, design)) is not None:
            jobs.setdefault(job.to_json(), job)
        if len(jobs) == num_layers:
            return list(jobs.values())
    raise InvalidSetupError(
        f"expected {num_layers} different layers {kind} within {design.max_flops:.2g} FLOP and "
        f"{design.max_bytes:.2g} bytes, found {len(jobs)}; allow more of both, or ask for fewer"
    )


def _job_at(
    kind: str, axes: Sequence[Axis], point: npt.NDArray[np.float64], design: LayerDesign
) -> MeasurementJob | None:
    asked = _resolved({axis.name: axis.at(float(u)) for axis, u in zip(axes, point, strict=True)})
    if asked["mode"] == "forward" or kind in LAYERS_WITHOUT_WEIGHTS:
        asked["optimizer"] = "none"
    if design.copies > 1:
        asked["copies"] = design.copies
    if (
        design.framework == "keras"
        and asked.get("padding") == "same"
        and not int(asked.get("kernel") or 1) % 2
    ):
        return None
    try:
        figures = layer_figures(kind, asked)
    except InvalidSetupError:
        return None  # the window is larger than the image
    if not _is_within(kind, figures, asked, design):
        return None
    return layer_job(kind, asked, precision=design.precision, layout=design.layout)


_MULTIPLES = {
    "inputs_per_group": ("in_features", "groups"),
    "outputs_per_group": ("out_features", "groups"),
    "width_per_head": ("in_features", "num_heads"),
}
"""Axes that are the features in each part: the number of all features, and that of the parts."""


def _resolved(asked: dict[str, Scalar]) -> dict[str, Scalar]:
    """Parameters with each multiple written out as a number of features."""
    for name, (features, parts) in _MULTIPLES.items():
        if (each := asked.pop(name, None)) is not None:
            asked[features] = int(asked[parts] or 1) * int(each)
    return asked


def _is_within(kind: str, figures: LayerFigures, asked: dict[str, Scalar], design: LayerDesign) -> bool:
    trains = asked["mode"] == "train_step"
    # A layer that does not fit a small device would end the grid by an error on some devices and not on
    # others.
    num_elements = (figures.num_inputs + figures.num_outputs) * (_TRAIN_COPIES if trains else 1)
    num_bytes = _element_bytes(design.precision) * (
        num_elements + figures.num_parameters * (_WEIGHT_COPIES if trains else 1)
    )
    flops = figures.flops * (_TRAIN_WORK if trains else 1)
    if design.copies * flops > design.max_flops or design.copies * num_bytes > design.max_bytes:
        return False
    if design.ranges != "justus" or kind not in IMAGE_LAYERS:
        return True
    widest = max(figures.input_shape[1], figures.output_shape[1])
    # The limit of the published design, so that its grid can be measured as it was.
    return figures.input_shape[2] * widest < _JUSTUS_IMAGE_LIMIT


def _element_bytes(precision: str) -> int:
    """Bytes of a stored number; autocast stores as fp32 does."""
    return 2 if precision in (Precision.BF16, Precision.FP16) else 4


def layer_job(kind: str, asked: Mapping[str, Scalar], *, precision: str, layout: str) -> MeasurementJob:
    """The job that measures a layer, with its work and traffic written beside its sizes.

    Args:
        kind: Kind of layer, one of ``figures.LAYER_KINDS``.
        asked: Sizes of the layer, ``mode`` and ``optimizer``.
        precision: Precision, as in ``predict``.
        layout: Memory order, as in ``predict``.

    Raises:
        InvalidSetupError: Sizes are missing or contradict each other.
    """
    figures, element_bytes = layer_figures(kind, asked), _element_bytes(precision)
    parameters: dict[str, Scalar] = {
        **asked,
        "precision": precision,
        "layout": layout,
        "flops": figures.flops,
        "input_bytes": element_bytes * figures.num_inputs,
        "output_bytes": element_bytes * figures.num_outputs,
        "weight_bytes": element_bytes * figures.num_parameters,
    }
    return MeasurementJob(kind=JobKind.LAYER, subject=kind, family=kind, parameters=parameters)


def step_job(
    model: str, asked: Mapping[str, Any], *, family: str | None = None, kind: JobKind = JobKind.STEP
) -> MeasurementJob:
    """The job that measures steps of a model.

    Args:
        model: The model as ``predict`` names it.
        asked: Its parameters, ``input_shape`` as numbers; one that is None takes its default.
        family: Group that must not be split between fit and test; None for that of the model's name.
        kind: Kind of the job.
    """
    shape = asked.get("input_shape")
    given = {"phase": "train", **asked, "input_shape": shape and "x".join(map(str, shape))}
    return MeasurementJob(
        kind=kind,
        subject=model,
        family=family or subject_family(model),
        parameters={name: value for name, value in given.items() if value is not None},
    )


Item = TypeVar("Item")


def grid_jobs(grid: Grid) -> list[MeasurementJob]:
    """The jobs of a grid in an order in which small and large take turns.

    Any part of the list then covers the whole range: an interrupted session is still of use, and a drift of the
    machine does not look like an effect of size.
    """
    rows: Iterable[tuple[Any, ...]] = product(
        *grid.sizes.values(), grid.batch_sizes, grid.precisions, grid.layouts, sorted(grid.compiles)
    )
    return spread_order([_job(grid, row) for row in rows])


def _job(grid: Grid, row: tuple[Any, ...]) -> MeasurementJob:
    num_sizes = len(grid.sizes)
    sizes = dict(zip(grid.sizes, row[:num_sizes], strict=True))
    batch_size, precision, layout, compile = row[num_sizes:]
    text = ",".join(f"{key}={value}" for key, value in sizes.items())
    parameters: dict[str, Scalar] = {
        **sizes,
        "batch_size": batch_size,
        "image_size": grid.image_size,
        "precision": str(precision),
        "layout": str(layout),
        "compile": compile,
        "optimizer": grid.optimizer,
        "dataset": grid.dataset,
        "dataset_size": dataset_size(grid.dataset, train=True),
        "num_epochs": grid.num_epochs,
        "num_steps": grid.num_steps,
        "num_workers": grid.num_workers,
        "seed": grid.seed,
    }
    subject = f"{grid.network}:{text}" if text else grid.network
    if grid.framework == "keras":
        # Jobs of PyTorch keep the identity they had before other frameworks were added.
        subject = f"keras:{subject}"
        if grid.num_replicas > 1:
            parameters |= {"strategy": "mirrored", "num_replicas": grid.num_replicas}
    return MeasurementJob(
        kind=JobKind.TRAINING,
        subject=subject,
        family=grid.network,
        parameters=parameters,
    )


def spread_order(items: Sequence[Item]) -> list[Item]:
    """The items in the order of van der Corput's sequence: each next one falls into the widest gap so far.

    >>> spread_order(list(range(8)))
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    num_bits = max(1, (len(items) - 1).bit_length())
    reversed_bits = (int(f"{index:0{num_bits}b}"[::-1], 2) for index in range(1 << num_bits))
    return [items[index] for index in reversed_bits if index < len(items)]
