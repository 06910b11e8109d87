"""Which layers to measure: points that fill the space of sizes evenly, within what a machine can run.

Every kind of layer has its axes. A scrambled Sobol sequence over the unit cube of the axes is mapped to sizes, most
of them on a logarithmic scale; points beyond the limits of work and memory are passed over, and the sequence goes on.
Plain random choice leaves holes and clusters: its discrepancy falls with n^(-1/2), that of the sequence almost with
1/n.

Ranges ``justus`` are those of the public layer tables (Justus et al. 2018, arXiv 1811.11880, section 4): batch 1 to 64,
images of 1 to 512 pixels with in_size * channels below 10,000, kernel 1 to 7, stride 1 to 4, dense layers of 1 to 4096
features. ``wide`` goes on to batch 256 and keeps only the limits of work and memory.
Source of the sequence: Sobol 1967; Owen 1998, J. Complexity 14(4) for the scrambling.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError, near_matches
from forerun.measurement.jobs import Job
from forerun.measurement.layer_figures import LAYER_KINDS, LayerFigures, layer_figures
from forerun.records.measurement import JobKind, Scalar
from forerun.workload.setup import Precision

__all__ = ["Axis", "LayerDesign", "axes_of", "design_layers", "unit_points"]

_JUSTUS_IMAGE_LIMIT = 10_000
_TRAIN_WORK = 3  # a training step does the forward work, and it twice again backward
_TRAIN_COPIES = 2  # activations and their gradients
_WEIGHT_COPIES = 4  # weights, gradients, two moments
_FIRST_EXPONENT = 8
_LAST_EXPONENT = 15

_IMAGES = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "batch_norm", "group_norm", "max_pool", "avg_pool")
_WINDOWS = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "max_pool", "avg_pool")
_WITH_BIAS = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "dense", "attention", "lstm")
_WITH_ACTIVATION = ("conv2d", "grouped_conv2d", "depthwise_conv2d", "dense")
_WITHOUT_WEIGHTS = ("max_pool", "avg_pool", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One size or choice of a layer.

    Attributes:
        name: Its parameter.
        low, high: Smallest and largest whole number, both included; of no use where there are values.
        values: The choices, instead of numbers.
        is_log: Whether equal ratios are equally likely, not equal differences.
    """

    name: str
    low: int = 1
    high: int = 1
    values: tuple[Scalar, ...] = ()
    is_log: bool = True

    def at(self, u: float) -> Scalar:
        """The value at a place of the unit interval, u in [0, 1)."""
        if self.values:
            return self.values[int(u * len(self.values))]
        if not self.is_log:
            return self.low + int(u * (self.high - self.low + 1))
        # Half a step beyond both ends, so that they are as likely as what lies between.
        low, high = np.log(self.low - 0.5 if self.low > 1 else 0.5 * 2**0.5), np.log(self.high + 0.5)
        return int(np.clip(round(float(np.exp(low + u * (high - low)))), self.low, self.high))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDesign:
    """Which layers, how many, and within which limits.

    Attributes:
        kinds: Kinds of layers.
        num_layers: Layers of all kinds together, equally many of each.
        ranges: ``justus`` or ``wide``.
        modes: ``forward``, ``train_step`` or both, which then take turns.
        optimizers: Updates of training steps; each is equally likely.
        precision, layout: Of all layers.
        max_flops: Most work of one step [FLOP]; with the default and that of the memory hardly any step takes more
            than 100 ms on one core of a present processor.
        max_bytes: Most memory of one step [bytes].
        seed: Of the scrambling; another one gives another design of the same kind.
        with_null: Whether the null layer, in each mode, is measured too.
    """

    kinds: Sequence[str] = tuple(kind for kind in LAYER_KINDS if kind != "null")
    num_layers: int = 1100
    ranges: str = "wide"
    modes: Sequence[str] = ("forward", "train_step")
    optimizers: Sequence[str] = ("none", "sgd-plain", "momentum", "adam", "rmsprop", "adagrad", "adadelta")
    precision: str = "fp32"
    layout: str = "nchw"
    max_flops: float = 4e9
    max_bytes: float = 2e8
    seed: int = 0
    with_null: bool = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in LAYER_KINDS:
                raise InvalidSetupError(
                    f"unknown layer '{kind}'{near_matches(kind, LAYER_KINDS)}; expected one of {', '.join(LAYER_KINDS)}"
                )
        if self.ranges not in ("justus", "wide"):
            raise InvalidSetupError(f"expected ranges justus or wide, got '{self.ranges}'")
        if self.num_layers < 1 or not self.kinds or not self.modes:
            raise InvalidSetupError(
                f"expected at least one layer, kind and mode, got {self.num_layers} of {list(self.kinds)}, "
                f"{list(self.modes)}"
            )


