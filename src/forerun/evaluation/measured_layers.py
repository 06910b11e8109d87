"""Measured layers and steps of one device as samples of the op-level model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from forerun.costs.op_weights import system_key
from forerun.errors import ForerunError
from forerun.evaluation.corpus import request_of
from forerun.evaluation.keras_samples import keras_graphs
from forerun.evaluation.layer_rows import only_modules
from forerun.hardware.device import Device
from forerun.measurement.job_parameters import flag_of, setup_of, text_of, whole_of
from forerun.measurement.layer_figures import layer_figures
from forerun.records.measurement import JobKind, Measurement, Outcome
from forerun.records.step_view import as_step_record
from forerun.regressors.op_features import NEWEST_ERA, Point, software_era
from forerun.regressors.op_fit import StepSample
from forerun.regressors.op_rows import DistinctOps, distinct_ops
from forerun.tracing.trace import trace, trace_built
from forerun.workload.graph import Graph
from forerun.workload.setup import Phase, TrainingSetup

__all__ = ["DeviceSample", "device_samples", "layer_graph"]


_LEAST_SHARE_OF_OPS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSample:
    """One measured step or layer, ready for a fit.

    Attributes:
        measurement: What was measured.
        ops: Its distinct kernels.
        point: Device and configuration.
        step_time_s: Median repetition [s].
        loop_s: Part of it that a training loop takes whatever the model does, and no operation explains [s].
        relative_noise: Half the 95 % interval of the median over the median.
        group: What must not be split between fit and test: a layer is its own group, a model its family.
        is_whole_model: Whether it is a step of a whole model.
    """

    measurement: Measurement
    ops: DistinctOps
    point: Point
    step_time_s: float
    relative_noise: float
    group: str
    is_whole_model: bool
    loop_s: float = 0.0

    @property
    def ops_time_s(self) -> float:
        """What the operations took [s]: the rest, or a tenth of the step where the loop is nearly all of it."""
        return max(self.step_time_s - self.loop_s, _LEAST_SHARE_OF_OPS * self.step_time_s)

    @property
    def system(self) -> str:
        """Key of the measuring system (``costs.op_weights.system_key``)."""
        setup = self.point.setup
        compiler = "compiled" if setup.compile else "eager"
        version = self.measurement.circumstances.framework_version
        return system_key(
            "calibration",
            self.point.device.name,
            setup.precision,
            setup.layout,
            compiler,
            version,
            setup.phase,
        )

    def fit_sample(self, weight: float) -> StepSample:
        """As a sample of the op-level fit."""
        return StepSample(
            ops=self.ops, point=self.point, step_time_s=self.ops_time_s, system=self.system, weight=weight
        )


def device_samples(
    measurements: Iterable[Measurement], device: Device, *, loop_s: float = 0.0
) -> tuple[list[DeviceSample], list[str]]:
    """Finished, timed steps and layers as samples, and why others could not be used.

    Args:
        measurements: Of any kind; null steps and layers, anchors, kernels and jobs that did not end well are passed
            over.
        device: Where they were measured.
        loop_s: What the training loop of whole models takes beside their operations [s].
    """
    kept = [m for m in measurements if m.outcome is Outcome.DONE and _has_operations(m) and not m.is_anchor]
    keras = keras_graphs([m for m in kept if m.circumstances.framework == "keras"])
    samples, reasons = [], []
    for measurement in kept:
        try:
            graph, setup = _traced(measurement, keras)
        except ForerunError as error:
            reasons.append(f"{measurement.subject}: {error}")
            continue
        samples.append(_sample(measurement, graph, setup, device, loop_s))
    return samples, reasons


def _has_operations(measurement: Measurement) -> bool:
    """Whether it is a step or a layer, and not the layer that does nothing."""
    is_null = measurement.kind is JobKind.LAYER and measurement.subject == "null"
    return measurement.kind in _GRAPHS and not is_null


def _era(framework: str, version: str) -> float:
    """The era of PyTorch's software; other stacks have none and count as the newest."""
    return software_era(version) if version and framework == "pytorch" else NEWEST_ERA


