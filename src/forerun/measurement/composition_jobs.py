"""Jobs that compare a network with the sum of its layers.

The jobs are the network's own step, each of its layers alone and together with copies of itself, and jobs without
work: one layer, its copies, and two chains of layers of width 1, which give the costs of calls
(``optime.composition``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forerun.errors import InvalidSetupError
from forerun.measurement.jobs import MeasurementJob
from forerun.measurement.layers.design import LAYERS_WITHOUT_WEIGHTS, layer_job
from forerun.records.measurement import JobKind, Scalar

if TYPE_CHECKING:
    from forerun.run.model import ModelRequest

__all__ = ["EMPTY_NETWORK_LAYERS", "CompositionJobs", "LayerJobs", "composition_jobs"]

_MOST_COPIES = 8
_MOST_BYTES = 1.5e9
_ADAM_COPIES = 4  # weights, gradients, two moments
_ACTIVATION_COPIES = 2  # activations and their gradients

EMPTY_NETWORK_LAYERS = (2, 17)
"""Number of layers of the two chains without work, the output layer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerJobs:
    """One layer: alone, and together with copies of itself.

    Attributes:
        alone: Step with one layer.
        together: Step with ``num_copies`` equal layers; None if two would not fit in memory.
        num_copies: Number of equal layers in that step.
    """

    alone: MeasurementJob
    together: MeasurementJob | None
    num_copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompositionJobs:
    """The jobs of one network at one batch size.

    Attributes:
        whole: Training step of the network.
        layers: Jobs of each layer, in the order of the forward pass; equal layers have equal jobs.
        empty_layer: A layer without work.
        empty_networks: Chains of ``EMPTY_NETWORK_LAYERS`` layers without work.
        left_out: Kinds of modules that no layer benchmark knows.
    """

    whole: MeasurementJob
    layers: tuple[LayerJobs, ...]
    empty_layer: LayerJobs
    empty_networks: tuple[MeasurementJob, MeasurementJob]
    left_out: tuple[str, ...]

    @property
    def jobs(self) -> list[MeasurementJob]:
        """All jobs, without repeats."""
        found = [self.whole, *self.empty_networks]
        for layer in (self.empty_layer, *self.layers):
            found += [layer.alone, *([layer.together] if layer.together else [])]
        return list({job.to_json(): job for job in found}.values())


def composition_jobs(
    request: ModelRequest, family: str, batch_size: int, *, optimizer: str = "adam", precision: str = "fp32"
) -> CompositionJobs:
    """The jobs of a network.

    Nothing needs a gradient of the network's input, so the first layer is measured without one.

    Args:
        request: The network, with the size of its inputs.
        family: Group of the network in the records.
        batch_size: Number of samples in a step.
        optimizer: Optimizer, as in ``predict``.
        precision: Precision, as in ``predict``.

    Raises:
        UsageError, ModelBuildError, TraceError: The network cannot be built, or has no layer of a known kind.
    """
    from forerun.tracing.models.model_layers import model_layers

    found = model_layers(request, batch_size)
    if not found.layers:
        raise InvalidSetupError(
            f"{request.model} has no layer of a kind that benchmarks know (found {', '.join(found.left_out)}); "
            "name a network of convolutions, dense layers, normalisations and pooling"
        )
    layers = [
        _layer(kind, sizes, optimizer, precision, is_first=not index)
        for index, (kind, sizes) in enumerate(found.layers)
    ]
    empty: dict[str, Scalar] = {"batch_size": 1, "in_features": 1, "out_features": 1, "use_bias": True}
    few, many = (_empty_network(n, optimizer, precision) for n in EMPTY_NETWORK_LAYERS)
    return CompositionJobs(
        whole=_whole(request, family, batch_size, optimizer, precision),
        layers=tuple(layers),
        empty_layer=_layer("dense", {**empty, "activation": "none"}, optimizer, precision),
        empty_networks=(few, many),
        left_out=found.left_out,
    )


def _layer(
    kind: str, sizes: Mapping[str, Scalar], optimizer: str, precision: str, *, is_first: bool = False
) -> LayerJobs:
    has_weights = kind not in LAYERS_WITHOUT_WEIGHTS
    asked: dict[str, Scalar] = {
        **sizes,
        "mode": "train_step",
        "optimizer": optimizer if has_weights else "none",
        **({"input_gradient": False} if is_first and has_weights else {}),
    }
    alone = layer_job(kind, asked, precision=precision, layout="nchw")
    num_copies = int(min(_MOST_COPIES, _MOST_BYTES // _held_bytes(alone)))
    if num_copies < 2:
        return LayerJobs(alone=alone, together=None, num_copies=1)
    together = layer_job(kind, {**asked, "copies": num_copies}, precision=precision, layout="nchw")
    return LayerJobs(alone=alone, together=together, num_copies=num_copies)


def _held_bytes(job: MeasurementJob) -> float:
    """Approximate memory that a training step of a layer holds [bytes]."""
    weights, given, made = (
        float(str(job.parameters[name])) for name in ("weight_bytes", "input_bytes", "output_bytes")
    )
    return _ADAM_COPIES * weights + _ACTIVATION_COPIES * (given + made)


def _empty_network(num_layers: int, optimizer: str, precision: str) -> MeasurementJob:
    parameters: dict[str, Scalar] = {
        "batch_size": 1,
        "input_shape": "1x1x1",
        "num_classes": 2,
        "optimizer": optimizer,
        "precision": precision,
        "phase": "train",
    }
    subject = f"mlp:depth={num_layers - 1},width=1"
    return MeasurementJob(kind=JobKind.STEP, subject=subject, family="mlp", parameters=parameters)


def _whole(
    request: ModelRequest, family: str, batch_size: int, optimizer: str, precision: str
) -> MeasurementJob:
    shape = request.input_shape
    asked: dict[str, Scalar] = {
        "batch_size": batch_size,
        "image_size": request.image_size,
        "input_shape": None if shape is None else "x".join(map(str, shape)),
        "num_classes": request.num_classes,
        "optimizer": optimizer,
        "precision": precision,
        "phase": "train",
    }
    parameters: dict[str, Scalar] = {name: value for name, value in asked.items() if value is not None}
    return MeasurementJob(kind=JobKind.STEP, subject=request.model, family=family, parameters=parameters)
