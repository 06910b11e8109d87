"""Design of layers to measure: points that fill the space of sizes evenly, within the limits of a machine.

Every kind of layer has its axes. A scrambled Sobol sequence over the unit cube of the axes is mapped to sizes, most
of them on a logarithmic scale; points beyond the limits of work and memory are skipped, and the sequence goes on.
Plain random choice leaves holes and clusters: its discrepancy falls with n^(-1/2), that of the sequence almost with
1/n.

The sizes are in ``axes``.
Source of the sequence: Sobol 1967; Owen 1998, J. Complexity 14(4) for the scrambling.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import numpy as np
import numpy.typing as npt

from forerun.errors import InvalidSetupError, near_matches
from forerun.measurement.jobs import MeasurementJob
from forerun.measurement.layers.axes import IMAGE_LAYERS, RANGES, Axis, axes_of
from forerun.measurement.layers.figures import LAYER_KINDS, LayerFigures, layer_figures
from forerun.records.measurement import JobKind, Scalar
from forerun.run.setup import Precision

__all__ = ["LAYERS_WITHOUT_WEIGHTS", "LayerDesign", "design_layers", "layer_job", "unit_points"]

_JUSTUS_IMAGE_LIMIT = 10_000
_TRAIN_WORK = 3  # a training step does the forward work, and twice that in the backward pass
_TRAIN_COPIES = 2  # activations and their gradients
_WEIGHT_COPIES = 4  # weights, gradients, two moments
_FIRST_EXPONENT = 8
_LAST_EXPONENT = 15

LAYERS_WITHOUT_WEIGHTS = ("max_pool", "avg_pool", "null")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDesign:
    """Kinds and number of layers to measure, and their limits.

    Attributes:
        kinds: Kinds of layers.
        num_layers: Number of layers of all kinds together, equally many of each.
        ranges: Ranges of sizes: ``justus``, ``wide`` or ``networks`` (``axes.RANGES``).
        modes: Modes to measure: ``forward``, ``train_step`` or both, which then take turns.
        optimizers: Optimizers of training steps, all equally likely.
        precision, layout: Precision and memory order of all layers.
        max_flops: Most work of one step [FLOP]; with the defaults of work and memory hardly any step takes more than
            100 ms on one core of a present processor.
        max_bytes: Most memory of one step [bytes].
        seed: Seed of the scrambling; another seed gives another design of the same kind.
        with_null: True measures the null layer, in each mode, as well.
        copies: Number of equal layers in one step, each with its own weights and input; the limits hold for their sum.
        framework: Name of the framework: ``pytorch``, or ``keras`` on TensorFlow, which pads an even kernel
            with ``same`` differently: such layers are skipped.
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
    copies: int = 1
    framework: str = "pytorch"

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
    mixed = [job for job in chain.from_iterable(zip_longest(*columns)) if job is not None]
    return [*_null_jobs(design), *mixed] if design.with_null else mixed


def _null_jobs(design: LayerDesign) -> Iterator[MeasurementJob]:
    for mode in design.modes:
        asked: dict[str, Scalar] = {"batch_size": 1, "in_features": 1, "mode": mode, "optimizer": "none"}
        yield layer_job("null", asked, precision=design.precision, layout=design.layout)


def _jobs_of(kind: str, num_layers: int, design: LayerDesign) -> list[MeasurementJob]:
    axes = axes_of(kind, design.ranges, modes=design.modes, optimizers=design.optimizers)
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


def _resolved(asked: dict[str, Scalar]) -> dict[str, Scalar]:
    """Parameters with each multiple written out as a number of features."""
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
    num_bytes = _element_bytes(design.precision) * (
        num_elements + figures.num_parameters * (_WEIGHT_COPIES if trains else 1)
    )
    flops = figures.flops * (_TRAIN_WORK if trains else 1)
    if design.copies * flops > design.max_flops or design.copies * num_bytes > design.max_bytes:
        return False
    if design.ranges != "justus" or kind not in IMAGE_LAYERS:
        return True
    widest = max(figures.input_shape[1], figures.output_shape[1])
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