def _traced(measurement: Measurement, keras: Mapping[str, Any]) -> tuple[Graph, TrainingSetup]:
    if measurement.key not in keras:
        found: tuple[Graph, TrainingSetup] = _GRAPHS[measurement.kind](measurement)
        return found
    answer = keras[measurement.key]
    if isinstance(answer, ForerunError):
        raise answer
    graph, setup = answer
    return graph, setup


def _sample(
    measurement: Measurement, graph: Graph, setup: TrainingSetup, device: Device, loop_s: float
) -> DeviceSample:
    is_whole_model = measurement.kind is JobKind.STEP
    version = measurement.circumstances.framework_version
    summary = measurement.summary
    median_s = float(np.median(measurement.repetitions_s)) if summary is None else summary.median_s
    noise = 0.0 if summary is None else 0.5 * (summary.high_s - summary.low_s) / median_s
    return DeviceSample(
        measurement=measurement,
        ops=distinct_ops(graph.ops),
        point=Point(
            device=device,
            setup=setup,
            uses_layer_norm=graph.uses_layer_norm,
            era=_era(measurement.circumstances.framework, version),
        ),
        step_time_s=median_s,
        relative_noise=noise,
        group=measurement.family if is_whole_model else f"layer {measurement.key}",
        is_whole_model=is_whole_model,
        loop_s=loop_s if is_whole_model else 0.0,
    )


def _step_graph(measurement: Measurement) -> tuple[Graph, TrainingSetup]:
    record = as_step_record(measurement)
    assert record is not None
    setup = record.training_setup()
    return trace(request_of(record), setup), setup


def _layer_graph(measurement: Measurement) -> tuple[Graph, TrainingSetup]:
    return layer_graph(measurement.subject, measurement.parameters)


_GRAPHS: dict[JobKind, Any] = {JobKind.STEP: _step_graph, JobKind.LAYER: _layer_graph}


def layer_graph(kind: str, parameters: dict[str, Any]) -> tuple[Graph, TrainingSetup]:
    """Graph of a layer, or of its copies, as ``measurement.layer_runner`` runs it, and its setup.

    A gradient of the output is handed over there; the trace gets it from a product with a constant, whose own
    operations are left out again.
    """
    import torch

    from forerun.measurement.layer_modules import build_layer, copies_of
    from forerun.tracing.built_model import BuiltModel

    trains = text_of(parameters, "mode", "forward") == "train_step"
    asked = {**parameters, "phase": str(Phase.TRAIN if trains else Phase.INFERENCE)}
    setup = setup_of(asked)
    shape = layer_figures(kind, parameters).input_shape[1:]
    num_copies = whole_of(parameters, "copies", 1)
    with torch.device("meta"):
        module = copies_of(lambda: build_layer(kind, parameters), num_copies)
    needs_gradient = trains and flag_of(parameters, "input_gradient", True)

    def make_batch(batch_size: int) -> dict[str, Any]:
        sizes = (batch_size, *shape)
        return {
            "args": tuple(
                torch.empty(sizes, device="meta", requires_grad=needs_gradient) for _ in range(num_copies)
            )
        }

    def loss(outputs: list[torch.Tensor], _: Any) -> torch.Tensor:
        return torch.stack([(output * torch.empty_like(output)).sum() for output in outputs]).sum()

    built = BuiltModel(
        name=f"layer:{kind}", module=module, input_shape=shape, make_batch=make_batch, loss=loss
    )
    graph = trace_built(built, setup)
    return replace(graph, ops=only_modules(graph.ops)), setup


def sampling_weights(samples: Sequence[DeviceSample], whole_share: float = 0.5) -> np.ndarray:
    """Weights of samples: whole models together ``whole_share``, layers the rest, noisy ones less, (n,)."""
    whole = np.asarray([sample.is_whole_model for sample in samples])
    raw = 1.0 / (0.02 + np.asarray([sample.relative_noise for sample in samples]))
    weights = np.zeros(len(samples))
    for chosen, share in ((whole, whole_share), (~whole, 1.0 - whole_share)):
        if chosen.any():
            weights[chosen] = share * raw[chosen] / raw[chosen].sum()
    normal: np.ndarray = weights / weights.sum()
    return normal