def unit_points(num_axes: int, seed: int) -> Iterator[npt.NDArray[np.float64]]:
    """The first 2^15 points of a scrambled Sobol sequence, each (axes,) in [0, 1)."""
    from scipy.stats import qmc

    sequence = qmc.Sobol(num_axes, scramble=True, rng=seed)
    # Blocks after which the number of points is a power of two: only then are they evenly spread.
    for exponent in (_FIRST_EXPONENT, *range(_FIRST_EXPONENT, _LAST_EXPONENT)):
        yield from np.asarray(sequence.random_base2(exponent))


def axes_of(kind: str, design: LayerDesign) -> list[Axis]:
    """The axes of a kind of layer."""
    is_wide = design.ranges == "wide"
    axes = [Axis(name="batch_size", high=256 if is_wide else 64)]
    if kind in _IMAGES:
        axes += [Axis(name="in_size", high=512)]
    if kind in _WINDOWS:
        axes += [Axis(name="kernel", high=7, is_log=False), Axis(name="stride", high=4, is_log=False)]
        axes += [Axis(name="padding", values=("same", "valid"))]
    axes += _width_axes(kind, is_wide)
    if kind in _WITH_BIAS:
        axes += [Axis(name="use_bias", values=(False, True))]
    if kind in _WITH_ACTIVATION:
        axes += [Axis(name="activation", values=("none", "relu", "tanh", "sigmoid"))]
    axes += [Axis(name="mode", values=tuple(design.modes))]
    return [*axes, Axis(name="optimizer", values=tuple(design.optimizers))]


def _width_axes(kind: str, is_wide: bool) -> list[Axis]:
    """Features; where they must be a multiple of something, of that and of the features in each."""
    widest = 2048 if is_wide else _JUSTUS_IMAGE_LIMIT
    inputs, outputs = Axis(name="in_features", high=widest), Axis(name="out_features", high=widest)
    tokens = Axis(name="sequence_length", high=1024)
    if kind == "conv2d":
        return [inputs, outputs]
    if kind in ("grouped_conv2d", "group_norm"):
        groups = Axis(name="groups", low=2, high=64)
        per_group = [Axis(name="inputs_per_group", high=64), Axis(name="outputs_per_group", high=64)]
        return [groups, *(per_group if kind == "grouped_conv2d" else per_group[:1])]
    if kind == "dense":
        widest = 8192 if is_wide else 4096
        return [replace(inputs, high=widest), replace(outputs, high=widest)]
    if kind == "attention":
        return [tokens, Axis(name="num_heads", high=16), Axis(name="width_per_head", low=8, high=128)]
    if kind == "lstm":
        return [replace(tokens, high=128), replace(inputs, high=1024), replace(outputs, high=1024)]
    if kind == "layer_norm":
        return [tokens, replace(inputs, high=4096)]
    return [inputs]


def design_layers(design: LayerDesign) -> list[Job]:
    """The jobs of a design; kinds take turns, and each kind goes through its whole range early.

    Raises:
        InvalidSetupError: The limits leave hardly any layer of a kind.
    """
    counts = np.full(len(design.kinds), design.num_layers // len(design.kinds))
    counts[: design.num_layers % len(design.kinds)] += 1
    columns = [_jobs_of(kind, int(n), design) for kind, n in zip(design.kinds, counts, strict=True)]
    mixed = [job for job in chain.from_iterable(zip_longest(*columns)) if job is not None]
    return [*_null_jobs(design), *mixed] if design.with_null else mixed


def _null_jobs(design: LayerDesign) -> Iterator[Job]:
    for mode in design.modes:
        asked: dict[str, Scalar] = {"batch_size": 1, "in_features": 1, "mode": mode, "optimizer": "none"}
        yield _job("null", asked, layer_figures("null", asked), design)


def _jobs_of(kind: str, num_layers: int, design: LayerDesign) -> list[Job]:
    axes = axes_of(kind, design)
    seed = zlib.crc32(f"{kind} {design.seed}".encode())
    jobs: dict[str, Job] = {}
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
) -> Job | None:
    asked = _resolved({axis.name: axis.at(float(u)) for axis, u in zip(axes, point, strict=True)})
    if asked["mode"] == "forward" or kind in _WITHOUT_WEIGHTS:
        asked["optimizer"] = "none"
    try:
        figures = layer_figures(kind, asked)
    except InvalidSetupError:
        return None  # the window is larger than the image
    return _job(kind, asked, figures, design) if _is_within(kind, figures, asked, design) else None


def _resolved(asked: dict[str, Scalar]) -> dict[str, Scalar]:
    """Multiples written out as what they are multiples for."""
    parts = {
        name: asked.pop(name, None) for name in ("inputs_per_group", "outputs_per_group", "width_per_head")
    }
    if parts["inputs_per_group"] is not None:
        asked["in_features"] = int(asked["groups"] or 1) * int(parts["inputs_per_group"])
    if parts["outputs_per_group"] is not None:
        asked["out_features"] = int(asked["groups"] or 1) * int(parts["outputs_per_group"])
    if parts["width_per_head"] is not None:
        asked["in_features"] = int(asked["num_heads"] or 1) * int(parts["width_per_head"])
    return asked


def _is_within(kind: str, figures: LayerFigures, asked: dict[str, Scalar], design: LayerDesign) -> bool:
    trains = asked["mode"] == "train_step"
    num_elements = (figures.num_inputs + figures.num_outputs) * (_TRAIN_COPIES if trains else 1)
    num_bytes = _element_bytes(design) * (
        num_elements + figures.num_parameters * (_WEIGHT_COPIES if trains else 1)
    )
    flops = figures.flops * (_TRAIN_WORK if trains else 1)
    if flops > design.max_flops or num_bytes > design.max_bytes:
        return False
    if design.ranges == "wide" or kind not in _IMAGES:
        return True
    widest = max(figures.input_shape[1], figures.output_shape[1])
    return figures.input_shape[2] * widest < _JUSTUS_IMAGE_LIMIT


def _element_bytes(design: LayerDesign) -> int:
    """Bytes of a stored number; autocast stores as fp32 does."""
    return 2 if design.precision in (Precision.BF16, Precision.FP16) else 4


def _job(kind: str, asked: dict[str, Scalar], figures: LayerFigures, design: LayerDesign) -> Job:
    element_bytes = _element_bytes(design)
    parameters: dict[str, Scalar] = {
        **asked,
        "precision": design.precision,
        "layout": design.layout,
        "flops": figures.flops,
        "input_bytes": element_bytes * figures.num_inputs,
        "output_bytes": element_bytes * figures.num_outputs,
        "weight_bytes": element_bytes * figures.num_parameters,
    }
    return Job(kind=JobKind.LAYER, subject=kind, family=kind, parameters=parameters)
